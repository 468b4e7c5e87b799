"""The Responses API as a stream of typed events.

Reasoning and text are sent in pieces as they come, tool calls when the answer has ended. The last
event holds the whole answer, token fields included, as the call without a stream would give it.
"""

from __future__ import annotations

import math
import uuid
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.generation.chunks import putting, write_or_tell
from gymrl.generation.responses_api import included_logprobs, opened_response, response_of

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectSendStream

    from gymrl.generation.answer_stream import AnswerStream, Piece
    from gymrl.generation.base import SamplingParams
    from gymrl.generation.chunks import Events
    from gymrl.generation.http_errors import Told
    from gymrl.generation.policy import Completion, Conversation, Policy
    from gymrl.generation.requests import ResponsesRequest

_ADDED, _DONE = "response.output_item.added", "response.output_item.done"


class _Message:
    """The item that text goes into, from its first piece on."""

    events = "response.output_text"
    part_events = "response.content_part"

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self.place = {"item_id": self.item_id, "output_index": index, "content_index": 0}
        self.logprobs: dict[str, Any] = {"logprobs": []}

    def opened(self) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": None}


class _Reasoning:
    """The item that reasoning goes into."""

    events = "response.reasoning_summary_text"
    part_events = "response.reasoning_summary_part"

    def __init__(self) -> None:
        self.index = 0
        self.text = ""
        self.item_id = f"rs_{uuid.uuid4().hex}"
        self.place = {"item_id": self.item_id, "output_index": 0, "summary_index": 0}
        self.logprobs: dict[str, Any] = {}

    def opened(self) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "reasoning",
            "summary": [],
            "encrypted_content": None,
        }

    def part(self) -> dict[str, Any]:
        return {"type": "summary_text", "text": self.text}


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
        self._reasoning: _Reasoning | None = None
        self._message: _Message | None = None
        self._number = 0

    async def write(self, stream: Events, sampling: SamplingParams) -> None:
        """Sample and write the events; cancelling ends the generation.

        An error after the first event is sent as an event of its own, as there is no status left
        to tell it with.
        """

        async def tell(error: Told) -> None:
            fields = error.fields
            kind = fields.pop("type")
            fields["code"] = fields["code"] or kind
            await self._write(stream, "error", **fields)

        await write_or_tell(stream, lambda: self._write_events(stream, sampling), tell)

    async def _write_events(self, stream: Events, sampling: SamplingParams) -> None:
        answer = self._policy.answer_stream(self._prompt_ids, self._conversation, sampling)
        completion = await self._sample(stream, sampling, answer)
        await self._write_piece(stream, answer.finish(completion.parsed))
        await self._write_completion(stream, completion)

    async def _sample(
        self, stream: Events, sampling: SamplingParams, answer: AnswerStream
    ) -> Completion:
        sending, receive = anyio.create_memory_object_stream[int](math.inf)
        completions: list[Completion] = []
        async with receive, anyio.create_task_group() as group:
            group.start_soon(self._sample_into, completions, sampling, sending)
            async for token_id in receive:
                await self._open_response(stream)
                await self._write_piece(stream, answer.push(token_id))
        await self._open_response(stream)
        return completions[0]

    async def _open_response(self, stream: Events) -> None:
        if not stream.is_open:
            await self._write(stream, "response.created", response=self._opened)
            await self._write(stream, "response.in_progress", response=self._opened)

    async def _sample_into(
        self,
        completions: list[Completion],
        sampling: SamplingParams,
        sending: MemoryObjectSendStream[int],
    ) -> None:
        put = putting(sending)
        async with sending:
            completion = await self._policy.sample(
                self._prompt_ids,
                self._conversation,
                sampling,
                lambda token_id, _: put(token_id),
            )
            completions.append(completion)

    async def _write_piece(self, stream: Events, piece: Piece) -> None:
        if piece.reasoning:
            if self._reasoning is None:
                self._reasoning = _Reasoning()
                await self._open(stream, self._reasoning)
            await self._write_delta(stream, self._reasoning, piece.reasoning)
        if piece.content:
            await self._write_delta(stream, await self._opened_message(stream), piece.content)

    async def _opened_message(self, stream: Events) -> _Message:
        if self._message is None:
            await self._close_reasoning(stream)
            self._message = _Message(0 if self._reasoning is None else 1)
            await self._open(stream, self._message)
        return self._message

    async def _close_reasoning(self, stream: Events) -> None:
        """Something follows it, so it is not the item that carries the tokens."""
        item = self._reasoning
        if item is not None:
            await self._write_end(stream, item, item.part())
            done = {**item.opened(), "summary": [item.part()]}
            await self._write(stream, _DONE, output_index=item.index, item=done)

    async def _open(self, stream: Events, item: _Message | _Reasoning) -> None:
        await self._write(stream, _ADDED, output_index=item.index, item=item.opened())
        await self._write(stream, f"{item.part_events}.added", **item.place, part=item.part())

    async def _write_delta(self, stream: Events, item: _Message | _Reasoning, text: str) -> None:
        item.text += text
        await self._write(stream, f"{item.events}.delta", **item.place, delta=text, **item.logprobs)

    async def _write_end(
        self, stream: Events, item: _Message | _Reasoning, part: dict[str, Any]
    ) -> None:
        await self._write(
            stream, f"{item.events}.done", **item.place, text=item.text, **item.logprobs
        )
        await self._write(stream, f"{item.part_events}.done", **item.place, part=part)

    async def _write_completion(self, stream: Events, completion: Completion) -> None:
        logprobs = included_logprobs(self._request, completion, self._policy.chat)
        whole = response_of(self._request, completion, self._policy.model_name, logprobs)
        whole |= {key: self._opened[key] for key in ("id", "created_at")}
        for index, item in enumerate(whole["output"]):
            if item["type"] == "reasoning":
                item["id"] = item["id"] if self._reasoning is None else self._reasoning.item_id
                continue  # closed when what follows it begins
            if item["type"] == "message":
                message = await self._opened_message(stream)
                item["id"] = message.item_id
                await self._write_end(stream, message, item["content"][0])
            else:
                if self._message is None and index == (self._reasoning is not None):
                    await self._close_reasoning(stream)
                await self._write_call(stream, index, item)
            await self._write(stream, _DONE, output_index=index, item=item)
        await self._write(stream, f"response.{whole['status']}", response=whole)

    async def _write_call(self, stream: Events, index: int, item: dict[str, Any]) -> None:
        opened = {"id": item["id"], "type": "function_call", "call_id": item["call_id"]}
        opened |= {"name": item["name"], "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": index}
        told = {"arguments": item["arguments"], "name": item["name"]}
        events = "response.function_call_arguments"
        await self._write(stream, _ADDED, output_index=index, item=opened)
        await self._write(stream, f"{events}.delta", **place, delta=item["arguments"])
        await self._write(stream, f"{events}.done", **place, **told)

    async def _write(self, stream: Events, kind: str, /, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        data = msgspec.json.encode(event)
        await stream.send(b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n")
