"""Files of rollouts, made of literals, for the tests of what reads them."""

import json

import numpy as np

from gymrl.records import RecordWriter, RunRecord
from gymrl.types import Failure, FailureKind, Reward, RolloutGroup, Row, Trajectory, Turn

RUN = RunRecord(config_digest="sha256:abc", notes={"benchmark": "sample"})


def trajectory(reward=1.0, prompt=3, logprobs=(-0.5, -2.0), agent="math_agent", **fields):
    """Tokens 0, 1, 2 ...; one turn, of which the last ones are sampled, with these logprobs.

    With `token_ids` of your own, `logprobs` are those of all tokens.
    """
    if "token_ids" in fields:
        prompt, fields["logprobs"] = 0, logprobs
    length = prompt + len(logprobs)
    values = {
        "token_ids": np.arange(length, dtype=np.int32),
        "logprobs": np.array([*[0.0] * prompt, *logprobs], dtype=np.float32),
        "turns": (
            Turn(
                start=0,
                generation_start=prompt,
                end=length,
                prompt_text="What is 2 + 2?",
                generation_text="It is 4.",
            ),
        ),
        "reward": reward if isinstance(reward, Reward) else Reward(reward),
    }
    return Trajectory(agent=agent, **{**values, **fields})


def failure(error="RolloutTimeout", kind=FailureKind.INFRA, **fields):
    values = {
        "message": "no answer within 30 s",
        "row": 1,
        "attempts": 3,
        "agent": "math_agent",
        "traceback": "Traceback (most recent call last):\n  ...\n",
    }
    return Failure(kind=kind, error=error, **{**values, **fields})


def answer(*output):
    """What a Gym server answers, with these items."""
    return json.dumps({"reward": 1.0, "response": {"output": list(output)}}).encode()


def groups_of(*outcomes, prompts=None, first=0, route="math"):
    """Groups of these outcomes, numbered from `first`; prompts by number, "task N" without one."""
    groups = []
    index = first * 100
    for number, samples in enumerate(outcomes, start=first):
        given = (prompts or {}).get(number, f"task {number}")
        body = json.dumps({"responses_create_params": {"input": given}, "task_source": route})
        rows = tuple(
            Row(
                index=index + attempt,
                task_index=number,
                rollout_index=attempt,
                route=route,
                rollout_id=f"run-{number}-{attempt}",
                body=body.encode(),
            )
            for attempt in range(len(samples))
        )
        index += len(samples)
        groups.append(
            RolloutGroup(index=number, task_index=number, rows=rows, samples=tuple(samples))
        )
    return groups


def write_rollouts(path, *outcomes, append=False, **options):
    """A file with a group for each of `outcomes`."""
    with RecordWriter(path, RUN, append=append) as writer:
        for group in groups_of(*outcomes, **options):
            writer.write(group)
    return path
