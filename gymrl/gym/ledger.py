"""Take from the policy's servers what they served to a rollout.

One rollout is served by one server: an agent gets one address for the whole episode. Which one is
known to the agent alone, so every server is asked; all but one know nothing of the rollout.
"""

from __future__ import annotations

import contextlib
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

import anyio
import msgspec

from gymrl.concurrency import deadline, gather_bounded
from gymrl.errors import (
    ConfigError,
    DeadlineExceeded,
    GymrlError,
    GymSchemaError,
    LedgerLostError,
    LedgerMismatchError,
    ProtocolError,
    ServerError,
)
from gymrl.gym.client import raise_for_status
from gymrl.token_ledger import LedgerFrame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from gymrl.config import GymConfig
    from gymrl.gym.client import HttpAnswer, HttpPool

logger = logging.getLogger(__name__)

TAKE_TIMEOUT_S = 60.0
FORGET_TIMEOUT_S = 2.0


class _Greeting(msgspec.Struct, frozen=True):
    server_id: str
    max_bytes: int


class _Told(msgspec.Struct, frozen=True):
    message: str = ""


class _Missing(msgspec.Struct, frozen=True):
    server_id: str
    error: _Told = _Told()


async def open_ledgers(
    pool: HttpPool, config: GymConfig, base_urls: Sequence[str]
) -> LedgerClient | None:
    """The policy's ledgers, where the configuration needs them.

    Raises:
        ConfigError: It needs them and names no policy server.
        ServerError: A server keeps none.
    """
    if config.token_source == "messages":
        return None
    if not base_urls:
        raise ConfigError(
            f"token_source={config.token_source!r} needs the addresses of the policy's servers; "
            "give them as base_urls, also where the Gym servers know them already",
            setting="gym.token_source",
        )
    # The files of images that no answer has; for a comparison their digests are enough.
    is_source = config.token_source == "ledger" or config.side_calls == "keep"
    client = LedgerClient(pool, base_urls, with_media=config.media is not None and is_source)
    await client.greet()
    return client


class LedgerClient:
    """The ledgers of all policy servers.

    Args:
        pool: An open pool.
        base_urls: Of the servers, with ``/v1``.
        timeout_s: To take one ledger.
        with_media: Take the files of images as well.
    """

    def __init__(
        self,
        pool: HttpPool,
        base_urls: Sequence[str],
        timeout_s: float = TAKE_TIMEOUT_S,
        *,
        with_media: bool = False,
    ) -> None:
        self._pool = pool
        self._query = "?images=1" if with_media else ""
        self._urls = tuple(dict.fromkeys(f"{url.rstrip('/')}/ledger" for url in base_urls))
        self._timeout_s = timeout_s
        self._server_ids: dict[str, str] = {}

    async def greet(self) -> None:
        """Learn which process answers at each address, so that a restart shows.

        From then on servers keep the files of images, if it takes them.

        Raises:
            ServerError: A server keeps no ledgers.
            GymTransportError: It does not answer.
        """

        async def ask(url: str) -> None:
            answer = await self._pool.get(f"{url}{self._query}")
            try:
                greeting = msgspec.json.decode(answer.body, type=_Greeting)
            except msgspec.DecodeError as error:
                raise ServerError(
                    f"{url} answered HTTP {answer.status} and no summary of ledgers: this policy "
                    "server keeps none. Serve the policy with gymrl, or set token_source='messages'",
                    url=url,
                ) from error
            if not greeting.max_bytes:
                raise ServerError(
                    f"{url}: ledgers are turned off; set generation.ledger_max_bytes above 0",
                    url=url,
                )
            self._server_ids[url] = greeting.server_id

        await gather_bounded(ask, self._urls)

    @contextlib.asynccontextmanager
    async def rollout(self, rollout_id: str) -> AsyncIterator[RolloutClient]:
        """One rollout's ledger. Left without taking it, by an error or cancelled, it is forgotten.

        Args:
            rollout_id: Of the attempt.
        """
        client = RolloutClient(self, rollout_id, dict(self._server_ids))
        try:
            yield client
        except BaseException:
            with anyio.move_on_after(FORGET_TIMEOUT_S, shield=True):
                await self._forget(rollout_id)
            raise

    async def _forget(self, rollout_id: str) -> None:
        """So that the server need not hold it until it is too old; what fails here only costs memory."""

        async def forget(url: str) -> None:
            try:
                await self._pool.delete(f"{url}/{rollout_id}")
            except GymrlError as error:
                logger.debug("%s did not forget rollout %s: %s", url, rollout_id, error)

        await gather_bounded(forget, self._urls)

    async def take(self, rollout_id: str, server_ids: Mapping[str, str]) -> LedgerFrame | None:
        """A rollout's ledger, which the server forgets; None: no call of it reached any server.

        Args:
            rollout_id: Of the attempt.
            server_ids: Which process answered at each address when the attempt began.

        Raises:
            LedgerLostError: It was evicted, a server was restarted meanwhile, or none answered
                in time.
            LedgerMismatchError: Several servers served the rollout.
            GymTransportError: A server does not answer, or with an error.
            GymSchemaError: An answer is no ledger.
        """

        async def ask(url: str) -> tuple[str, LedgerFrame | None]:
            answer = await self._pool.delete(f"{url}/{rollout_id}{self._query}")
            return self._read(url, rollout_id, answer, server_ids)

        try:
            with deadline(self._timeout_s, f"the token ledger of rollout {rollout_id!r}"):
                answers = await gather_bounded(ask, self._urls)
        except DeadlineExceeded as error:
            raise LedgerLostError(error.message, rollout_id=rollout_id, reason="timeout") from error
        found = [(url, frame) for url, frame in answers if frame is not None]
        if len(found) > 1:
            raise LedgerMismatchError(
                f"rollout {rollout_id!r} was served by {len(found)} policy servers "
                f"({', '.join(url for url, _ in found)}), so that none knows all of it; an agent "
                "must keep to one base URL for a whole rollout",
                field="servers",
            )
        return found[0][1] if found else None

    def _read(
        self, url: str, rollout_id: str, answer: HttpAnswer, server_ids: Mapping[str, str]
    ) -> tuple[str, LedgerFrame | None]:
        reason = None
        frame = None
        try:
            if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
                missing = msgspec.json.decode(answer.body, type=_Missing)
                server_id = missing.server_id
                reason = missing.error.message if answer.status == HTTPStatus.GONE else None
            else:
                raise_for_status(answer, f"the token ledger of rollout {rollout_id!r}")
                frame = LedgerFrame.decode(answer.body)
                server_id = frame.server_id
        except (msgspec.DecodeError, ProtocolError) as error:
            raise GymSchemaError(f"{answer.url}: {error}", url=answer.url, path="$") from error
        if server_ids.get(url) != server_id:
            self._server_ids[url] = server_id
            reason = "the policy server was restarted while the rollout ran"
        if reason is not None:
            raise LedgerLostError(
                f"the token ledger of rollout {rollout_id!r} is lost: {reason}",
                url=url,
                rollout_id=rollout_id,
                reason=reason,
            )
        return url, frame


class RolloutClient:
    """The ledger of one attempt.

    Args:
        ledgers: All of them.
        rollout_id: Of the attempt.
        server_ids: Which process answered at each address when it began.
    """

    def __init__(
        self, ledgers: LedgerClient, rollout_id: str, server_ids: Mapping[str, str]
    ) -> None:
        self._ledgers = ledgers
        self._rollout_id = rollout_id
        self._server_ids = server_ids

    async def take(self) -> LedgerFrame | None:
        """See :meth:`LedgerClient.take`."""
        return await self._ledgers.take(self._rollout_id, self._server_ids)
