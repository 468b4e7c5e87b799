"""Chat completions as a stream of events, token ids included.

Tokens are sent as they come, and text and reasoning as soon as it is known which they are
(:mod:`gymrl.generation.answer_stream`); tool calls come with the last chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    from gymrl.generation.answer_stream import AnswerStream, Piece
    from gymrl.generation.base import SamplingParams
    from gymrl.generation.chunks import Events
    from gymrl.generation.policy import Completion, Conversation, Policy
    from gymrl.generation.requests import ChatRequest


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

    async def write(self, stream: Events, sampling: SamplingParams, num_choices: int) -> None:
        """Sample every choice and write its chunks; cancelling ends the generations.

        An error after the first chunk is sent as an event of its own, as there is no status left
        to tell it with.
        """
        samplings = [choice_sampling(sampling, index) for index in range(num_choices)]
        answers = [
            self._policy.answer_stream(self._prompt_ids, self._conversation, sampling)
            for _ in range(num_choices)
        ]
        options = self._request.stream_options
        chunks = Chunks(
            envelope=self._envelope,
            num_choices=num_choices,
            sample=lambda index, on_token: self._policy.sample(
                self._prompt_ids, self._conversation, samplings[index], on_token
            ),
            opening=self._opening,
            token=lambda index, token_id, logprob: self._token(
                answers[index], index, token_id, logprob
            ),
            last=lambda index, completion: self._last(answers[index], index, completion),
            usage=usage_of if options is not None and options.include_usage else None,
        )
        await write_chunks(stream, chunks)

    def _opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"choices": [choice], "prompt_token_ids": self._prompt_ids}

    def _token(
        self, answer: AnswerStream, index: int, token_id: int, logprob: float
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": _delta(answer.push(token_id)),
            "logprobs": logprobs_of(self._request, [token_id], [logprob], self._policy.chat),
            "finish_reason": None,
            "token_ids": [token_id],
        }

    def _last(self, answer: AnswerStream, index: int, completion: Completion) -> dict[str, Any]:
        delta = _delta(answer.finish(completion.parsed))
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


def _delta(piece: Piece) -> dict[str, Any]:
    delta: dict[str, Any] = {"content": piece.content}
    if piece.reasoning:
        delta["reasoning"] = delta["reasoning_content"] = piece.reasoning
    return delta
