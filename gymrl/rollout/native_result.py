"""The result of a native episode as JSON, in the shape of a Gym answer.

One set of rules (scoring, metrics, records) so reads both.

``response.output`` holds the messages after the prompt: the model's answers and the environment's
observations. Beside ``reward`` and ``reward_components`` there are the facts of
:class:`EpisodeFacts`, the last ``metadata``, and ``final_observation`` with its tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.rollout.encode import find_unencodable

if TYPE_CHECKING:
    from gymrl.environments.base import Message, MessageLog
    from gymrl.types import Reward

_SURROGATES = re.compile("[\ud800-\udfff]")


class EpisodeFacts(msgspec.Struct):
    """What happened, beside tokens and rewards.

    Attributes:
        num_turns: Generations that were made.
        prompt_tokens: Of the first prompt.
        env_tokens: Of the observations, as far as they fitted.
        terminated: The environment ended the episode.
        truncated: A token limit cut an answer or an observation.
        max_turns_reached: All turns were used, and it was neither terminated nor truncated.
        worker: Which generator answered.
        answer: What the environment extracted last.
    """

    task_name: str
    prompt_tokens: int
    num_turns: int = 0
    env_tokens: int = 0
    terminated: bool = False
    truncated: bool = False
    max_turns_reached: bool = False
    worker: int = 0
    answer: str | None = None


def sound_text(text: str, notes: dict[str, int]) -> str:
    """`text` with lone surrogates, which neither JSON nor a tokenizer can hold, as U+FFFD."""
    mended, count = _SURROGATES.subn("\ufffd", text)
    if count:
        notes["replaced_surrogates"] = notes.get("replaced_surrogates", 0) + count
    return mended


def encode_result(
    facts: EpisodeFacts,
    reward: Reward,
    messages: MessageLog,
    final_observation: tuple[Message, list[int]] | None,
    metadata: Any,
    notes: dict[str, int],
) -> bytes:
    """The record as JSON bytes. Metadata that JSON has no form for is left out, and noted."""
    if find_unencodable(metadata) is not None:
        metadata = None
        notes["unencodable_metadata"] = 1
    record: dict[str, Any] = {
        "reward": reward.verifier,
        **msgspec.structs.asdict(facts),
        "metadata": metadata,
        "response": {
            "output": [_item(message) for message in messages],
            "incomplete_details": {"reason": "max_output_tokens"} if facts.truncated else None,
        },
        "final_observation": None,
    }
    if reward.components is not None:
        record["reward_components"] = reward.components
    if final_observation is not None:
        message, token_ids = final_observation
        record["final_observation"] = {**message, "token_ids": token_ids}
    return msgspec.json.encode(record)


def _item(message: Message) -> dict[str, Any]:
    kind = "output_text" if message["role"] == "assistant" else "input_text"
    return {
        "type": "message",
        "role": message["role"],
        "content": [{"type": kind, "text": message["content"]}],
    }
