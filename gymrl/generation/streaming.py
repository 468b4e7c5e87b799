"""Chat completions as a stream of events, token ids included.

Text is sent as it comes where it can be: while tools or reasoning may be in it, the tokens are sent
at once and the text, taken apart, with the last chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from gymrl.generation.chat_api import (
    choice_sampling,
    envelope,
    finish_reason_of,
    logprobs_of,
    tool_calls_of,
    usage_of,
)
from gymrl.generation.chunks import Chunks, write_chunks
from gymrl.routed_experts import encode_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from gymrl.generation.base import SamplingParams
    from gymrl.generation.policy import Completion, Conversation, Policy
    from gymrl.generation.requests import ChatRequest


class Decoder(Protocol):
    """Token ids to text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens."""
        ...


class TextStream:
    """Turns tokens into pieces of text as they come.

    A piece is held back while it ends inside a character, and while a stop text may begin in it.

    Args:
        decoder: A chat format, say.
        stop: Stop texts of the call.
    """

    def __init__(self, decoder: Decoder, stop: tuple[str, ...]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held_back = max((len(text) - 1 for text in stop), default=0)
        self._ids: list[int] = []
        self._start = 0
        self._read = 0
        self._text = ""
        self._sent = 0

    def push(self, token_id: int) -> str:
        """The text that may be sent after one more token."""
        self._ids.append(token_id)
        before = self._decoder.decode(self._ids[self._start : self._read])
        now = self._decoder.decode(self._ids[self._start :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._text += now[len(before) :]
        self._start, self._read = self._read, len(self._ids)
        found = [self._text.find(text, self._sent) for text in self._stop]
        ends = [place for place in found if place >= 0] or [len(self._text) - self._held_back]
        until = max(self._sent, min(ends))
        piece, self._sent = self._text[self._sent : until], until
        return piece

    def finish(self, text: str) -> str:
        """What of the final text was not sent yet."""
        return text[self._sent :]


class ChatStream:
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
        request: ChatRequest,
        conversation: Conversation,
        prompt_ids: list[int],
    ) -> None:
        self._policy = policy
        self._request = request
        self._conversation = conversation
        self._prompt_ids = prompt_ids
        self._envelope = envelope("chat.completion.chunk", policy.model_name)
        self._streams_text = policy.chat.reasoning_parser == "none" and not conversation.tools

    async def write(
        self, response: web.StreamResponse, sampling: SamplingParams, num_choices: int
    ) -> None:
        """Sample every choice and write its chunks; cancelling ends the generations.

        An error after the first chunk is sent as an event of its own, as there is no status left
        to tell it with.
        """
        samplings = [choice_sampling(sampling, index) for index in range(num_choices)]
        texts = [TextStream(self._policy.chat, sampling.stop) for _ in range(num_choices)]
        options = self._request.stream_options
        chunks = Chunks(
            envelope=self._envelope,
            num_choices=num_choices,
            sample=lambda index, on_token: self._policy.sample(
                self._prompt_ids, self._conversation, samplings[index], on_token
            ),
            opening=self._opening,
            token=lambda index, token_id, logprob: self._token(
                texts[index], index, token_id, logprob
            ),
            last=lambda index, completion: self._last(texts[index], index, completion),
            usage=usage_of if options is not None and options.include_usage else None,
        )
        await write_chunks(response, chunks)

    def _opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"choices": [choice], "prompt_token_ids": self._prompt_ids}

    def _token(self, text: TextStream, index: int, token_id: int, logprob: float) -> dict[str, Any]:
        piece = text.push(token_id) if self._streams_text else ""
        return {
            "index": index,
            "delta": {"content": piece},
            "logprobs": logprobs_of(self._request, [token_id], [logprob], self._policy.chat),
            "finish_reason": None,
            "token_ids": [token_id],
        }

    def _last(self, text: TextStream, index: int, completion: Completion) -> dict[str, Any]:
        parsed = completion.parsed
        delta: dict[str, Any] = {
            "content": text.finish(parsed.content) if self._streams_text else parsed.content
        }
        if parsed.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = parsed.reasoning
        calls = tool_calls_of(self._request, completion)
        if calls:
            delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
        last: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason_of(completion, bool(calls)),
            "stop_reason": completion.generated.stop_reason,
            "token_ids": [],
        }
        if completion.generated.routed_experts is not None:
            last["routed_experts"] = encode_routes(completion.generated.routed_experts)
        return last
