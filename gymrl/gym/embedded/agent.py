"""Agents: the server that a row is posted to, and that drives one episode from seed to verdict."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from aiohttp import web

from gymrl.concurrency import deadline
from gymrl.config import require
from gymrl.errors import DeadlineExceeded, GymRequestError, GymTransportError
from gymrl.gym.client import HttpAnswer, HttpPool
from gymrl.gym.embedded.base import (
    EmbeddedServer,
    InnerServerError,
    Peers,
    ServerRef,
    ServerSettings,
    current_session,
    missing_field,
    read_fields,
)
from gymrl.gym.schema import is_null, plain
from gymrl.listening import read_body

if TYPE_CHECKING:
    from collections.abc import Mapping

PASSED_ON = frozenset(
    {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)
"""5xx statuses (and 429) that keep their meaning one hop further; other 5xx become 500."""


class AgentSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that every agent has.

    Attributes:
        resources_server: The environment.
        model_server: The policy.
        max_steps: Model calls an episode makes at most; None: no limit.
        model_timeout_s: Deadline of one model call. A dead model server then fails the row
            instead of holding it for ever.
        environment_timeout_s: Deadline of seeding, of one tool call, of verifying.
    """

    resources_server: ServerRef
    model_server: ServerRef
    max_steps: int | None = None
    model_timeout_s: float = 1200.0
    environment_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        require(
            self.max_steps is None or self.max_steps > 0,
            "max_steps",
            self.max_steps,
            "must be positive, or left out",
        )
        for name in ("model_timeout_s", "environment_timeout_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")


class Episode:
    """One episode's connections to other servers, with the cookies that each of them gave.

    Cookies are kept apart by server and forwarded by hand, because each server knows the episode
    by its own.

    Args:
        agent: Whose episode it is.
        prefix: ``/ng-rollout/<id>`` when the caller named the rollout so, or the row names it and
            the policy is to know; else nothing.
    """

    def __init__(self, agent: AgentServer, prefix: str) -> None:
        self._agent = agent
        self._prefix = prefix
        settings = agent.settings
        self._environment_url = agent.peers.url(settings.resources_server.name)
        # One address for the whole episode: its server may have the prefix in its cache.
        self._model_url = agent.peers.url(settings.model_server.name)
        self.environment_cookies: dict[str, str] = {}
        self.model_cookies: dict[str, str] = {}

    async def ask_model(self, body: bytes) -> bytes:
        """POST to the policy's ``/v1/responses``.

        Raises:
            InnerServerError: No answer with a status below 400 came in time.
        """
        url = f"{self._model_url}{self._prefix}/v1/responses"
        timeout = self._agent.settings.model_timeout_s
        answer = await self._post(url, body, self.model_cookies, timeout, "model_timeout_s")
        self._agent.refuse_failure(answer)
        self.model_cookies |= answer.cookies
        return answer.body

    async def seed(self, body: bytes) -> None:
        """POST to the environment's ``/seed_session``. Raises as :meth:`ask_model`."""
        answer = await self._environment("/seed_session", body, self.environment_cookies)
        self._agent.refuse_failure(answer)

    async def call_tool(self, name: str, body: bytes) -> str:
        """POST to a tool; the body of the answer as text, whatever its status.

        Raises:
            InnerServerError: No answer came in time.
        """
        answer = await self._environment(f"/{name}", body, self.environment_cookies)
        return answer.body.decode("utf-8", "replace")

    async def verify(self, body: bytes, agent_cookie: dict[str, str]) -> bytes:
        """POST to the environment's ``/verify`` with everybody's cookies.

        Raises:
            InnerServerError: No answer with a status below 400 came in time.
        """
        cookies = agent_cookie | self.environment_cookies | self.model_cookies
        answer = await self._environment("/verify", body, cookies)
        self._agent.refuse_failure(answer)
        return answer.body

    async def _environment(self, path: str, body: bytes, cookies: dict[str, str]) -> HttpAnswer:
        timeout = self._agent.settings.environment_timeout_s
        url = f"{self._environment_url}{path}"
        answer = await self._post(url, body, cookies, timeout, "environment_timeout_s")
        self.environment_cookies |= answer.cookies
        return answer

    async def _post(
        self, url: str, body: bytes, cookies: dict[str, str], timeout: float, setting: str
    ) -> HttpAnswer:
        try:
            with deadline(timeout, f"an answer from {url}", f"{self._agent.instance}.{setting}"):
                return await self._agent.pool.post(url, body, cookies)
        except DeadlineExceeded as error:
            raise self._agent.inner_error(error.message, HTTPStatus.GATEWAY_TIMEOUT) from error
        except (GymTransportError, GymRequestError) as error:
            raise self._agent.inner_error(error.message, HTTPStatus.BAD_GATEWAY) from error


class AgentServer(EmbeddedServer):
    """Base of agents: subclasses say in :meth:`responses` how an episode goes.

    ``POST /run`` seeds the environment, lets :meth:`responses` run the episode, and answers with
    the environment's verdict as it is. ``POST /v1/responses`` is the middle part alone.

    A status that an inner server gave decides what the row's failure means, so it goes on to our
    caller: 4xx stays what it is (a context overflow is the row's own fault), 429, 503 and 504 as
    well, any other 5xx is 500. The body is a JSON string with the inner body inside.
    """

    kind: ClassVar[str] = "responses_api_agents"
    Settings: ClassVar[type[ServerSettings]] = AgentSettings

    def __init__(self, instance: str, settings: Mapping[str, Any], peers: Peers) -> None:
        super().__init__(instance, settings, peers)
        self.pool = HttpPool()

    async def open(self) -> None:
        """Open the connections to other servers."""
        await self.pool.__aenter__()

    async def close(self) -> None:
        """Close them."""
        await self.pool.close()

    async def responses(self, params: dict[str, msgspec.Raw], episode: Episode) -> bytes:
        """Run the episode and return the final response as JSON.

        Args:
            params: Members of ``responses_create_params`` as they came.
            episode: Connections to model and environment.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how an episode goes")

    def add_routes(self, app: web.Application) -> None:
        """Add ``/run`` and ``/v1/responses``, plain and under ``/ng-rollout/<id>``."""
        self.add_post(app, "/run", self._run)
        self.add_post(app, "/v1/responses", self._responses)

    async def _run(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        row = await read_fields(request)
        params = row.get("responses_create_params", msgspec.Raw(b""))
        if is_null(params):
            raise missing_field("responses_create_params", sorted(row))
        episode = self._episode(request, plain(row.get("_ng_rollout_id", msgspec.Raw(b""))))
        await episode.seed(body)
        response = await self.responses(_members(params), episode)
        verdict = await episode.verify(
            msgspec.json.encode({**row, "response": msgspec.Raw(response)}),
            {self.cookie.name: self.cookie.value(current_session())},
        )
        return web.Response(body=verdict, content_type="application/json")

    async def _responses(self, request: web.Request) -> web.Response:
        params = await read_fields(request)
        episode = self._episode(request)
        episode.environment_cookies = {
            name: value for name, value in request.cookies.items() if name != self.cookie.name
        }
        body = await self.responses(params, episode)
        response = web.Response(body=body, content_type="application/json")
        for name, value in (episode.environment_cookies | episode.model_cookies).items():
            response.set_cookie(name, value, samesite="lax")
        return response

    def _episode(self, request: web.Request, row_id: object = None) -> Episode:
        rollout_id = request.match_info.get("rollout_id")
        if rollout_id is None and self.peers.names_rollouts and isinstance(row_id, str):
            rollout_id = row_id
        return Episode(self, f"/ng-rollout/{rollout_id}" if rollout_id else "")

    def inner_error(
        self, message: str, status: int, retry_after_s: float | None = None
    ) -> InnerServerError:
        """An inner server's failure in the words that Gym's servers use."""
        return InnerServerError(
            f"Hit an exception in {self.cookie.name} calling an inner server: {message}",
            status,
            retry_after_s,
        )

    def refuse_failure(self, answer: HttpAnswer) -> None:
        """Raise `InnerServerError` for a status of 400 or more."""
        if answer.status < HTTPStatus.BAD_REQUEST:
            return
        own_fault = answer.status < HTTPStatus.INTERNAL_SERVER_ERROR
        kept = own_fault or answer.status in PASSED_ON
        raise self.inner_error(
            f"{answer.url} answered HTTP {answer.status}: {answer.excerpt!r}",
            answer.status if kept else HTTPStatus.INTERNAL_SERVER_ERROR,
            answer.retry_after_s,
        )


def _members(params: msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(params, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise missing_field("responses_create_params", str(error)) from error
