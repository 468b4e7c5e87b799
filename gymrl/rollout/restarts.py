"""How many deaths of worker processes a fleet bears."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from gymrl.concurrency import growing_pause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gymrl.actors import RestartPolicy

# Deaths in a row that telling suspects apart may take before a row is done again: a fleet that dies
# whatever it runs must not be taken for a row that kills.
_FREE_TESTS = 2


class Restarts:
    """The budget of restarts that the workers of one fleet share.

    Args:
        policy: The budget, how near in time deaths are one event, and the pauses between restarts.
        clock: Monotonic seconds.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self._clock = clock
        self._left = policy.restarts
        self._incident: tuple[float, set[str]] = (float("-inf"), set())
        self._spent: dict[str, int] = {}
        self._tested: set[str] = set()
        self._free_tests = _FREE_TESTS

    @property
    def left(self) -> int:
        """Deaths that would still be answered with a restart."""
        return max(0, self._left)

    @property
    def is_spent(self) -> bool:
        """There was a death too many."""
        return self._left < 0

    def charge(self, label: str) -> None:
        """Take a death from the budget.

        Not where it belongs to an event that is paid for (several workers that die together cost
        one), and not where suspected rows were being told apart, as long as rows are done in
        between: those deaths are expected, and there are only a few for each row.
        """
        now = self._clock()
        began, members = self._incident
        if now - began <= self.policy.correlation_s and label not in members:
            members.add(label)
            return
        self._incident = (now, {label})
        if label in self._tested and self._free_tests > 0:
            self._free_tests -= 1
            return
        self._left -= 1
        self._spent[label] = self._spent.get(label, 0) + 1

    def refund(self, label: str) -> None:
        """A worker has finished a row: give back what its deaths have cost."""
        self._free_tests = _FREE_TESTS
        spent = self._spent.pop(label, 0)
        if spent and not self.is_spent:
            self._left = min(self.policy.restarts, self._left + spent)

    def pause_s(self, restarts_in_a_row: int) -> float:
        """Seconds to wait before the next restart of one worker."""
        if not restarts_in_a_row:
            return 0.0
        return growing_pause(self.policy.backoff_s, restarts_in_a_row, self.policy.max_backoff_s)

    @contextlib.contextmanager
    def testing(self, label: str) -> Iterator[None]:
        """Suspected rows run on a worker."""
        self._tested.add(label)
        try:
            yield
        finally:
            self._tested.discard(label)
