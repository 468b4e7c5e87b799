"""Planned tasks as rows that can be asked. Pure."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from gymrl.errors import RowTypeError
from gymrl.evaluation.servers import rerouted
from gymrl.gym.materialized import flat_row
from gymrl.rollout.prepare import with_seed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gymrl.config import SamplingParams
    from gymrl.evaluation.plan import PlannedTask
    from gymrl.evaluation.settings import EvaluationSettings


def attempt_seed(seed: int, digest: str, repeat: int) -> int:
    """An attempt's sampling seed, in ``[0, 2**31)``: BLAKE2b of seed, task and repeat.

    It does not depend on what else is in the plan, so a task is asked alike alone and in company,
    and the repeats that a plan gains later are those that it would have had.
    """
    text = f"{seed}/{digest}/{repeat}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") & 0x7FFF_FFFF


def attempt_row(
    task: PlannedTask,
    repeat: int,
    settings: EvaluationSettings,
    renamed: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], SamplingParams]:
    """The dataset row of one attempt, and what it is sampled with; nothing given is changed.

    Args:
        task: What is attempted.
        repeat: Which attempt, from 0.
        settings: The evaluation's.
        renamed: Server instances that bear another name in this run; None: none.

    Raises:
        ConfigError: The row asks for a sampling that no policy has.
        RowTypeError, RowValueError: The row's request has not the shape of one.
    """
    flat = flat_row(task.row, task.number)
    params = flat.get("responses_create_params")
    if not isinstance(params, dict):
        raise RowTypeError(
            f"responses_create_params is a {type(params).__name__}; a dictionary with the "
            "request's input is needed"
        )
    sampling = settings.sampling.of(params)
    asked = dict(params)
    if settings.sampling.max_output_tokens is not None:
        asked.pop("max_output_tokens", None)  # the smaller one would win
    seed = attempt_seed(settings.seed, task.key.digest, repeat)
    asked["metadata"] = with_seed(asked.get("metadata"), seed, 0)
    row = {
        **rerouted(flat, renamed or {}),
        "responses_create_params": asked,
        "_ng_task_index": task.number,
        "_ng_rollout_index": repeat % task.group_size if task.group_size > 1 else repeat,
    }
    return row, sampling
