"""A policy that says what it is told to, with token ids, on a real socket: for tests of agents.

::

    calls = [ModelCall(tool_calls=(("add", '{"a": 1, "b": 2}'),)), ModelCall(text="3")]
    async with ScriptedModelServer(calls) as policy:
        ...  # an agent that is given policy.base_url
    assert len(policy.bodies) == 2
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio
import msgspec
import numpy as np
from aiohttp import web

from gymrl.gym.listener import Listener, PortRange
from gymrl.routed_experts import encode_routes, padded_routes

if TYPE_CHECKING:
    from types import TracebackType

    from gymrl.types import RoutesArray


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
