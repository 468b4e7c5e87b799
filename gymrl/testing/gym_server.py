"""A Gym agent and a policy server that do as they are told, on real sockets.

:class:`FakeGymServer` answers ``/run`` from a script, row by row and attempt by attempt, faults
included, and is its own registry::

    async with FakeGymServer({0: [Fault.HTTP_500, gym_answer([([1, 2], [3])])]}) as server:
        config = GymConfig(registry_url=server.url)
        ...
    assert server.requests[0] == 2

:class:`ScriptedModelServer` answers ``/v1/responses`` with token ids, for tests of agents.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio
import msgspec
import numpy as np
from aiohttp import web

from gymrl.addresses import bound_socket
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.publication import split_address
from gymrl.gym.registry import AGENTS, RegistryServer
from gymrl.routed_experts import encode_routes, padded_routes

if TYPE_CHECKING:
    import socket
    from types import TracebackType

    from gymrl.types import RoutesArray


class Fault(enum.Enum):
    """Ways in which an answer goes wrong.

    A refused connection is no fault of a request: route the row to
    :attr:`FakeGymServer.refused_agent`.
    """

    HTTP_400 = enum.auto()
    HTTP_408 = enum.auto()
    HTTP_413 = enum.auto()
    HTTP_422 = enum.auto()
    HTTP_429 = enum.auto()
    HTTP_500 = enum.auto()
    HTTP_503_RETRY_AFTER = enum.auto()
    HTTP_504 = enum.auto()
    CLOSED_AFTER_ACCEPT = enum.auto()
    SILENT = enum.auto()
    STALLED_BODY = enum.auto()
    SHORT_BODY = enum.auto()
    TRUNCATED_JSON = enum.auto()
    HTML_WITH_200 = enum.auto()
    LONE_SURROGATE = enum.auto()
    NAN_LOGPROB = enum.auto()
    NAN_REWARD = enum.auto()
    HUGE_INTEGER = enum.auto()
    DEEP_NESTING = enum.auto()


Answer = Mapping[str, Any] | bytes | Fault
"""A ``/run`` answer as data or as bytes, or a fault."""

Script = Mapping[int, Answer | Sequence[Answer]] | Callable[[dict[str, Any]], Answer]

RETRY_AFTER_S = 2

_STATUSES: dict[Fault, tuple[int, str]] = {
    Fault.HTTP_400: (400, "This model's maximum context length is 16 tokens"),
    Fault.HTTP_408: (408, "Request Timeout"),
    Fault.HTTP_413: (413, "Request Entity Too Large"),
    Fault.HTTP_422: (422, "Field required"),
    Fault.HTTP_429: (429, "Too Many Requests"),
    Fault.HTTP_500: (500, "RuntimeError('scripted')"),
    Fault.HTTP_503_RETRY_AFTER: (503, "Service Unavailable"),
    Fault.HTTP_504: (504, "Gateway Timeout"),
}


def gym_answer(
    turns: Iterable[tuple[Sequence[int], Sequence[int]]],
    *,
    reward: Any = 1.0,
    texts: Sequence[str] | None = None,
    incomplete_reason: str | None = None,
    **extras: Any,
) -> dict[str, Any]:
    """A ``/run`` answer with one assistant message a turn, a tool's output between them.

    Args:
        turns: For each turn the whole prompt and the sampled ids; log-probabilities are -0.5.
        reward: The verifier's.
        texts: What the messages say; ``turn 0``, ``turn 1``, ... by default.
        incomplete_reason: Of the final response.
        **extras: Further fields of the answer.
    """
    output: list[dict[str, Any]] = []
    for number, (prompt, sampled) in enumerate(turns):
        if number:
            output.append({"type": "function_call_output", "call_id": "c", "output": "{}"})
        text = texts[number] if texts else f"turn {number}"
        content = [{"type": "output_text", "text": text, "annotations": []}]
        output.append(
            {
                "type": "message",
                "role": "assistant",
                "content": content,
                "prompt_token_ids": list(prompt),
                "generation_token_ids": list(sampled),
                "generation_log_probs": [-0.5] * len(sampled),
            }
        )
    details = {"reason": incomplete_reason} if incomplete_reason else None
    response = {"id": "resp", "output": output, "incomplete_details": details}
    return {"responses_create_params": {}, "response": response, "reward": reward, **extras}


_PLAIN_ANSWER = gym_answer([([1, 2, 3], [4, 5])])


class FakeGymServer:
    """An agent that answers from a script, with its registry, on one loopback port.

    Rows are told apart by ``_rowidx``, else by ``_ng_task_index``, else they are row -1.

    Args:
        script: For each row its answer, or one for each attempt (the last one repeats); or a
            function of the row's body. Rows that it does not name get a plain good answer.
        agents: Names of the agents it poses as.
        barrier: Hold every answer until so many requests are under way.

    Attributes:
        requests: How many requests came for each row.
        bodies: The body of each row's last request.
        in_flight: Requests under way.
        most_in_flight: The most there ever were.
        disconnects: Requests whose client went away.
    """

    refused_agent = "refused_agent"
    """An agent in the registry at whose port nobody listens."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        agents: Sequence[str] = ("fake_agent",),
        barrier: int = 0,
    ) -> None:
        self._script: Script = script if script is not None else {}
        self._agents = tuple(agents)
        self._barrier = barrier
        self._barrier_open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._arrived = asyncio.Condition()
        self._registry = RegistryServer()
        app = self._registry.application(max_body_bytes=1 << 28)
        app.router.add_post("/run", self._run)
        self._listener = Listener(app, PortRange())
        self._refusing: socket.socket | None = None
        self.requests: Counter[int] = Counter()
        self.bodies: dict[int, dict[str, Any]] = {}
        self.in_flight = 0
        self.most_in_flight = 0
        self.disconnects = 0

    @property
    def url(self) -> str:
        """Address of the registry, which is also the agent's."""
        return self._listener.url

    async def start(self) -> None:
        """Listen, and publish the agents."""
        await self._listener.start()
        host, port = split_address(self.url)
        # Held, so that nobody else comes to listen there.
        self._refusing = bound_socket("127.0.0.1", 0)
        refused_port = self._refusing.getsockname()[1]
        ports = dict.fromkeys(self._agents, port) | {self.refused_agent: refused_port}
        config = {
            name: {AGENTS: {"fake": {"entrypoint": "app.py", "host": host, "port": agent_port}}}
            for name, agent_port in ports.items()
        }
        self._registry.publish(config, [{"process_name": n, "port": p} for n, p in ports.items()])

    async def stop(self) -> None:
        """Stop listening; requests under way are cancelled. Safe to call twice."""
        if self._refusing is not None:
            self._refusing.close()
        await self._listener.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def wait_for_requests(self, count: int) -> None:
        """Wait until so many requests have come."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.requests.total() >= count)

    async def wait_until_idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    async def _run(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        row = body.get("_rowidx", body.get("_ng_task_index", -1))
        attempt = self.requests[row]
        self.requests[row] += 1
        self.bodies[row] = body
        self.in_flight += 1
        self._idle.clear()
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async with self._arrived:
                self._arrived.notify_all()
            await self._wait_at_barrier()
            return await _respond(request, self._answer(row, attempt, body))
        except asyncio.CancelledError:
            self.disconnects += 1
            raise
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def _wait_at_barrier(self) -> None:
        if self.in_flight >= self._barrier:
            self._barrier_open.set()
        await self._barrier_open.wait()

    def _answer(self, row: int, attempt: int, body: dict[str, Any]) -> Answer:
        if callable(self._script):
            return self._script(body)
        scripted = self._script.get(row, _PLAIN_ANSWER)
        if isinstance(scripted, Sequence) and not isinstance(scripted, bytes):
            return scripted[min(attempt, len(scripted) - 1)]
        return scripted


async def _respond(request: web.Request, answer: Answer) -> web.StreamResponse:
    if not isinstance(answer, Fault):
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        return web.Response(body=body, content_type="application/json")
    if answer in _STATUSES:
        status, text = _STATUSES[answer]
        headers = {}
        if answer is Fault.HTTP_503_RETRY_AFTER:
            headers["Retry-After"] = str(RETRY_AFTER_S)
        return web.json_response(text, status=status, headers=headers)
    if answer is Fault.SILENT:
        await anyio.sleep_forever()
    if answer is Fault.CLOSED_AFTER_ACCEPT:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()
    if answer in (Fault.STALLED_BODY, Fault.SHORT_BODY):
        return await _unfinished(request, stall=answer is Fault.STALLED_BODY)
    if answer is Fault.HTML_WITH_200:
        return web.Response(text="<html>try again later</html>", content_type="text/html")
    return web.Response(body=_broken_body(answer), content_type="application/json")


async def _unfinished(request: web.Request, *, stall: bool) -> web.StreamResponse:
    body = json.dumps(_PLAIN_ANSWER).encode()
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.content_length = len(body)
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if stall:
        await anyio.sleep_forever()
    if request.transport is not None:
        request.transport.abort()
    return response


def _broken_body(fault: Fault) -> bytes:
    body = json.dumps(gym_answer([([1, 2, 3], [4, 5])], reward=0.75, extra="HERE")).encode()
    if fault is Fault.TRUNCATED_JSON:
        return body[: len(body) // 2]
    replacements = {
        Fault.LONE_SURROGATE: (b"HERE", rb"a\ud800b"),
        Fault.NAN_LOGPROB: (b"[-0.5, -0.5]", b"[-0.5, NaN]"),
        Fault.NAN_REWARD: (b"0.75", b"NaN"),
        Fault.HUGE_INTEGER: (b'"HERE"', str(2**70).encode()),
        Fault.DEEP_NESTING: (b'"HERE"', b"[" * 100_000 + b"]" * 100_000),
    }
    old, new = replacements[fault]
    return body.replace(old, new)


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One scripted answer of a policy.

    Attributes:
        text: What the message says; None: no message.
        tool_calls: Name and arguments (JSON text) of each tool call.
        reasoning: Text of a reasoning item before them.
        incomplete_reason: Cut short for this reason.
        status: Not 200: answer with this status and `text` as the body.
        delay_s: Wait so long first.
        has_routes: Return ``routed_experts`` beside the tokens: :func:`scripted_routes` of them,
            less the last one's.
    """

    text: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()
    reasoning: str | None = None
    incomplete_reason: str | None = None
    status: int = 200
    delay_s: float = 0.0
    has_routes: bool = False


def scripted_routes(token_ids: Sequence[int]) -> RoutesArray:
    """``[T, 2, 2]``: the experts that a scripted policy says each token went through.

    They depend on the token alone, so that a row that is laid along another token shows.
    """
    first = np.asarray(token_ids, dtype=np.int16).reshape(-1, 1, 1)
    places = np.arange(4, dtype=np.int16).reshape(1, 2, 2)
    return ((first + places) % 128).astype(np.int8)


class ScriptedModelServer:
    """A policy that answers ``/v1/responses`` from a script, with token ids.

    Its tokens are the UTF-8 bytes of the text. A call's ``prompt_token_ids`` are those of the last
    call in the input plus what it sampled, verbatim, plus the bytes of the items that came after;
    so a faithful agent makes contiguous rollouts.

    Args:
        script: The answers in the order of calls (the last one repeats), or a function of the
            request's body.

    Attributes:
        bodies: The request bodies, in order.
        raw_bodies: The same as they came.
        paths: Their paths.
        cookies: The cookies they brought.
        disconnects: Requests whose client went away.
    """

    def __init__(self, script: Sequence[ModelCall] | Callable[[dict[str, Any]], ModelCall]) -> None:
        self._script = script
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_post("/ng-rollout/{rollout_id}/v1/responses", self._responses)
        self._listener = Listener(app, PortRange())
        self.bodies: list[dict[str, Any]] = []
        self.raw_bodies: list[bytes] = []
        self.paths: list[str] = []
        self.cookies: list[dict[str, str]] = []
        self.disconnects = 0
        self._disconnected = asyncio.Condition()

    @property
    def base_url(self) -> str:
        """With ``/v1``."""
        return f"{self._listener.url}/v1"

    async def __aenter__(self) -> Self:
        await self._listener.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening. Safe to call twice."""
        await self._listener.stop()

    async def wait_for_disconnects(self, count: int) -> None:
        """Wait until so many requests have lost their client."""
        async with self._disconnected:
            await self._disconnected.wait_for(lambda: self.disconnects >= count)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted"}]})

    async def _responses(self, request: web.Request) -> web.Response:
        raw = await request.read()
        body = json.loads(raw)
        number = len(self.bodies)
        self.bodies.append(body)
        self.raw_bodies.append(raw)
        self.paths.append(request.path)
        self.cookies.append(dict(request.cookies))
        if callable(self._script):
            call = self._script(body)
        else:
            call = self._script[min(number, len(self._script) - 1)]
        try:
            await anyio.sleep(call.delay_s)
        except asyncio.CancelledError:
            self.disconnects += 1
            with anyio.CancelScope(shield=True):
                async with self._disconnected:
                    self._disconnected.notify_all()
            raise
        if call.status != 200:
            return web.Response(text=call.text or "", status=call.status)
        response = web.json_response(_model_response(call, body, number))
        response.set_cookie("ScriptedModel___policy_model", f"m{number}")
        return response


def _model_response(call: ModelCall, body: dict[str, Any], number: int) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    if call.reasoning is not None:
        summary = [{"type": "summary_text", "text": call.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary})
    if call.text is not None:
        content = [{"type": "output_text", "text": call.text, "annotations": []}]
        message = {"type": "message", "id": f"msg_{number}", "role": "assistant"}
        items.append(message | {"status": "completed", "content": content})
    for place, (name, arguments) in enumerate(call.tool_calls):
        call_id = f"call_{number}_{place}"
        function_call = {"type": "function_call", "id": call_id, "call_id": call_id}
        items.append(function_call | {"name": name, "arguments": arguments, "status": "completed"})
    prompt = _prompt_ids(body["input"])
    said = f"{call.text or ''}{call.reasoning or ''}{call.tool_calls or ''}"
    sampled = list(said.encode("utf-8", "surrogatepass"))
    if items:
        items[-1] |= {
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": [-0.30000000000000004] * len(sampled),
        }
        if call.has_routes:
            routes = padded_routes(
                scripted_routes([*prompt, *sampled][:-1]), len(prompt), len(sampled)
            )
            items[-1]["routed_experts"] = encode_routes(routes)
    reason = call.incomplete_reason
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0.0,
        "model": body.get("model") or "scripted",
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "incomplete_details": {"reason": reason} if reason else None,
        "usage": {
            "input_tokens": len(prompt),
            "output_tokens": len(sampled),
            "total_tokens": len(prompt) + len(sampled),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _prompt_ids(given: str | list[dict[str, Any]]) -> list[int]:
    if isinstance(given, str):
        return list(given.encode())
    known: list[int] = []
    since = 0
    for place, item in enumerate(given):
        if item.get("generation_token_ids"):
            known = [*item["prompt_token_ids"], *item["generation_token_ids"]]
            since = place + 1
    added = "".join(str(i.get("content") or i.get("output") or "") for i in given[since:])
    return known + list(added.encode("utf-8", "surrogatepass"))
