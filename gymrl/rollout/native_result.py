"""The result of a native episode as JSON, in the shape of a Gym answer.

One set of rules (scoring, metrics, records) so reads both.

``response.output`` holds the messages after the prompt: the model's answers and the environment's
observations. Beside ``reward`` and ``reward_components`` there are the facts of
:class:`EpisodeFacts`, the last ``metadata``, and ``final_observation`` with its tokens. Messages that show images are in
parts, each image as a data URL.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.media.parts import copied, is_image_part
from gymrl.rollout.encode import find_unencodable

if TYPE_CHECKING:
    from gymrl.environments.base import Message, MessageLog
    from gymrl.rollout.native_images import PromptSegment
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


def sound_message(message: Message, notes: dict[str, int]) -> Message:
    """A copy of a message, each of its texts as :func:`sound_text` has it."""
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": sound_text(content, notes)}
    parts = [
        part if is_image_part(part) else {**part, "text": sound_text(part["text"], notes)}
        for part in content
    ]
    return copied({"role": message["role"], "content": parts})


def encode_result(
    facts: EpisodeFacts,
    reward: Reward,
    messages: MessageLog,
    final_observation: tuple[Message, PromptSegment] | None,
    metadata: Any,
    notes: dict[str, int],
) -> bytes:
    """The record as JSON bytes. Metadata that JSON has no form for is left out, and noted.

    Of a final observation that shows images, ``num_images`` says how many of them are whole among
    its tokens.
    """
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
        message, kept = final_observation
        record["final_observation"] = {**message, "token_ids": kept.token_ids}
        if not isinstance(message["content"], str):
            record["final_observation"]["num_images"] = len(kept.images)
    return msgspec.json.encode(record)


def _item(message: Message) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    return {"type": "message", "role": message["role"], "content": content}
