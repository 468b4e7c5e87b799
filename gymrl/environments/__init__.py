"""Environments that gymrl steps itself: text in, observations and rewards out.

:mod:`.base` is the protocol, :mod:`.local` runs an environment in this process, in threads or in
worker processes, :mod:`.builtin` holds those that come with gymrl.
"""

from gymrl.environments.base import (
    BaseEnvironment,
    Environment,
    EnvironmentReturn,
    Message,
    MessageLog,
    settled,
)
from gymrl.environments.local import (
    EnvironmentActor,
    OpenEnvironment,
    WorkerEnvironment,
    open_environment,
    spawn_environment,
)

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
