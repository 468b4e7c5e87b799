"""Ask servers whether they live, and wait until they do."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import anyio
import msgspec

from gymrl.concurrency import gather_bounded
from gymrl.errors import GymTransportError, RolloutFailure, ServerDiedError, ServerStartError
from gymrl.gym.registry import DIED

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.gym.client import HttpPool

PROBE_INTERVAL_S = 0.1
PROBE_TIMEOUT_S = 5.0


async def check_alive(pool: HttpPool, addresses: dict[str, str]) -> None:
    """GET ``/`` of every server; any status is life.

    Raises:
        ServerDiedError: One refuses connections or stays silent; names it.
    """

    async def check(item: tuple[str, str]) -> None:
        name, url = item
        problem: object = f"no answer within {PROBE_TIMEOUT_S:g} s"
        with anyio.move_on_after(PROBE_TIMEOUT_S):
            try:
                await pool.get(f"{url}/")
            except RolloutFailure as error:
                problem = error
            else:
                return
        raise ServerDiedError(f"server {name!r} is gone: {problem}", instance=name, url=url)

    await gather_bounded(check, addresses.items())


async def wait_for_registry(pool: HttpPool, url: str, seconds: float) -> None:
    """Wait until a registry says that its servers are ready.

    Registries that have no ``/readyz`` (Gym before 0.7) are ready once they answer.

    Raises:
        ServerStartError: It was not ready within `seconds`; says what it answered last.
    """
    heard: object = "nothing"
    with anyio.move_on_after(seconds):
        while True:
            try:
                answer = await pool.get(f"{url.rstrip('/')}/readyz")
            except GymTransportError as error:
                heard = error
            else:
                if answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    return
                heard = answer.excerpt
            await anyio.sleep(PROBE_INTERVAL_S)
    raise ServerStartError(
        f"the registry at {url} was not ready within {seconds:g} s (set by "
        f"gym.spinup_timeout_s); it answered: {heard}",
        instance="registry",
        url=url,
    )


async def wait_until_up(
    pool: HttpPool,
    name: str,
    url: str,
    waiting: set[str],
    check: Callable[[], None] | None = None,
) -> None:
    """Ask until there is an answer, whatever its status; then take `name` out of `waiting`.

    Args:
        pool: For asking.
        name: The server.
        url: What is asked for.
        waiting: The names of servers that are not up.
        check: Raises `ServerDiedError` when there is no use in waiting.

    Raises:
        ServerStartError: It ended before it answered.
    """
    while True:
        try:
            if check is not None:
                check()
        except ServerDiedError as error:
            raise ServerStartError(
                f"{error.message}\n(before it had answered for the first time)",
                instance=name,
                url=url,
            ) from error
        try:
            await pool.get(url)
        except RolloutFailure:
            await anyio.sleep(PROBE_INTERVAL_S)
        else:
            waiting.discard(name)
            return


class _Report(msgspec.Struct):
    status: str | None = None
    instance: str | None = None
    url: str | None = None
    exit_code: int | None = None
    message: str = ""


_reports = msgspec.json.Decoder(_Report)


async def reported_death(pool: HttpPool, registry_url: str) -> ServerDiedError | None:
    """The first death among a registry's servers, as far as it knows of one.

    Registries of NeMo Gym's own do not tell.

    Raises:
        GymTransportError, GymRequestError: The registry does not answer.
    """
    answer = await pool.get(f"{registry_url.rstrip('/')}/readyz")
    if answer.status != HTTPStatus.SERVICE_UNAVAILABLE:
        return None
    try:
        report = _reports.decode(answer.body)
    except msgspec.DecodeError:
        return None
    if report.status != DIED:
        return None
    return ServerDiedError(
        report.message, instance=report.instance, url=report.url, exit_code=report.exit_code
    )
