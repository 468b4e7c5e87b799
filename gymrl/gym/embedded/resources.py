"""Environments: the server that seeds a session, answers tool calls and verifies the end.

Write one by subclassing :class:`ResourcesServer`::

    class WordCount(ResourcesServer):
        @tool
        async def count_words(self, state: None, text: str) -> str:
            return str(len(text.split()))

        async def verify(self, row: dict[str, Any], reply: Reply, state: None) -> Verdict:
            return Verdict(reward=float(reply.text.strip() == str(row["words"])))
"""

from __future__ import annotations

import inspect
import math
import typing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec
from aiohttp import web

from gymrl.errors import ConfigError
from gymrl.gym.embedded.aggregate import aggregate
from gymrl.gym.embedded.base import (
    EmbeddedServer,
    Peers,
    RefusedRequest,
    current_session,
    json_response,
    missing_field,
    read_fields,
)
from gymrl.gym.embedded.reply import Reply, fields_as_data
from gymrl.gym.embedded.sessions import SessionStates
from gymrl.gym.schema import is_null, path_of
from gymrl.listening import read_body

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FunctionT = TypeVar("FunctionT", bound="Callable[..., Any]")

RESERVED_NAMES = frozenset(
    {"run", "verify", "seed_session", "close_session", "aggregate_metrics", "reverify_mode"}
    | {"livez", "readyz", "healthz", "health", "v1"}
)
"""Paths of the protocol. No tool may be called so, and no model may call them."""

_MARK = "__gymrl_tool__"


class ToolError(Exception):
    """Raised by a tool: HTTP 400 with this text, which the model gets to read."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier says.

    Attributes:
        reward: Finite.
        components: Parts of the reward by name; they must sum to it.
        mask_sample: Leave the sample out of the loss.
        extras: Further fields of the answer; JSON must be able to carry them.
    """

    reward: float
    components: dict[str, float] | None = None
    mask_sample: bool = False
    extras: dict[str, Any] = {}

    def __post_init__(self) -> None:
        for value in (self.reward, *(self.components or {}).values()):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"a verdict's numbers must be numbers, not {value!r}; use float()")
            if not math.isfinite(value):
                raise ValueError(f"a verdict's numbers must be finite, not {value!r}")


def tool(function: FunctionT) -> FunctionT:
    """Make a method of a :class:`ResourcesServer` a tool, served at ``POST /<its name>``.

    The method takes the session's state and then, as annotated parameters, the call's arguments;
    they are checked against the annotations. It returns a string, which the model reads as it is,
    or data, which it reads as JSON.
    """
    setattr(function, _MARK, True)
    return function


class _Tool:
    """A tool method with the struct of its arguments."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        name = getattr(method, "__name__", "tool")
        try:
            hints = typing.get_type_hints(method)
        except NameError as error:
            raise ConfigError(
                f"tool {name!r}: its annotations must be importable at run time ({error})",
                setting=name,
            ) from error
        parameters = list(inspect.signature(method).parameters.values())
        if not parameters:
            raise ConfigError(f"tool {name!r} must take the session's state", setting=name)
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for parameter in parameters[1:]:
            kind = hints.get(parameter.name, Any)
            if parameter.default is inspect.Parameter.empty:
                fields.append((parameter.name, kind))
            else:
                fields.append((parameter.name, kind, parameter.default))
        arguments = msgspec.defstruct(
            f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True
        )
        self._decoder = msgspec.json.Decoder(arguments)

    async def call(self, state: Any, body: bytes) -> Any:
        try:
            arguments = self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            place = path_of(error) if isinstance(error, msgspec.ValidationError) else "$"
            location = ["body", *[part for part in place.strip("$").split(".") if part]]
            detail = {"type": "value_error", "loc": location, "msg": str(error)}
            raise RefusedRequest([detail]) from error
        return await self.method(state, **msgspec.structs.asdict(arguments))


class ResourcesServer(EmbeddedServer):
    """Base of environments. See the module for an example.

    Requests of one session come one after the other; sessions run concurrently in one event loop,
    so slow work belongs into a thread.
    """

    kind: ClassVar[str] = "resources_servers"

    def __init__(self, instance: str, settings: Mapping[str, Any], peers: Peers) -> None:
        super().__init__(instance, settings, peers)
        self.sessions: SessionStates[Any] = SessionStates()
        self._tools = {
            name: _Tool(getattr(self, name))
            for name, member in inspect.getmembers(type(self), callable)
            if hasattr(member, _MARK)
        }
        reserved = sorted(RESERVED_NAMES.intersection(self._tools))
        if reserved:
            raise ConfigError(
                f"instance {instance!r}: no tool may be called {reserved[0]!r}; "
                "the protocol has a route of that name",
                setting=reserved[0],
            )

    async def seed_session(self, row: dict[str, Any]) -> Any:
        """Make the state of a new session. Default: None.

        Args:
            row: The row, ``responses_create_params`` included.
        """
        return None

    async def verify(self, row: dict[str, Any], reply: Reply, state: Any) -> Verdict:
        """Judge the end of an episode.

        Args:
            row: The row, without ``responses_create_params``.
            reply: What the model answered, over all its calls.
            state: As :meth:`seed_session` made it; None when no session was seeded.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to verify")

    def add_routes(self, app: web.Application) -> None:
        """Add the protocol's routes and one for each tool."""
        self.add_post(app, "/seed_session", self._seed_session)
        self.add_post(app, "/verify", self._verify)
        app.router.add_post("/aggregate_metrics", self._aggregate_metrics)
        app.router.add_get("/reverify_mode", _reverify_mode)
        for name, served in self._tools.items():
            self.add_post(app, f"/{name}", self._tool_handler(served))

    async def _seed_session(self, request: web.Request) -> web.Response:
        fields = await read_fields(request)
        state = await self.seed_session(fields_as_data(fields))
        self.sessions.put(current_session(), state)
        return json_response({})

    def _tool_handler(self, served: _Tool) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            session = current_session()
            if session not in self.sessions:
                raise RefusedRequest(
                    "this session is unknown: POST /seed_session first and send its cookie",
                    HTTPStatus.BAD_REQUEST,
                )
            try:
                result = await served.call(self.sessions.get(session), await read_body(request))
            except ToolError as error:
                return json_response({"error": str(error)}, HTTPStatus.BAD_REQUEST)
            if isinstance(result, str):
                return web.Response(text=result)
            return json_response(result)

        return handle

    async def _verify(self, request: web.Request) -> web.Response:
        fields = await read_fields(request)
        for name in ("responses_create_params", "response"):
            if is_null(fields.get(name, msgspec.Raw(b""))):
                raise missing_field(name, sorted(fields))
        try:
            reply = Reply.of(fields["response"])
        except msgspec.ValidationError as error:
            detail = {"type": "value_error", "loc": ["body", "response"], "msg": str(error)}
            raise RefusedRequest([detail]) from error
        row = fields_as_data(fields, "responses_create_params", "response")
        state = self.sessions.pop(current_session())
        verdict = await self.verify(row, reply, state)
        answer: dict[str, Any] = {
            **verdict.extras,
            "responses_create_params": fields["responses_create_params"],
            "response": fields["response"],
            "reward": verdict.reward,
            "mask_sample": verdict.mask_sample,
            "failure_kind": None,
            "failure_reason": None,
        }
        if verdict.components is not None:
            answer |= {"reward_components": verdict.components}
        return json_response(answer)

    async def _aggregate_metrics(self, request: web.Request) -> web.Response:
        fields = await read_fields(request)
        if "verify_responses" not in fields:
            raise missing_field("verify_responses", sorted(fields))
        responses = fields_as_data(fields)["verify_responses"]
        if not isinstance(responses, list) or not all(isinstance(r, dict) for r in responses):
            raise RefusedRequest(
                [
                    {
                        "type": "list_type",
                        "loc": ["body", "verify_responses"],
                        "msg": "Input should be a list of objects",
                    }
                ]
            )
        return json_response(aggregate(responses))


async def _reverify_mode(_: web.Request) -> web.Response:
    return json_response("unknown")
