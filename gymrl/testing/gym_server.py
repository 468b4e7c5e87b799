"""A Gym agent that does as it is told, on a real socket.

:class:`FakeGymServer` answers ``/run`` from a script, row by row and attempt by attempt, faults
included, and is its own registry::

    async with FakeGymServer({0: [Fault.HTTP_500, gym_answer([([1, 2], [3])])]}) as server:
        config = GymConfig(registry_url=server.url)
        ...
    assert server.requests[0] == 2
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio
from aiohttp import web

from gymrl.addresses import bound_socket
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.publication import split_address
from gymrl.gym.registry import AGENTS, RegistryServer

if TYPE_CHECKING:
    import socket
    from types import TracebackType


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
