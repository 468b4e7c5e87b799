"""The routes that output items carry, along the turns of an episode. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymrl.errors import RoutedExpertsError
from gymrl.gym.schema import is_null
from gymrl.routed_experts import (
    TURNS_WITHOUT_ROUTES,
    RouteCountError,
    RouteFormatError,
    RouteSequence,
    decode_last_routes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec

    from gymrl.config import RoutesDtype
    from gymrl.types import RoutesArray


class TurnRoutes:
    """The routes of one episode, turn by turn.

    Args:
        dtype: Of the whole; None: what came.
    """

    def __init__(self, dtype: RoutesDtype | None) -> None:
        self._dtype = dtype
        self._sequence = RouteSequence()

    def add(self, field: msgspec.Raw, num_added: int, num_sampled: int) -> None:
        """Add one turn.

        Args:
            field: ``routed_experts`` of the turn's item.
            num_added: Tokens that its prompt added.
            num_sampled: Tokens that it sampled.

        Raises:
            RoutedExpertsError: It is malformed, or has fewer rows than the call has tokens.
        """
        turn = self._sequence.num_turns
        try:
            if is_null(field):
                self._sequence.add(None, num_added, num_sampled)
                return
            first = self._sequence.first_wanted
            num_rows, routes = decode_last_routes(bytes(field), first, self._dtype)
            self._sequence.add(routes, num_added, num_sampled, num_rows)
        except RouteCountError as error:
            raise RoutedExpertsError(
                f"routed_experts: {error}; the policy server must return one row for each token "
                "of the call",
                turn=turn,
                expected=error.expected,
                received=error.received,
            ) from error
        except RouteFormatError as error:
            raise RoutedExpertsError(f"routed_experts: {error}", turn=turn) from error

    @property
    def missing_turns(self) -> tuple[int, ...]:
        """Turns that came without routes."""
        return tuple(self._sequence.missing_turns)

    def array(self) -> RoutesArray | None:
        """``[T, L, K]``; None where no turn came with routes."""
        return self._sequence.array(self._dtype)


def routes_notes(routes: RoutesArray | None, missing_turns: Sequence[int]) -> dict[str, int]:
    """How many turns are left to the trainer's own router, where others are not."""
    if routes is None or not missing_turns:
        return {}
    return {TURNS_WITHOUT_ROUTES: len(missing_turns)}


def require_routes(missing_turns: Sequence[int]) -> None:
    """Refuse an episode of which a turn came without routes.

    Raises:
        RoutedExpertsError: Names the first such turn, and the switches.
    """
    if missing_turns:
        raise RoutedExpertsError(
            "the turn came without routed_experts, which require_routed_experts asks for. Set "
            "return_routed_experts: true for a policy server of gymrl's, "
            "--enable-return-routed-experts for vLLM; the model must be a mixture of experts, and "
            "the agent must pass the field on",
            turn=missing_turns[0],
        )
