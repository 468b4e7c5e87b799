"""What every embedded server has: settings, addresses of its peers, sessions, errors as Gym's.

An embedded server is an aiohttp application in the worker's event loop that speaks NeMo Gym's HTTP
protocol, so that agents and environments of ours and of real Gym can stand in for each other.
Errors look like Gym's: an exception is HTTP 500 with ``repr`` of it as a JSON string, a request
of the wrong shape HTTP 422 with ``{"detail": [...]}``.
"""

from __future__ import annotations

import itertools
import logging
from contextvars import ContextVar
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from aiohttp import web

from gymrl.config import Config
from gymrl.errors import ConfigError
from gymrl.gym.embedded.debugging import left_debugger
from gymrl.gym.embedded.sessions import SessionCookie
from gymrl.gym.schema import decode_mending
from gymrl.listening import read_body
from gymrl.telemetry import RateLimitedLog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)

_session: ContextVar[str] = ContextVar("session")
MAX_BODY_BYTES = 1 << 30
ROLLOUT_PREFIX = "/ng-rollout/{rollout_id}"

GYM_KEYS = frozenset(
    {"entrypoint", "host", "port", "num_workers", "domain", "verified", "description", "value"}
    | {"datasets", "license", "verified_url", "ray_enabled"}
)
"""Keys of an implementation block that describe it to Gym and are no settings of the server."""

_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ServerSettings(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a server, from its implementation block. Subclass to add some."""


class ServerRef(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reference to another instance, as Gym writes it."""

    name: str
    type: str | None = None


class Peers:
    """Addresses of server instances, filled in as they are known.

    Args:
        model_name: What agents put into ``model``.
        names_rollouts: Whether agents tell the policy which rollout a call belongs to.
        key_variable: The environment variable with the policy's key, which no other process gets.
    """

    def __init__(
        self,
        model_name: str = "policy",
        *,
        names_rollouts: bool = False,
        key_variable: str | None = None,
    ) -> None:
        self.model_name = model_name
        self.names_rollouts = names_rollouts
        self.key_variable = key_variable
        self._urls: dict[str, itertools.cycle[str]] = {}

    def set(self, instance: str, *urls: str) -> None:
        """Say where an instance is; several addresses take turns."""
        self._urls[instance] = itertools.cycle([url.rstrip("/") for url in urls])

    def url(self, instance: str) -> str:
        """The instance's address, without a trailing slash.

        Raises:
            ConfigError: There is no such instance.
        """
        if instance not in self._urls:
            known = ", ".join(sorted(self._urls)) or "none"
            raise ConfigError(
                f"no server instance is called {instance!r}; known: {known}", setting=instance
            )
        return next(self._urls[instance])


class RefusedRequest(Exception):
    """The request has the wrong shape or comes at the wrong time: HTTP status and detail.

    Args:
        detail: What FastAPI would put under ``detail``.
        status: 422 where the shape is wrong.
    """

    def __init__(self, detail: object, status: int = HTTPStatus.UNPROCESSABLE_ENTITY) -> None:
        super().__init__(detail)
        self.detail = detail
        self.status = int(status)


class InnerServerError(Exception):
    """A server that this one called failed. Its status goes on to our caller.

    Args:
        message: A text that says which and how; the body of our answer.
        status: The status of our answer.
        retry_after_s: Passed on.
    """

    def __init__(self, message: str, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


def missing_field(name: str, received: object) -> RefusedRequest:
    """The refusal of a body that lacks a field, as FastAPI words it."""
    detail = {"type": "missing", "loc": ["body", name], "msg": "Field required", "input": received}
    return RefusedRequest([detail])


class EmbeddedServer:
    """Base of the embedded servers.

    Args:
        instance: The instance's name in the configuration.
        settings: The implementation block of the configuration.
        peers: Where the other instances are.

    Raises:
        ConfigError: A setting is unknown or wrong; names the instance.
    """

    kind: ClassVar[str] = ""
    Settings: ClassVar[type[ServerSettings]] = ServerSettings

    def __init__(self, instance: str, settings: Mapping[str, Any], peers: Peers) -> None:
        self.instance = instance
        self.peers = peers
        own = {key: value for key, value in settings.items() if key not in GYM_KEYS}
        try:
            self.settings: Any = self.Settings.from_dict(own)
        except ConfigError as error:
            raise ConfigError(f"instance {instance!r}: {error}", setting=error.setting) from error
        self.cookie = SessionCookie(f"{type(self).__name__}___{instance}")
        self._log = RateLimitedLog(logger)

    async def open(self) -> None:
        """Called once before the first request, within the spin-up deadline."""

    async def close(self) -> None:
        """Called once after the last request."""

    def add_routes(self, app: web.Application) -> None:
        """Add the server's own routes."""

    def application(self) -> web.Application:
        """The aiohttp application of this server."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._middleware])
        for path in ("/", "/livez", "/readyz", "/healthz", "/health"):
            app.router.add_get(path, _ok)
        self.add_routes(app)
        return app

    def add_post(self, app: web.Application, path: str, handler: Handler) -> None:
        """A POST route, also under ``/ng-rollout/<id>``, by which Gym names rollouts."""
        app.router.add_post(path, handler)
        app.router.add_post(f"{ROLLOUT_PREFIX}{path}", handler)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        session_id = self.cookie.read(request)
        _session.set(session_id)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = json_response({"detail": error.reason}, error.status)
        except RefusedRequest as refused:
            response = json_response({"detail": refused.detail}, refused.status)
        except InnerServerError as error:
            response = json_response(str(error), error.status)
            if error.retry_after_s is not None:
                response.headers["Retry-After"] = f"{error.retry_after_s:g}"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the protocol makes any a 500 answer
            said = left_debugger(error) or repr(error)
            self._log.log(
                f"{request.path}:{type(error).__name__}",
                logging.WARNING,
                "%s: %s failed: %s",
                self.instance,
                request.path,
                said,
            )
            response = json_response(said, HTTPStatus.INTERNAL_SERVER_ERROR)
        if not response.prepared:
            self.cookie.write(response, session_id)
        return response


def current_session() -> str:
    """The session id of the request that is being handled."""
    return _session.get()


async def _ok(_: web.Request) -> web.Response:
    return json_response({"status": "ok"})


def json_response(value: object, status: int = HTTPStatus.OK) -> web.Response:
    """`value` as JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=int(status), content_type="application/json")


def decode_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The members of a JSON object, not decoded further; text faults are mended.

    Raises:
        msgspec.DecodeError: It is no JSON object.
    """
    return decode_mending(_raw_fields, body)[0]


async def read_fields(request: web.Request) -> dict[str, msgspec.Raw]:
    """The members of a request's JSON body.

    Raises:
        RefusedRequest: The body is no JSON object.
    """
    try:
        return decode_fields(await read_body(request))
    except (msgspec.DecodeError, RecursionError) as error:
        detail = {"type": "json_invalid", "loc": ["body"], "msg": str(error), "input": {}}
        raise RefusedRequest([detail]) from error
