"""What an agent answers, and what it is asked."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

from gymrl.types import Row

AGENT = "stub_agent"


class Shape(msgspec.Struct, frozen=True):
    """A rollout's tokens: turns, of which each adds a prompt and samples."""

    prompt: int = 512
    sampled: int = 512
    turns: int = 1
    vocabulary: int = 100_000

    @property
    def tokens(self) -> int:
        """Of the whole rollout."""
        return self.turns * (self.prompt + self.sampled)


def answer(shape: Shape, seed: int = 0) -> bytes:
    """One ``/run`` answer as JSON; each turn repeats the whole prompt, as Gym's agents do."""
    rng = random.Random(seed)
    ids = range(min(3, shape.vocabulary - 1), shape.vocabulary)
    output: list[dict[str, Any]] = []
    seen: list[int] = []
    for turn in range(shape.turns):
        if turn:
            output.append({"type": "function_call_output", "call_id": "c", "output": "found it"})
        prompt = seen + rng.choices(ids, k=shape.prompt)
        sampled = rng.choices(ids, k=shape.sampled)
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


def dataset_row() -> dict[str, Any]:
    """One prompt of about 2 kB."""
    message = {"role": "user", "content": "What is asked for here? ".ljust(2000, "x")}
    return {
        "responses_create_params": {"input": [message]},
        "agent_ref": {"type": "responses_api_agents", "name": AGENT},
    }


def prepared_row(index: int) -> Row:
    """The same prompt, ready for a worker."""
    body = json.dumps({**dataset_row(), "_rowidx": index}).encode()
    return Row(
        index=index,
        task_index=index,
        rollout_index=0,
        route=AGENT,
        rollout_id=f"row-{index}",
        body=body,
    )
