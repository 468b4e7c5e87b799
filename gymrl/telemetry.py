"""Timings and log records."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator


class Timer:
    """Sums of seconds by name.

    Args:
        prefix: Put before every name by :meth:`seconds`, as ``timing/rollout``.
        clock: Monotonic seconds.
    """

    def __init__(self, prefix: str = "", clock: Callable[[], float] = time.perf_counter) -> None:
        self._prefix = f"{prefix.rstrip('/')}/" if prefix else ""
        self._clock = clock
        self._sums: dict[str, float] = {}

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time the block takes to `name`, also when it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._sums[name] = self._sums.get(name, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """The sums so far, by prefixed name."""
        return {f"{self._prefix}{name}": value for name, value in self._sums.items()}


class RateLimitedLog:
    """Log a kind of event at most once an interval, and say how many were left out.

    Args:
        logger: Where records go.
        interval_s: Seconds between two records of one key.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        logger: logging.Logger,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def log(self, key: str, level: int, message: str, *args: object) -> bool:
        """Log unless `key` was logged within the interval; returns whether it was."""
        now = self._clock()
        last = self._last.get(key)
        if last is not None and now - last < self._interval_s:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return False
        self._last[key] = now
        left_out = self._left_out.pop(key, 0)
        suffix = f" ({left_out} more like this since)" if left_out else ""
        self._logger.log(level, "%s%s", message % args if args else message, suffix)
        return True
