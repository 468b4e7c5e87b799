"""The driver's own deadlines: how long a whole group may take, how long nothing may arrive.

Both measure the driver's waiting. While the consumer has a group and trains, rows that are done
wait to be read, so that time is nobody's fault.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadlines:
    """One batch's deadlines, running from now.

    Args:
        group_s: A group must be whole so long after the batch began; None: no deadline.
        silence_s: The next row must arrive so long after the last; None: no deadline.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        group_s: float | None,
        silence_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group_s = group_s
        self._silence_s = silence_s
        self._clock = clock
        self._now = clock()
        self._waited = 0.0
        self._silent = 0.0

    def waits(self) -> None:
        """The driver begins to wait; what passed until now does not count."""
        self._now = self._clock()

    def arrived(self) -> None:
        """A row arrived."""
        self._count()
        self._silent = 0.0

    def _count(self) -> None:
        now = self._clock()
        self._waited += now - self._now
        self._silent += now - self._now
        self._now = now

    def next_in(self) -> float | None:
        """Seconds of waiting until one of them passes; None: never."""
        self._count()
        left = [
            limit - spent
            for limit, spent in ((self._group_s, self._waited), (self._silence_s, self._silent))
            if limit is not None
        ]
        return max(0.0, min(left)) if left else None

    def groups_are_late(self) -> bool:
        """Whether the groups' deadline has passed."""
        self._count()
        return self._group_s is not None and self._waited >= self._group_s

    def is_silent(self) -> bool:
        """Whether the watchdog's has."""
        self._count()
        return self._silence_s is not None and self._silent >= self._silence_s
