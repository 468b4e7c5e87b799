"""Generating ahead of the trainer, but never further than it allows."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import anyio
import msgspec

from gymrl.concurrency import OwnedTasks
from gymrl.config import Config, SamplingParams, require
from gymrl.errors import RolloutStreamError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.rollout.engine import RolloutEngine
    from gymrl.torchrun.cursor import RowCursor
    from gymrl.types import RolloutGroup


# So many times what may be asked for at once may fail in a row; then it is not the prompts' fault.
_DROPPED_STEPS = 3


def derived_seed(seed: int, *path: int) -> int:
    """A 31-bit seed for a place (a call, a group) under another seed."""
    text = ":".join(str(number) for number in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


@dataclasses.dataclass(eq=False)
class Ordered:
    """A group that was asked for and not handed out yet.

    Attributes:
        position: Its row's place in the data; it grows with every group asked for.
        version: Weights that served when it was asked for.
        group: It, when it is complete.
    """

    position: int
    version: int
    group: RolloutGroup | None = None


def choose(
    outstanding: Sequence[Ordered], completed: Sequence[Ordered], count: int, slack: int
) -> list[Ordered] | None:
    """Which groups to hand out now, so that none of the others becomes too old.

    The first that completed go first, as far as the older ones still running allow it: group `j`
    of those that are left, by age, leaves at the earliest in ``j // count + 1`` steps.

    Args:
        outstanding: All that were asked for, oldest first.
        completed: Those of them that are complete, in that order.
        count: Groups of a step.
        slack: The oldest version that may be handed out now.

    Returns:
        `count` groups, or None: more must complete first. Where weights were updated more than
        once in a step, so that nothing helps, the oldest.
    """
    if len(completed) < count:
        return None
    by_age = [order for order in outstanding if order in completed]
    for forced in range(count + 1):
        chosen = by_age[:forced]
        chosen += [order for order in completed if order not in chosen][: count - forced]
        left = [order for order in outstanding if order not in chosen]
        if all(order.version - slack >= j // count + 1 for j, order in enumerate(left)):
            return chosen
    return by_age[:count] if len(completed) == len(outstanding) else None


class AheadPlan(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far ahead, and of what.

    Attributes:
        num_generations: Attempts at each prompt.
        groups_per_step: Groups of a step.
        max_staleness: In weight updates.
        sampling: Of all groups; its seed is replaced by one of each group's own.
    """

    num_generations: int
    groups_per_step: int
    max_staleness: int
    sampling: SamplingParams

    def __post_init__(self) -> None:
        for setting in ("num_generations", "groups_per_step"):
            value = getattr(self, setting)
            require(value > 0, setting, value, "must be positive")
        require(self.max_staleness >= 0, "max_staleness", self.max_staleness, "0 runs not ahead")


class Ahead:
    """Groups in completion order, asked for while the trainer still works on others.

    Every group that is handed out was asked for at most `max_staleness` weight updates ago, if
    there is at most one update a step. With 0 nothing runs ahead.

    Args:
        engine: Entered.
        cursor: Where rows come from.
        plan: How far ahead.
        again: Places whose groups were asked for in a former run, and not handed out.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        cursor: RowCursor,
        plan: AheadPlan,
        *,
        again: Sequence[int] = (),
    ) -> None:
        self._engine = engine
        self._cursor = cursor
        self._plan = plan
        self._count = plan.groups_per_step
        self._max_staleness = plan.max_staleness
        self._again = list(again)
        self._version = 0
        self._dropped = 0
        self._tasks = OwnedTasks("groups ahead", self._failed)
        self._outstanding: list[Ordered] = []
        self._completed: list[Ordered] = []
        self._error: BaseException | None = None
        self._changed = anyio.Event()

    @property
    def pending(self) -> list[int]:
        """Places whose groups were asked for and not handed out."""
        return [order.position for order in self._outstanding] + self._again

    async def next_step(self, version: int) -> list[Ordered]:
        """The groups of the next step, in the order in which they were asked for.

        Args:
            version: Of the weights that serve now.

        Raises:
            GymrlError: What a group raised; everything else is to be closed.
            RolloutStreamError: The failure policy dropped one group after the other.
        """
        self._version = version
        self._fill((self._max_staleness + 1) * self._count)
        while True:
            if self._error is not None:
                raise self._error
            slack = version - self._max_staleness
            chosen = choose(self._outstanding, self._completed, self._count, slack)
            if chosen is not None:
                break
            self._changed = anyio.Event()
            await self._changed.wait()
        for order in chosen:
            self._outstanding.remove(order)
            self._completed.remove(order)
        self._fill(self._max_staleness * self._count)
        return sorted(chosen, key=lambda order: order.position)

    def _fill(self, limit: int) -> None:
        while len(self._outstanding) < limit:
            if self._again:
                position = self._again.pop(0)
            else:
                position = self._cursor.position
                self._cursor.position += 1
            order = Ordered(position, self._version)
            self._outstanding.append(order)
            self._running = self._tasks.start(self._make(order), f"group {position}")

    async def _make(self, order: Ordered) -> None:
        sampling = self._plan.sampling
        if sampling.seed is not None:
            seed = derived_seed(sampling.seed, order.position)
            sampling = msgspec.structs.replace(sampling, seed=seed)
        groups = await self._engine.run(
            [self._cursor.at(order.position)],
            num_generations=self._plan.num_generations,
            sampling=sampling,
        )
        if groups:
            order.group = groups[0]
            self._completed.append(order)
            self._dropped = 0
        else:  # dropped by the failure policy: another prompt takes its place
            self._dropped += 1
            self._check_dropped()
            self._outstanding.remove(order)
            self._fill(len(self._outstanding) + 1)
        self._changed.set()

    def _check_dropped(self) -> None:
        most = _DROPPED_STEPS * (self._max_staleness + 1) * self._count
        if self._dropped > most:
            raise RolloutStreamError(
                f"{self._dropped} groups in a row were dropped (failure_policy: drop_group), and none "
                "was complete; with failure_policy: mask each tells what its rows failed with"
            )

    def _failed(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()

    async def aclose(self) -> None:
        """End what is under way."""
        await self._tasks.close()
