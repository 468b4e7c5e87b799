"""The policy model server of a served benchmark: it knows the endpoint's address and key.

Agents ask it, and it asks the endpoint, which speaks OpenAI's Responses API. So the key is in no
agent, no configuration that the registry gives out, and no log.
"""

from __future__ import annotations

import itertools
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from gymrl.errors import GymRequestError, GymTransportError
from gymrl.gym.embedded.base import MAX_BODY_BYTES, ROLLOUT_PREFIX, json_response
from gymrl.gym.listener import Listener, PortRange
from gymrl.listening import read_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from gymrl.gym.client import HttpAnswer, HttpPool


class PolicyServer:
    """Passes requests on to the policy's endpoints, which take turns.

    A status of the endpoint goes back as it is; no answer is HTTP 502.

    Args:
        base_urls: The endpoints, with ``/v1``.
        pool: An open pool that authenticates itself.
        ports: Where to listen.
    """

    def __init__(self, base_urls: Sequence[str], pool: HttpPool, ports: PortRange) -> None:
        self._endpoints = itertools.cycle([url.rstrip("/") for url in base_urls])
        self._pool = pool
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for prefix in ("", ROLLOUT_PREFIX):
            app.router.add_post(f"{prefix}/v1/responses", partial(self._call, "responses"))
            # Agents of Gym's that are programs of others speak this one.
            app.router.add_post(
                f"{prefix}/v1/chat/completions", partial(self._call, "chat/completions")
            )
        app.router.add_get("/v1/models", self._models)
        self._listener = Listener(app, ports)

    @property
    def base_url(self) -> str:
        """What agents ask, with ``/v1``."""
        return f"{self._listener.url}/v1"

    async def start(self) -> None:
        """Listen."""
        await self._listener.start()

    async def stop(self) -> None:
        """Cancel what is being served and stop listening. Safe to call twice."""
        await self._listener.stop()

    async def _call(self, method: str, request: web.Request) -> web.Response:
        url = f"{next(self._endpoints)}/{method}"
        return await _passed_on(self._pool.post(url, await read_body(request)))

    async def _models(self, _: web.Request) -> web.Response:
        return await _passed_on(self._pool.get(f"{next(self._endpoints)}/models"))


async def _passed_on(asked: Awaitable[HttpAnswer]) -> web.Response:
    try:
        answer = await asked
    except (GymTransportError, GymRequestError) as error:
        return json_response(f"the policy's endpoint: {error.message}", HTTPStatus.BAD_GATEWAY)
    headers = {"Content-Type": "application/json"}
    if answer.retry_after_s is not None:
        headers["Retry-After"] = f"{answer.retry_after_s:g}"
    return web.Response(body=answer.body, status=answer.status, headers=headers)
