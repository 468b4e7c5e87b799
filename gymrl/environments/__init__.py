"""Environments that gymrl steps itself: text in, observations and rewards out.

:mod:`.base` is the protocol, :mod:`.local` runs an environment in this process, in the loop or in
threads, :mod:`.workers` in processes of its own, :mod:`.builtin` holds those that come with gymrl.
"""

from gymrl.environments.base import (
    BaseEnvironment,
    Environment,
    EnvironmentReturn,
    Message,
    MessageLog,
    settled,
)
from gymrl.environments.local import OpenEnvironment, open_environment
from gymrl.environments.workers import EnvironmentActor, WorkerEnvironment, spawn_environment

__all__ = [
    "BaseEnvironment",
    "Environment",
    "EnvironmentActor",
    "EnvironmentReturn",
    "Message",
    "MessageLog",
    "OpenEnvironment",
    "WorkerEnvironment",
    "open_environment",
    "settled",
    "spawn_environment",
]
