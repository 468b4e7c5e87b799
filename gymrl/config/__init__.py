"""Typed configuration: frozen structs that are checked when they are built.

Nothing reads a raw dictionary after loading. A contradiction raises
:class:`~gymrl.errors.ConfigError` that names the field, the value and the remedy.
"""

from gymrl.config.checks import require_urls
from gymrl.config.generation import GenerationConfig, LogprobsMode, RoutesDtype
from gymrl.config.gym import GymConfig
from gymrl.config.media import MediaConfig
from gymrl.config.rollout import FailurePolicy, RolloutConfig, ShardConfig
from gymrl.config.sampling import SamplingParams
from gymrl.config.vllm import VllmConfig
from gymrl.settings import Config, load, read_mapping, require

__all__ = [
    "Config",
    "FailurePolicy",
    "GenerationConfig",
    "GymConfig",
    "LogprobsMode",
    "MediaConfig",
    "RolloutConfig",
    "RoutesDtype",
    "SamplingParams",
    "ShardConfig",
    "VllmConfig",
    "load",
    "read_mapping",
    "require",
    "require_urls",
]
