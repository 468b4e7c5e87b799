"""Reinforcement-learning rollouts of language models, without Ray.

The names below load the module that defines them when they are first used, so that importing
gymrl itself stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gymrl._version import __version__
from gymrl.extras import optional_imports

if TYPE_CHECKING:
    from gymrl.actors import Actor, ActorHandle, SpawnOptions
    from gymrl.actors.spawn import spawn
    from gymrl.benchmark import (
        BaseServerConfig,
        Benchmark,
        EvalPlan,
        PlannedBenchmark,
        TaskResult,
        TaskRunner,
        load_benchmark,
        plan_benchmark,
        serve_benchmark,
    )
    from gymrl.config import (
        GenerationConfig,
        GymConfig,
        RolloutConfig,
        SamplingParams,
        ShardConfig,
    )
    from gymrl.errors import ConfigError, GymrlError
    from gymrl.records import RecordWriter, read_groups, read_records
    from gymrl.rollout.engine import RolloutEngine
    from gymrl.rollout.sync import SyncRolloutEngine, collect
    from gymrl.scoring import ScoringConfig, resolve_scoring
    from gymrl.tensors import RolloutBatch, to_batch
    from gymrl.types import (
        Adjustment,
        Failure,
        FailureKind,
        Reward,
        RolloutGroup,
        Row,
        Trajectory,
        Turn,
    )

__all__ = [
    "Actor",
    "ActorHandle",
    "Adjustment",
    "BaseServerConfig",
    "Benchmark",
    "ConfigError",
    "EvalPlan",
    "Failure",
    "FailureKind",
    "GenerationConfig",
    "GymConfig",
    "GymrlError",
    "PlannedBenchmark",
    "RecordWriter",
    "Reward",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutGroup",
    "Row",
    "SamplingParams",
    "ScoringConfig",
    "ShardConfig",
    "SpawnOptions",
    "SyncRolloutEngine",
    "TaskResult",
    "TaskRunner",
    "Trajectory",
    "Turn",
    "__version__",
    "collect",
    "load_benchmark",
    "plan_benchmark",
    "read_groups",
    "read_records",
    "resolve_scoring",
    "serve_benchmark",
    "spawn",
    "to_batch",
]

_HOMES = {
    "gymrl.actors": ("Actor", "ActorHandle", "SpawnOptions"),
    "gymrl.actors.spawn": ("spawn",),
    "gymrl.benchmark": (
        "BaseServerConfig",
        "Benchmark",
        "EvalPlan",
        "PlannedBenchmark",
        "TaskResult",
        "TaskRunner",
        "load_benchmark",
        "plan_benchmark",
        "serve_benchmark",
    ),
    "gymrl.config": (
        "GenerationConfig",
        "GymConfig",
        "RolloutConfig",
        "SamplingParams",
        "ShardConfig",
    ),
    "gymrl.errors": ("ConfigError", "GymrlError"),
    "gymrl.records": ("RecordWriter", "read_groups", "read_records"),
    "gymrl.rollout.engine": ("RolloutEngine",),
    "gymrl.rollout.sync": ("SyncRolloutEngine", "collect"),
    "gymrl.scoring": ("ScoringConfig", "resolve_scoring"),
    "gymrl.tensors": ("RolloutBatch", "to_batch"),
    "gymrl.types": (
        "Adjustment",
        "Failure",
        "FailureKind",
        "Reward",
        "RolloutGroup",
        "Row",
        "Trajectory",
        "Turn",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'gymrl' has no attribute {name!r}")
    with optional_imports():
        value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
