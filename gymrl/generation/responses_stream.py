"""The Responses API as a stream of typed events.

Tool calls and reasoning are known only when the text has ended, so their items' events follow each
other closely then. Where neither can be in it, the text is sent in pieces as it comes. The last
event holds the whole answer, token fields included, as the call without a stream would give it.
"""

from __future__ import annotations

import math
import uuid
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.generation.chunks import write_or_tell
from gymrl.generation.responses_api import opened_response, response_of
from gymrl.generation.streaming import TextStream

if TYPE_CHECKING:
    from aiohttp import web
    from anyio.streams.memory import MemoryObjectSendStream

    from gymrl.generation.base import SamplingParams
    from gymrl.generation.policy import Completion, Conversation, Policy
    from gymrl.generation.requests import ResponsesRequest

_TOKEN_FIELDS = (
    "prompt_token_ids",
    "generation_token_ids",
    "generation_log_probs",
    "routed_experts",
)


class ResponseStream:
    """One streamed answer.

    Args:
        policy: Samples.
        request: What was asked.
        conversation: Of the request.
        prompt_ids: Of the conversation.
    """

    def __init__(
        self,
        policy: Policy,
        request: ResponsesRequest,
        conversation: Conversation,
        prompt_ids: list[int],
    ) -> None:
        self._policy = policy
        self._request = request
        self._conversation = conversation
        self._prompt_ids = prompt_ids
        self._opened = opened_response(request, policy.model_name)
        self._streams_text = policy.chat.reasoning_parser == "none" and not conversation.tools
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._number = 0

    async def write(self, response: web.StreamResponse, sampling: SamplingParams) -> None:
        """Sample and write the events; cancelling ends the generation.

        An error after the first event is sent as an event of its own, as there is no status left
        to tell it with.
        """

        async def tell(error: Exception) -> None:
            fields = {"code": type(error).__name__, "message": str(error), "param": None}
            await self._write(response, "error", **fields)

        await write_or_tell(lambda: self._write_events(response, sampling), tell)

    async def _write_events(self, response: web.StreamResponse, sampling: SamplingParams) -> None:
        await self._write(response, "response.created", response=self._opened)
        await self._write(response, "response.in_progress", response=self._opened)
        text = TextStream(self._policy.chat, sampling.stop)
        completion = await self._sample(response, sampling, text)
        await self._write_completion(response, completion, text)

    async def _sample(
        self, response: web.StreamResponse, sampling: SamplingParams, text: TextStream
    ) -> Completion:
        send, receive = anyio.create_memory_object_stream[int](math.inf)
        completions: list[Completion] = []
        async with receive, anyio.create_task_group() as group:
            group.start_soon(self._sample_into, completions, sampling, send)
            if self._streams_text:
                await self._open_message(response)
            async for token_id in receive:
                piece = text.push(token_id) if self._streams_text else ""
                if piece:
                    await self._write_delta(response, piece)
        return completions[0]

    async def _sample_into(
        self,
        completions: list[Completion],
        sampling: SamplingParams,
        send: MemoryObjectSendStream[int],
    ) -> None:
        async with send:
            completion = await self._policy.sample(
                self._prompt_ids,
                self._conversation,
                sampling,
                lambda token_id, _: send.send_nowait(token_id),
            )
            completions.append(completion)

    async def _open_message(self, response: web.StreamResponse) -> None:
        item = {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        part["logprobs"] = None
        await self._write(response, "response.output_item.added", output_index=0, item=item)
        await self._write(response, "response.content_part.added", **self._place(0), part=part)

    async def _write_delta(
        self, response: web.StreamResponse, piece: str, output_index: int = 0
    ) -> None:
        await self._write(
            response,
            "response.output_text.delta",
            **self._place(output_index),
            delta=piece,
            logprobs=[],
        )

    async def _write_completion(
        self, response: web.StreamResponse, completion: Completion, text: TextStream
    ) -> None:
        whole = response_of(self._request, completion, self._policy.model_name)
        whole |= {key: self._opened[key] for key in ("id", "created_at")}
        for index, item in enumerate(whole["output"]):
            if item["type"] == "message":
                item["id"] = self._message_id
                await self._write_message(response, index, item, text)
            else:
                await self._write_item(response, index, item)
            await self._write(response, "response.output_item.done", output_index=index, item=item)
        await self._write(response, f"response.{whole['status']}", response=whole)

    async def _write_message(
        self, response: web.StreamResponse, index: int, item: dict[str, Any], text: TextStream
    ) -> None:
        (part,) = item["content"]
        if self._streams_text:
            rest = text.finish(part["text"])
        else:
            opened = {**_without_tokens(item), "status": "in_progress", "content": []}
            await self._write(
                response, "response.output_item.added", output_index=index, item=opened
            )
            empty = {**part, "text": ""}
            await self._write(
                response, "response.content_part.added", **self._place(index), part=empty
            )
            rest = part["text"]
        if rest:
            await self._write_delta(response, rest, index)
        await self._write(
            response,
            "response.output_text.done",
            **self._place(index),
            text=part["text"],
            logprobs=[],
        )
        await self._write(response, "response.content_part.done", **self._place(index), part=part)

    async def _write_item(
        self, response: web.StreamResponse, index: int, item: dict[str, Any]
    ) -> None:
        opened = _without_tokens(item)
        if item["type"] == "function_call":
            opened |= {"arguments": "", "status": "in_progress"}
        await self._write(response, "response.output_item.added", output_index=index, item=opened)
        if item["type"] == "function_call":
            place = {"item_id": item["id"], "output_index": index}
            arguments = item["arguments"]
            await self._write(
                response, "response.function_call_arguments.delta", **place, delta=arguments
            )
            await self._write(
                response,
                "response.function_call_arguments.done",
                **place,
                arguments=arguments,
                name=item["name"],
            )

    def _place(self, output_index: int) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": output_index, "content_index": 0}

    async def _write(self, out: web.StreamResponse, kind: str, /, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        data = msgspec.json.encode(event)
        await out.write(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")


def _without_tokens(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in _TOKEN_FIELDS}
