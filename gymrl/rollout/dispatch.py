"""Which instance has which rows of a batch, and where they go when its worker dies.

The rows that must stay together (a *unit*: one routing group) go to one instance. When that dies,
what is left of a unit moves to another replica as a whole, or waits for the restart.

A row may be what kills its worker, and everything that was under way beside it looks the same. So
the suspects are told apart in few deaths: after the first death all go on in company, for most
deaths are nobody's fault. What was under way at a second one is given out in lots, one lot at a
time with nothing else on the instance; then the units of the lot that dies, one at a time; then the
rows of the unit. A row that was alone on its worker when that died is poison.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import anyio

from gymrl.gym.shards import bucket_rows
from gymrl.media import MediaExchange
from gymrl.rollout.groups import name_rows
from gymrl.rollout.timing import TIMER_PREFIX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from gymrl.gym.shards import ShardSet
    from gymrl.media import MediaPayload
    from gymrl.rollout.instance import Instance
    from gymrl.rollout.merge import StreamMerge
    from gymrl.types import Row, RowResult

# Deaths of its worker that a row may see before it is a suspect.
_UNSUSPICIOUS_DEATHS = 1


class Dispatch:
    """Rows that were given to an instance in one stream.

    Args:
        label: The instance's.
        instance: It.
        rows: In the batch's order.
        is_test: These are suspects.
        counted: Images that cross to the instance and back are counted in these.

    Attributes:
        waiting: The rows whose outcome has not come, by index.
        was_alone: The worker had no other rows when these began.
    """

    def __init__(
        self,
        label: str,
        instance: Instance,
        rows: Sequence[Row],
        *,
        is_test: bool = False,
        counted: Sequence[MediaPayload] = (),
    ) -> None:
        self._counted = counted
        self.label = label
        self.instance = instance
        self.waiting = {row.index: row for row in rows}
        self.is_test = is_test
        self.was_alone = False

    def __str__(self) -> str:
        return self.label

    async def results(self, delay_s: float) -> AsyncIterator[RowResult]:
        """What the instance makes of the rows, after a delay."""
        begin = anyio.current_time() + delay_s
        async with contextlib.AsyncExitStack() as stack:
            if self.is_test:
                # Before the pause: others that come meanwhile must wait.
                self.was_alone = await stack.enter_async_context(self.instance.testing())
                await anyio.sleep_until(begin)
            else:
                await anyio.sleep_until(begin)
                await stack.enter_async_context(self.instance.company())
            rows = list(self.waiting.values())
            exchange = MediaExchange(rows, self._counted)
            thin = exchange.thin_rows(rows)
            stream = self.instance.stream("run_rollouts", thin, TIMER_PREFIX)
            try:
                async for result in stream:
                    yield exchange.full_result(result)
            finally:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()


class Dispatcher:
    """Gives the rows of one batch out.

    Args:
        merge: Reads the instances' streams.
        shards: Who serves what.
        unit_size: Contiguous rows that must stay on one instance.
        counted: Images that cross to instances and back are counted in these.
    """

    def __init__(
        self,
        merge: StreamMerge[Dispatch, RowResult],
        shards: ShardSet[Instance],
        unit_size: int,
        counted: Sequence[MediaPayload] = (),
    ) -> None:
        self._counted = counted
        self._merge = merge
        self._shards = shards
        self._unit_size = unit_size
        self._at: dict[int, str] = {}
        self._home: dict[int, tuple[str, Instance]] = {}
        self._open: set[Dispatch] = set()
        self._deaths: dict[int, int] = {}

    def start(self, rows: Sequence[Row]) -> None:
        """Give every row out for the first time.

        Raises:
            RowValueError: A unit mixes routes; nothing was given out.
        """
        for bucket in bucket_rows(rows, self._shards, self._unit_size):
            for unit in self._units(bucket.rows):
                self._home[unit] = (bucket.label, bucket.handle)
            self._send(self._dispatch(bucket.label, bucket.handle, bucket.rows))

    def again(self, row: Row, delay_s: float) -> None:
        """Give out one row that failed: where its unit is, or, alone, to another replica."""
        unit = row.index // self._unit_size
        if self._unit_size == 1:
            self._home[unit] = self._another(row, self._home[unit])
        label, instance = self._home[unit]
        self._send(self._dispatch(label, instance, [row]), delay_s)

    def ended(self, dispatch: Dispatch) -> None:
        """A dispatch's stream has ended."""
        self._open.discard(dispatch)

    def add_death(self, row: int) -> int:
        """Count a death at which the row was under way; returns how many there were."""
        self._deaths[row] = self._deaths.get(row, 0) + 1
        return self._deaths[row]

    @staticmethod
    def is_poison(dispatch: Dispatch) -> bool:
        """Whether the one row of a dispatch whose worker died is to blame."""
        return dispatch.is_test and dispatch.was_alone and len(dispatch.waiting) == 1

    def after_death(self, dispatch: Dispatch, rows: Sequence[Row], delay_s: float) -> None:
        """Give out again what a dead worker had under way.

        Args:
            dispatch: What it had.
            rows: The rows that are left, as they are to be dispatched next.
            delay_s: Seconds to wait first.
        """
        units = self._units(rows)
        if dispatch.is_test:
            parts = list(units.values()) if len(units) > 1 else [[row] for row in rows]
            for part in parts:
                self._test(dispatch, [part], delay_s)
            return
        company: dict[str, tuple[Instance, list[Row]]] = {}
        suspects: list[list[Row]] = []
        elsewhere = {u for other in self._open for u in self._units(other.waiting.values())}
        for unit, members in units.items():
            if any(self._deaths.get(row.index, 0) > _UNSUSPICIOUS_DEATHS for row in members):
                suspects.append(members)
                continue
            if unit not in elsewhere:
                self._home[unit] = self._another(members[0], self._home[unit])
            label, instance = self._home[unit]
            company.setdefault(label, (instance, []))[1].extend(members)
        for label, (instance, members) in company.items():
            self._send(self._dispatch(label, instance, members), delay_s)
        size = math.isqrt(len(suspects))
        for start in range(0, len(suspects), size or 1):
            self._test(dispatch, suspects[start : start + size], delay_s)

    def _test(self, dispatch: Dispatch, units: Sequence[Sequence[Row]], delay_s: float) -> None:
        rows = [row for unit in units for row in unit]
        again = self._dispatch(dispatch.label, dispatch.instance, rows, is_test=True)
        self._send(again, delay_s)

    def _dispatch(
        self, label: str, instance: Instance, rows: Sequence[Row], *, is_test: bool = False
    ) -> Dispatch:
        return Dispatch(label, instance, rows, is_test=is_test, counted=self._counted)

    def _send(self, dispatch: Dispatch, delay_s: float = 0.0) -> None:
        self._at.update(dict.fromkeys(dispatch.waiting, dispatch.label))
        self._open.add(dispatch)
        self._merge.add(dispatch, dispatch.results(delay_s))

    def _units(self, rows: Iterable[Row]) -> dict[int, list[Row]]:
        units: dict[int, list[Row]] = {}
        for row in rows:
            units.setdefault(row.index // self._unit_size, []).append(row)
        return units

    def _another(self, row: Row, home: tuple[str, Instance]) -> tuple[str, Instance]:
        """Another replica that is up, or the same instance."""
        shard = self._shards.shard_of(row.route, row.index)
        for _ in shard.instances:
            label, instance = shard.next_instance(avoid=home[0])
            if label != home[0] and instance.is_ready and not instance.is_testing:
                return label, instance
        return home

    def label_of(self, row: int) -> str:
        """The instance that has or had a row last."""
        return self._at[row]

    def whose_are(self, indices: Iterable[int]) -> str:
        """Rows by the instance that has them, as an error names them."""
        by_label: dict[str, list[int]] = {}
        for index in indices:
            by_label.setdefault(self._at[index], []).append(index)
        return "; ".join(f"{name_rows(rows)} at {label!r}" for label, rows in by_label.items())
