"""Factories of trajectories, rows and groups for the tests of scoring."""

import json

import numpy as np

from gymrl.types import Failure, FailureKind, Reward, RolloutGroup, Row, Trajectory, Turn


def message(text, role="assistant"):
    return {"type": "message", "role": role, "content": [{"type": "output_text", "text": text}]}


def reasoning(text):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def result(*items, **fields):
    return {"response": {"output": list(items)}, **fields}


def turns_of(pairs, texts=None, flags=None):
    turns, at = [], 0
    for index, (prompt, generation) in enumerate(pairs):
        end = at + len(prompt) + len(generation)
        turns.append(
            Turn(
                start=at,
                generation_start=at + len(prompt),
                end=end,
                generation_text=texts[index] if texts else None,
                has_malformed_thinking=bool(flags and flags[index]),
            )
        )
        at = end
    return tuple(turns)


def trajectory(
    reward=1.0,
    *,
    components=None,
    pairs=(((1, 2), (3, 4)),),
    texts=None,
    flags=None,
    answer=None,
    agent="agent",
    **fields,
):
    """A trajectory of `pairs` of (prompt ids, generated ids), one for each turn."""
    ids = [token for pair in pairs for part in pair for token in part]
    return Trajectory(
        agent=agent,
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.zeros(len(ids), dtype=np.float32),
        turns=turns_of(pairs, texts, flags),
        reward=Reward(reward, components),
        result=json.dumps(result(message("x")) if answer is None else answer).encode(),
        **fields,
    )


def written(reward, reasoning_text="", answer_text="", **fields):
    """A trajectory that reasoned and answered with these texts."""
    items = [reasoning(reasoning_text)] if reasoning_text else []
    items += [message(answer_text)] if answer_text else []
    return trajectory(reward, answer=result(*items, reward=reward), **fields)


def sized(reward, reasoning_length=0, answer_length=0, **fields):
    """A trajectory whose texts have these lengths in characters."""
    return written(reward, "r" * reasoning_length, "a" * answer_length, **fields)


def failure(error="RolloutTimeout", kind=FailureKind.INFRA):
    return Failure(kind=kind, error=error, message="it ended")


def row(index=0, **body):
    return Row(
        index=index,
        task_index=0,
        rollout_index=index,
        route="agent",
        rollout_id=f"r-{index}",
        body=json.dumps(body).encode(),
    )


def group(*samples, body=None, first_row=0, index=0):
    return RolloutGroup(
        index=index,
        task_index=index,
        rows=tuple(row(first_row + place, **(body or {})) for place in range(len(samples))),
        samples=tuple(samples),
    )


def ledger(scored):
    """A trajectory's ledger as (rule, total) pairs."""
    return [(entry.rule, entry.value) for entry in scored.reward.adjustments]
