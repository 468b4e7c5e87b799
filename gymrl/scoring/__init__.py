"""Scoring: what becomes of a verifier's reward, and numbers about it. Arithmetic only.

:mod:`.score` applies everything to a group in its fixed order; each other module is one idea.
Nothing here does I/O, waits, or starts a process.
"""

from gymrl.scoring.components import (
    check_reward_contract,
    component_columns,
    read_reward,
    reward_components,
)
from gymrl.scoring.effort import EffortConfig
from gymrl.scoring.length_penalty import LengthPenaltyConfig, ScoringWarning, env_reward
from gymrl.scoring.masks import LENGTH_REASONS, hit_max_tokens
from gymrl.scoring.metrics import group_stats
from gymrl.scoring.penalties import PenaltyConfig, resolve_penalties
from gymrl.scoring.score import (
    ScoredGroup,
    Scoring,
    ScoringConfig,
    resolve_scoring,
    score,
    score_group,
)
from gymrl.scoring.stats import GroupStats

__all__ = [
    "LENGTH_REASONS",
    "EffortConfig",
    "GroupStats",
    "LengthPenaltyConfig",
    "PenaltyConfig",
    "ScoredGroup",
    "Scoring",
    "ScoringConfig",
    "ScoringWarning",
    "check_reward_contract",
    "component_columns",
    "env_reward",
    "group_stats",
    "hit_max_tokens",
    "read_reward",
    "resolve_penalties",
    "resolve_scoring",
    "reward_components",
    "score",
    "score_group",
]
