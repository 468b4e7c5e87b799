"""The routes of model calls, laid along the tokens of one trajectory.

A call's routes cover its whole prompt and what it sampled. Of these a trajectory takes what the call
is the first to know::

    call 0   [ prompt 0 ][ sampled 0 · ]
    call 1   [ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ r ][ more prompt ][ sampled 1 · ]

    routes   [ prompt 0 ][ sampled 0 r ][ more prompt ][ sampled 1 · ]

A call never feeds the last token that it samples (``·``), so no router has seen it: its row is
padding. The next call does (``r``), and that row takes the padding's place. Earlier rows stay those
of the forward passes that the tokens were sampled in. The very last token has no successor in the
trajectory, so no loss depends on its route.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gymrl.routed_experts.experts import (
    MISSING,
    RouteFormatError,
    fit_routes,
    missing_routes,
)

if TYPE_CHECKING:
    from gymrl.types import RoutesArray


TURNS_WITHOUT_ROUTES = "turns_without_routes"
"""The note of a trajectory that has routes, but not on every turn."""


class RouteCountError(RouteFormatError):
    """A call has fewer rows of routes than tokens.

    Args:
        received: Rows.
        num_prompt: Tokens of the call's prompt.
        num_sampled: Tokens that it sampled.
    """

    def __init__(self, received: int, num_prompt: int, num_sampled: int) -> None:
        self.received = received
        self.expected = num_prompt + num_sampled
        super().__init__(
            f"{received} rows of routes for {self.expected} tokens (prompt {num_prompt} + "
            f"generation {num_sampled})"
        )


class RouteSequence:
    """The routes of one trajectory, grown turn by turn.

    Attributes:
        length: Tokens so far.
        num_turns: Turns so far.
        missing_turns: Which of them came without routes.
    """

    def __init__(self) -> None:
        self.length = 0
        self.num_turns = 0
        self.missing_turns: list[int] = []
        self._chunks: list[RoutesArray | int] = []
        self._mended: list[tuple[int, RoutesArray]] = []
        self._shape: tuple[int, ...] | None = None

    @property
    def first_wanted(self) -> int:
        """The first row of the next call that :meth:`add` looks at."""
        return max(self.length - 1, 0)

    def add(
        self,
        routes: RoutesArray | None,
        num_added: int,
        num_sampled: int,
        num_rows: int | None = None,
    ) -> None:
        """Add one turn. What is given is not changed, and is kept until :meth:`array`.

        Args:
            routes: ``[rows, L, K]`` of the turn's call, at least as many rows as the call has
                tokens, prompt and sample; None: the turn has none.
            num_added: Tokens that its prompt added to the sequence.
            num_sampled: Tokens that it sampled.
            num_rows: Rows of the call where `routes` are but the last of them, from `first_wanted`
                on or earlier.

        Raises:
            RouteCountError: There are too few rows.
            RouteFormatError: There are other layers or experts a token than before. In both cases
                the sequence is as before.
        """
        start, end = self.length, self.length + num_added + num_sampled
        if routes is None:
            self.missing_turns.append(self.num_turns)
            self._chunks.append(end - start)
            self.length = end
            self.num_turns += 1
            return
        num_rows = len(routes) if num_rows is None else num_rows
        if num_rows < end:
            raise RouteCountError(num_rows, start + num_added, num_sampled)
        if self._shape not in (None, routes.shape[1:]):
            raise RouteFormatError(
                f"routes of shape {list(routes.shape[1:])} (layers, experts a token) follow routes "
                f"of shape {list(self._shape or ())}"
            )
        self._shape = routes.shape[1:]
        offset = num_rows - len(routes)
        if start and self._chunks and not isinstance(self._chunks[-1], int):
            self._mended.append((start - 1, routes[start - 1 - offset]))
        self._chunks.append(routes[start - offset : end - offset])
        self.length = end
        self.num_turns += 1

    def array(self, dtype: str | None = None) -> RoutesArray | None:
        """``[length, L, K]``; a turn without routes is all `MISSING`. None where no turn has any.

        Args:
            dtype: Of the array; None: the widest of what was added.

        Raises:
            RouteFormatError: An id does not fit `dtype`.
        """
        if self._shape is None:
            return None
        known = [chunk for chunk in self._chunks if not isinstance(chunk, int)]
        name = dtype or np.result_type(*known).name
        num_layers, top_k = self._shape
        pieces = [
            missing_routes(chunk, num_layers, top_k, name)
            if isinstance(chunk, int)
            else fit_routes(chunk, name)
            for chunk in self._chunks
        ]
        routes: RoutesArray = np.concatenate(pieces)
        for position, row in self._mended:
            routes[position] = fit_routes(row, name)
        return routes


def padded_routes(routes: RoutesArray, num_prompt: int, num_sampled: int) -> RoutesArray:
    """Routes of a call with a row for its last token, which no forward pass has seen.

    Args:
        routes: ``[T - 1, L, K]`` as engines give them, or more rows.
        num_prompt: Tokens of the call's prompt.
        num_sampled: Tokens that it sampled.

    Returns:
        ``[T, L, K]`` for the T tokens of the call, the last row `MISSING` where it was not there.

    Raises:
        RouteCountError: Rows are missing beside the last.
    """
    num_tokens = num_prompt + num_sampled
    if len(routes) >= num_tokens:
        return routes[:num_tokens]
    if len(routes) < num_tokens - 1 or not num_sampled:
        raise RouteCountError(len(routes), num_prompt, num_sampled)
    padding = missing_routes(1, routes.shape[1], routes.shape[2], routes.dtype.name)
    return np.concatenate([routes, padding])


def num_expected_routes(spans: Sequence[tuple[int, int]]) -> int:
    """How many tokens there are whose routes a loss may depend on.

    A token's route matters where a token after it was sampled. So neither the last sampled token
    counts, nor what follows it.

    Args:
        spans: Sampled tokens as ``[start, end)``.
    """
    return max(0, max((end for start, end in spans if end > start), default=0) - 1)


def unknown_routes(routes: RoutesArray, spans: Sequence[tuple[int, int]]) -> int:
    """How many of those have no route.

    Args:
        routes: ``[T, L, K]``.
        spans: As for :func:`num_expected_routes`.
    """
    count = num_expected_routes(spans)
    return int((routes[:count] == MISSING).all(axis=(1, 2)).sum())


def routes_or_missing(
    all_routes: Sequence[RoutesArray | None], lengths: Sequence[int]
) -> list[RoutesArray] | None:
    """One array for each sample of a batch, all of one type; None where no sample has routes.

    Args:
        all_routes: ``[T, L, K]`` or None, a sample.
        lengths: T of each.

    Raises:
        RouteFormatError: Samples disagree about layers or experts a token; names the two.
    """
    known = [(place, r) for place, r in enumerate(all_routes) if r is not None]
    if not known:
        return None
    first, model = known[0]
    for place, routes in known:
        if routes.shape[1:] != model.shape[1:]:
            raise RouteFormatError(
                f"sample {place} has routes of shape {list(routes.shape[1:])} (layers, experts a "
                f"token) where sample {first} has {list(model.shape[1:])}; they are of different "
                "models"
            )
    name = np.result_type(*[routes for _, routes in known]).name
    num_layers, top_k = model.shape[1:]
    return [
        missing_routes(length, num_layers, top_k, name)
        if routes is None
        else fit_routes(routes, name)
        for routes, length in zip(all_routes, lengths, strict=True)
    ]
