"""Any dataset of the reasoning-gym package, one answer an episode.

The metadata of an episode is ``{"dataset": name, "entry": {"question", "answer", "metadata"}}``, as
:func:`make_tasks` makes it. Needs the extra ``tasks``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec

from gymrl.answer_scorers import scorer_of
from gymrl.environments.base import BaseEnvironment, EnvironmentReturn, MessageLog
from gymrl.environments.builtin.answers import AnswerExtractor, extract_answer
from gymrl.environments.builtin.task import Task, environment_message
from gymrl.errors import ConfigError
from gymrl.extras import optional_imports
from gymrl.telemetry import RateLimitedLog

with optional_imports():
    from reasoning_gym.factory import DATASETS, create_dataset

logger = logging.getLogger(__name__)

Scorer = Callable[[str | None, dict[str, Any]], float]


def make_tasks(
    dataset: str,
    count: int,
    seed: int,
    *,
    hint: str = "\nPut your final answer between <answer> and </answer>.",
    **settings: Any,
) -> list[Task]:
    """The first tasks of a dataset.

    Args:
        dataset: reasoning-gym's name of it.
        count: How many.
        seed: Decides them.
        hint: Put behind every question.
        **settings: The dataset's own.

    Raises:
        ConfigError: There is no such dataset, or it refuses the settings.
    """
    if dataset not in DATASETS:
        raise ConfigError(f"reasoning-gym has no dataset {dataset!r}", setting="dataset")
    try:
        made = create_dataset(dataset, size=count, seed=seed, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"reasoning-gym {dataset!r} refuses the settings {settings}: {error}",
            setting="settings",
        ) from error
    return [
        Task(
            messages=[{"role": "user", "content": entry["question"] + hint}],
            # As plain data: entries may hold tuples, and scorers take lists as well.
            metadata={
                "dataset": dataset,
                "entry": msgspec.json.decode(msgspec.json.encode(entry)),
            },
        )
        for entry in (made[index] for index in range(count))
    ]


class ReasoningGymEnvironment(BaseEnvironment):
    """Scores with the dataset's own scorer; the reward is from 0 to 1.

    An answer on which a scorer raises, as some do on odd ones, is a wrong answer; the episode's
    metadata then has ``scorer_error``. An episode without a dataset or a reference answer can't be
    scored and fails.

    Args:
        answer_extractor: What of an answer is scored.
    """

    def __init__(self, answer_extractor: AnswerExtractor = "answer_tag") -> None:
        self._extractor: AnswerExtractor = answer_extractor
        self._scorers: dict[str, Scorer] = {}
        self._log = RateLimitedLog(logger)

    def step(self, message_logs: list[MessageLog], metadata: list[Any]) -> EnvironmentReturn:
        """See :class:`gymrl.environments.base.Environment`."""
        answers = [extract_answer(log[-1]["content"], self._extractor) for log in message_logs]
        scored = [self._score(answer, task) for answer, task in zip(answers, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[
                environment_message("" if reward is None else f"Score: {reward:g}")
                for reward, _ in scored
            ],
            metadata=[task for _, task in scored],
            next_stop_strings=[None] * len(scored),
            rewards=[reward for reward, _ in scored],
            terminateds=[True] * len(scored),
            answers=answers,
        )

    def _score(self, answer: str | None, task: Any) -> tuple[float | None, Any]:
        name = task.get("dataset") if isinstance(task, dict) else None
        entry = task.get("entry") if isinstance(task, dict) else None
        if not isinstance(name, str) or name not in DATASETS:
            return None, None
        if not isinstance(entry, dict) or entry.get("answer") is None:
            return None, None
        if answer is None:
            return 0.0, None
        if name not in self._scorers:
            self._scorers[name] = scorer_of(name)
        try:
            reward = float(self._scorers[name](answer, entry))
        except Exception as error:  # noqa: BLE001 - scorers raise anything on odd answers
            return self._wrong(task, f"{type(error).__name__}: {error}")
        if not math.isfinite(reward):
            return self._wrong(task, f"the scorer returned {reward}")
        return reward, None

    def _wrong(self, task: dict[str, Any], problem: str) -> tuple[float, dict[str, Any]]:
        self._log.log(
            task["dataset"],
            logging.INFO,
            "the scorer of %s: %s; the answer counts as wrong",
            task["dataset"],
            problem,
        )
        return 0.0, {**task, "scorer_error": problem[:500]}
