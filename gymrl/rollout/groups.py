"""The accumulator: rows arrive in any order and leave as whole groups in row order.

It owns every rule about order and completeness, so that whatever runs the streams only has to hand
rows over: an index is an integer inside the batch, comes once, and belongs to a group whose rows
are attempts at one prompt by one agent.
"""

from __future__ import annotations

import contextlib
import operator
from typing import TYPE_CHECKING, Literal

import msgspec

from gymrl.errors import (
    IncompleteStreamError,
    RowIndexTypeError,
    RowIndexValueError,
    RowValueError,
)
from gymrl.rollout.prepare import check_count
from gymrl.types import Failure, Row, RowResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NAMED_AT_MOST = 20


class CompletedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one group, in the batch's order, each with its result."""

    index: int
    rows: tuple[Row, ...]
    results: tuple[RowResult, ...]


class GroupAccumulator:
    """Put streamed rows back into the groups of a batch.

    Args:
        rows: The whole batch, in order.
        group_size: Contiguous rows of one group.
        allow_mixed_agents: The batch is one group of several prompts, which may go to several
            agents.

    Raises:
        RowTypeError: `group_size` is no integer.
        RowValueError: `group_size` does not divide the batch, mixed agents are allowed for more
            than one group, or the rows of a group have unequal task indices or routes.
    """

    def __init__(
        self, rows: Sequence[Row], group_size: int, *, allow_mixed_agents: bool = False
    ) -> None:
        check_count("group_size", group_size)
        if not rows or len(rows) % group_size:
            raise RowValueError(f"{len(rows)} rows are not whole groups of {group_size}")
        if allow_mixed_agents and group_size != len(rows):
            raise RowValueError(
                f"only a group that is the whole batch may mix agents: "
                f"{group_size} is not {len(rows)} rows"
            )
        self._rows = tuple(rows)
        self._size = group_size
        self._mixed = allow_mixed_agents
        # A group that was handed over leaves nothing but the mark that its rows have come.
        self._results: list[RowResult | Literal["handed over"] | None] = [None] * len(rows)
        self._left = [group_size] * (len(rows) // group_size)
        self._open_groups = len(self._left)
        if not allow_mixed_agents:
            for group in range(len(self._left)):
                self._check_prompt(group)

    def _group_rows(self, group: int) -> tuple[Row, ...]:
        return self._rows[group * self._size : (group + 1) * self._size]

    def _check_prompt(self, group: int) -> None:
        first, *others = self._group_rows(group)
        for row in others:
            for what, of_first, of_row in (
                ("task indices", first.task_index, row.task_index),
                ("routes", first.route, row.route),
            ):
                if of_first != of_row:
                    raise RowValueError(
                        f"group {group}: rows {first.index} and {row.index} have the {what} "
                        f"{of_first!r} and {of_row!r}; a group is one prompt",
                        row=row.index,
                    )

    @property
    def num_groups(self) -> int:
        """Groups of the batch."""
        return len(self._left)

    @property
    def is_complete(self) -> bool:
        """Every row has arrived."""
        return self._open_groups == 0

    @property
    def missing(self) -> list[int]:
        """Indices of the rows that have not arrived, ascending."""
        return [index for index, result in enumerate(self._results) if result is None]

    def add(self, result: RowResult) -> CompletedGroup | None:
        """Take one row; returns its group when this was the last of it.

        Raises:
            RowIndexTypeError: The index is no integer. A bool is none; integers of numpy are.
            RowIndexValueError: Out of range, seen before, or served by another agent than its
                group.
        """
        index = self.checked_index(result.index)
        group = index // self._size
        if not self._mixed:
            self._check_agent(group, index, result)
        self._results[index] = result
        self._left[group] -= 1
        if self._left[group]:
            return None
        self._open_groups -= 1
        return CompletedGroup(
            index=group, rows=self._group_rows(group), results=self._hand_over(group)
        )

    def _hand_over(self, group: int) -> tuple[RowResult, ...]:
        places = slice(group * self._size, (group + 1) * self._size)
        results = tuple(r for r in self._results[places] if isinstance(r, RowResult))
        self._results[places] = ["handed over"] * self._size
        return results

    def checked_index(self, index: object) -> int:
        """`index` as a plain integer, if a row with it may arrive now.

        Raises:
            RowIndexTypeError: Not an integer.
            RowIndexValueError: Out of range, or seen before.
        """
        number = None
        if not isinstance(index, bool):
            with contextlib.suppress(TypeError):
                number = operator.index(index)  # type: ignore[arg-type]  # that is the check
        if number is None:
            raise RowIndexTypeError(
                f"a streamed row has the index {index!r} ({type(index).__name__}); "
                "an integer is needed"
            )
        if not 0 <= number < len(self._rows):
            raise RowIndexValueError(
                f"a streamed row has the index {number}; the batch has 0 to {len(self._rows) - 1}",
                row=number,
            )
        if self._results[number] is not None:
            raise RowIndexValueError(f"row {number} arrived twice", row=number)
        return number

    def _check_agent(self, group: int, index: int, result: RowResult) -> None:
        # A row that failed may have failed before anyone knew who would serve it.
        if isinstance(result.outcome, Failure):
            return
        start = group * self._size
        for other in self._results[start : start + self._size]:
            if not isinstance(other, RowResult) or isinstance(other.outcome, Failure):
                continue
            if other.agent != result.agent:
                raise RowIndexValueError(
                    f"group {group} mixes agents: row {other.index} was served by "
                    f"{other.agent!r}, row {index} by {result.agent!r}",
                    row=index,
                )
            return

    def finish(self, cause: BaseException | str | None = None) -> None:
        """Check that nothing is missing.

        Args:
            cause: Why the stream may have ended early (a worker's exit code and last lines, say);
                an exception is chained.

        Raises:
            IncompleteStreamError: Rows are missing; they are named.
        """
        missing = self.missing
        if not missing:
            return
        why = f": {cause}" if cause is not None else ""
        error = IncompleteStreamError(
            f"the stream ended with {len(missing)} of {len(self._rows)} rows missing "
            f"({name_rows(missing)}){why}",
            missing=missing,
        )
        raise error from (cause if isinstance(cause, BaseException) else None)


def name_rows(indices: Iterable[int]) -> str:
    """``row 3``, ``rows 3, 5, 8``, and no more than twenty of them."""
    named = list(indices)
    text = ", ".join(map(str, named[:_NAMED_AT_MOST]))
    if len(named) > _NAMED_AT_MOST:
        text += f" and {len(named) - _NAMED_AT_MOST} more"
    return f"{'row' if len(named) == 1 else 'rows'} {text}"
