"""Where a trainer is in its data: rows without end, in an order that a seed decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gymrl.errors import RowValueError

if TYPE_CHECKING:
    from collections.abc import Sequence


class RowCursor:
    """A place in a set of rows that is gone through again and again.

    Each pass has an order of its own, which the seed and the pass decide alone, so that a place is
    one number.

    Args:
        rows: At least one.
        seed: Of the orders.
        shuffle: False keeps the order of `rows`.

    Attributes:
        position: Rows taken so far, over all passes.

    Raises:
        RowValueError: There are no rows.
    """

    def __init__(
        self, rows: Sequence[dict[str, Any]], *, seed: int = 0, shuffle: bool = True
    ) -> None:
        if not rows:
            raise RowValueError("there are no rows to draw from")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, list[int]] = (-1, [])
        self.position = 0

    def at(self, position: int) -> dict[str, Any]:
        """The row at a place, from 0, without end."""
        number, place = divmod(position, len(self._rows))
        if self._order[0] != number:
            order = list(range(len(self._rows)))
            if self._shuffle:
                generator = np.random.default_rng([self._seed, number])
                order = generator.permutation(len(self._rows)).tolist()
            self._order = (number, order)
        return self._rows[self._order[1][place]]

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next `count` rows."""
        taken = [self.at(self.position + offset) for offset in range(count)]
        self.position += count
        return taken
