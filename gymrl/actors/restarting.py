"""When workers are started again, and how each of them is."""

from __future__ import annotations

import msgspec

from gymrl.config import Config, require


class RestartPolicy(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What happens when workers die.

    A worker that lives but hangs is made to die by
    :attr:`~gymrl.actors.options.SpawnOptions.heartbeat_timeout_s`.

    Attributes:
        restarts: Deaths that are answered with a restart; a restarted worker that serves a call
            gives back what its deaths cost. Several workers dying together cost one.
        correlation_s: Deaths of different workers within so many seconds are one event.
        backoff_s: Wait before the second restart in a row of one worker; doubles each time.
        max_backoff_s: Longest such wait.
        redispatch: Give a call whose worker died to another worker. False: it fails with
            :class:`~gymrl.errors.ActorDiedError`, as streams always do.
        poison_after: A call that was running at so many deaths fails with
            :class:`~gymrl.errors.PoisonError`. After its first one it runs alone on its worker, so
            that it cannot take others with it, and others cannot be blamed for it.
    """

    restarts: int = 3
    correlation_s: float = 2.0
    backoff_s: float = 0.1
    max_backoff_s: float = 10.0
    redispatch: bool = True
    poison_after: int = 2

    def __post_init__(self) -> None:
        require(self.restarts >= 0, "restarts", self.restarts, "0 restarts nothing")
        require(self.poison_after > 0, "poison_after", self.poison_after, "must be positive")
        require(self.backoff_s >= 0, "backoff_s", self.backoff_s, "must not be negative")


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker is.

    Attributes:
        index: Its place, from 0.
        pid: Its process; None while it has none.
        state: ``starting``, ``ready``, ``dead`` (a restart is due) or ``lost`` (none is).
        in_flight: Calls and streams under way.
        deaths: How often it has died.
        responsive: Whether its event loop answered a ping in time.
    """

    index: int
    pid: int | None
    state: str
    in_flight: int
    deaths: int
    responsive: bool
