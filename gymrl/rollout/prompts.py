"""Scoring of whole groups: prompt by prompt, and what is to be heard is logged."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

import msgspec

from gymrl.errors import RolloutTimeout
from gymrl.scoring import GroupStats, ScoredGroup, score

if TYPE_CHECKING:
    from gymrl.scoring import Scoring, ScoringWarning
    from gymrl.types import RolloutGroup

logger = logging.getLogger(__name__)


class GroupScorer:
    """Scores the groups of one batch.

    Args:
        scoring: The rules.
        prompt_size: Contiguous rows that are attempts at one prompt.
        warned: Warnings that were logged already; each is logged once.
    """

    def __init__(self, scoring: Scoring, prompt_size: int, warned: set[ScoringWarning]) -> None:
        self._scoring = scoring
        self._prompt_size = prompt_size
        self._warned = warned

    def score(self, group: RolloutGroup) -> ScoredGroup:
        """The scored group; one that is the whole batch may hold several prompts."""
        scored = self._score_prompts(group)
        stragglers = straggler_counts(group)
        if not stragglers:
            return scored
        stats = GroupStats.merged([scored.stats, GroupStats(counts=stragglers)])
        metrics = {**scored.group.metrics, **stats.scalars()}
        return msgspec.structs.replace(
            scored, group=msgspec.structs.replace(scored.group, metrics=metrics), stats=stats
        )

    def _score_prompts(self, group: RolloutGroup) -> ScoredGroup:
        size = self._prompt_size
        places = range(len(group.rows))
        prompts = [
            list(run) for _, run in itertools.groupby(places, lambda n: group.rows[n].index // size)
        ]
        if len(prompts) == 1:
            return self._score(group)
        parts = [
            self._score(
                msgspec.structs.replace(
                    group,
                    rows=tuple(group.rows[place] for place in prompt),
                    samples=tuple(group.samples[place] for place in prompt),
                )
            )
            for prompt in prompts
        ]
        stats = GroupStats.merged(part.stats for part in parts)
        samples = tuple(sample for part in parts for sample in part.group.samples)
        scored = msgspec.structs.replace(group, samples=samples, metrics=stats.scalars())
        return ScoredGroup(group=scored, stats=stats)

    def _score(self, group: RolloutGroup) -> ScoredGroup:
        scored = score(group, self._scoring)
        for warning in scored.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                logger.warning("agent %s: %s", warning.agent, warning.message)
        if scored.length_report is not None:
            for line in scored.length_report.lines():
                logger.info("group %d: %s", group.index, line)
        return scored


def straggler_counts(group: RolloutGroup) -> dict[str, int]:
    """``rollout_stragglers/<agent>``: rows of a group that a deadline ended, by agent."""
    counts: dict[str, int] = {}
    for failure in group.failures:
        if failure.error == RolloutTimeout.__name__:
            name = f"rollout_stragglers/{failure.agent}"
            counts[name] = counts.get(name, 0) + 1
    return counts
