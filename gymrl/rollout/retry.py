"""What a failed row means: dispatch it again, keep the failure, or end the run.

Two budgets a row, by whose fault the failure is. An infra failure (the fleet's) is dispatched again
with a growing, jittered delay; when its budget is spent, the fleet is broken and the run ends. A
data failure (the row's own) has few attempts; then the failure policy decides. So it does for a row
that only ever timed out: a straggler says little about the fleet.

The budgets count attempts that reached the wire. An attempt whose connection was refused has cost
nobody anything, so it counts apart, against as many refusals as the infra budget has attempts: a
server may be away for a while, but not for ever.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec

import gymrl.errors
from gymrl.concurrency import growing_pause
from gymrl.errors import (
    GymrlError,
    PoisonError,
    RolloutDataFailure,
    RolloutFailure,
    RolloutInfraFailure,
    RolloutRedispatchExhausted,
    RolloutStreamError,
    RolloutTimeout,
    RowRejected,
)
from gymrl.types import Failure, FailureKind

if TYPE_CHECKING:
    from gymrl.config import FailurePolicy

LONGEST_DELAY_S = 30.0


_REFUSED = "refused"
"""Counted apart: infra failures that never reached the wire."""


class Attempts:
    """Counts the dispatches of each row and decides after a failure.

    Args:
        max_infra: Dispatches of a row that may fail by the fleet's fault, the first included.
        max_data: Dispatches of a row that may fail by its own.
        first_delay_s: Pause after the fleet's first failure; doubles each time.
        jitter: Gives the delays' random part.
    """

    def __init__(
        self,
        max_infra: int,
        max_data: int,
        first_delay_s: float = 0.5,
        jitter: random.Random | None = None,
    ) -> None:
        self._limits: dict[str, int] = {
            FailureKind.INFRA: max_infra,
            FailureKind.DATA: max_data,
            _REFUSED: max_infra,
        }
        self._failed: dict[int, dict[str, int]] = {}
        self._first_delay_s = first_delay_s
        self._jitter = jitter or random.Random()

    def of(self, row: int) -> int:
        """How often the row was dispatched so far."""
        return 1 + sum(self._failed.get(row, {}).values())

    def delay_before_next(self, row: int, failure: Failure) -> float | None:
        """Count a failed attempt.

        Returns:
            Seconds to wait before the next dispatch, or None when the row's budget is spent.
        """
        was_sent = failure.fields.get("was_sent") is not False
        budget = failure.kind if was_sent else _REFUSED
        counts = self._failed.setdefault(row, dict.fromkeys(self._limits, 0))
        count = counts[budget] + 1
        if count >= self._limits[budget]:
            return None
        counts[budget] = count
        if failure.kind is FailureKind.DATA:
            return 0.0
        ceiling = growing_pause(self._first_delay_s, count, LONGEST_DELAY_S)
        asked = failure.fields.get("retry_after_s")
        wished = float(asked) if isinstance(asked, int | float) else 0.0
        jittered: float = ceiling * self._jitter.uniform(0.5, 1.0)
        return max(min(wished, LONGEST_DELAY_S), jittered)


def death_failure(error: BaseException) -> Failure:
    """What a worker's death means for a row that was under way on it."""
    fields = dict(error.fields) if isinstance(error, GymrlError) else {}
    return Failure(
        kind=FailureKind.INFRA, error=type(error).__name__, message=str(error), fields=fields
    )


def poison_failure(row: int, deaths: int, error: BaseException) -> Failure:
    """The failure of a row that was alone on its worker when that died, and suspected before."""
    fields = dict(error.fields) if isinstance(error, GymrlError) else {}
    return Failure(
        kind=FailureKind.DATA,
        error=PoisonError.__name__,
        message=f"row {row} was under way at {deaths} deaths of its worker, at the last one alone, "
        f"and is not tried again; the last death: {error}",
        fields={**fields, "deaths": deaths},
    )


def timeout_failure(row: int, what: str, seconds: float, setting: str) -> Failure:
    """The failure of a row that a deadline of the driver's ended."""
    return Failure(
        kind=FailureKind.INFRA,
        error=RolloutTimeout.__name__,
        message=f"row {row}: {what} within {seconds:g} s (set by {setting})",
        fields={"seconds": seconds, "setting": setting},
    )


def rejection(row: int) -> Failure:
    """What stands in the place of a sample that the caller refused."""
    return Failure(
        kind=FailureKind.DATA,
        error=RowRejected.__name__,
        message=f"row {row}: the caller's `accept` refused the sample",
    )


def located(failure: Failure, row: int, agent: str, instance: str, attempts: int) -> Failure:
    """The failure with what only the driver knows of it."""
    return msgspec.structs.replace(
        failure, row=row, agent=failure.agent or agent, instance=instance, attempts=attempts
    )


def error_of(failure: Failure) -> RolloutFailure:
    """The typed error that a failure was made of, as near as it can be told.

    A class that is unknown here becomes :class:`~gymrl.errors.RolloutInfraFailure` or
    :class:`~gymrl.errors.RolloutDataFailure`. The traceback of the raising side is a note on it.
    """
    cls: Any = getattr(gymrl.errors, failure.error, None)
    known = isinstance(cls, type) and issubclass(cls, RolloutFailure)
    if not known:
        cls = RolloutInfraFailure if failure.kind is FailureKind.INFRA else RolloutDataFailure
    facts = {
        **failure.fields,
        **{
            name: value
            for name in ("row", "turn", "agent", "instance", "url", "status", "attempts")
            if (value := getattr(failure, name)) is not None
        },
    }
    message = failure.message if known else f"{failure.error}: {failure.message}"
    error: RolloutFailure = cls.rebuild(message, facts)
    if failure.traceback:
        error.add_note(f"where it was raised:\n{failure.traceback}")
    return error


def ends_run(failure: Failure, policy: FailurePolicy) -> bool:
    """Whether a row whose budget is spent ends the run."""
    if failure.error == RowRejected.__name__:
        return False
    if policy == "raise":
        return True
    return failure.kind is FailureKind.INFRA and failure.error != RolloutTimeout.__name__


def run_error(failure: Failure, *, is_exhausted: bool = True) -> GymrlError:
    """The error that ends a run for a row that failed for good, its cause chained.

    Args:
        failure: The last one, located.
        is_exhausted: Its budget is spent, as against a deadline that left no time to spend it.
    """
    cause = error_of(failure)
    where = f"row {failure.row} (agent {failure.agent!r}, instance {failure.instance!r})"
    what = f"{failure.error}: {failure.message}"
    error: GymrlError
    if failure.kind is FailureKind.INFRA and is_exhausted:
        times = "once" if failure.attempts == 1 else f"{failure.attempts} times"
        error = RolloutRedispatchExhausted(
            f"{where} failed {times}, last with {what}",
            row=failure.row,
            attempts=failure.attempts,
        )
    else:
        error = RolloutStreamError(
            f"{where} failed: {what}", row=failure.row, instance=failure.instance
        )
    error.__cause__ = cause
    return error
