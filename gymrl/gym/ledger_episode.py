"""From a policy server's ledger to the tokens of a trajectory. Pure.

The main chain of calls is the trajectory: its turns are contiguous because each call extends the one
before. Other chains are side calls; they are counted, and kept where the configuration says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from gymrl.errors import LedgerMismatchError, RoutedExpertsError
from gymrl.gym.conduct import detect_invalid_tool_call_and_malformed_thinking
from gymrl.gym.routes import routes_notes
from gymrl.gym.tokens import WINDOW
from gymrl.routed_experts import TURNS_WITHOUT_ROUTES, RouteFormatError, fit_routes
from gymrl.token_ledger import LedgerReader, read_chains
from gymrl.types import (
    Float32Array,
    Int32Array,
    RoutesArray,
    SideTrajectory,
    Turn,
    WeightVersionSpan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.gym.episode import EpisodeOptions
    from gymrl.token_ledger import Chain, LedgerFrame


TurnImages = tuple[tuple[str, ...], ...]
"""For each turn of a sequence the digests of the images that its prompt added, in order."""


class EpisodeTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What of a trajectory comes from its tokens; the fields are a trajectory's.

    `missing_routes` are the turns that came without `routed_experts`. `served` are the images of the
    turns, and then of those of each side, as the ledger has them.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    turns: tuple[Turn, ...]
    is_placeholder: bool = False
    is_truncated: bool = False
    notes: dict[str, int] = {}
    sides: tuple[SideTrajectory, ...] = ()
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    routed_experts: RoutesArray | None = None
    missing_routes: tuple[int, ...] = ()
    served: tuple[TurnImages, ...] = ()


def read_ledger(
    frame: LedgerFrame | None, options: EpisodeOptions, known: Int32Array | None = None
) -> EpisodeTokens:
    """The main conversation of a ledger, and what lies beside it.

    Notes: ``side_calls`` (calls outside the main chain), ``unmatched_calls`` (calls whose history
    has answers that this policy did not give), ``calls_in_flight`` (calls that had not ended when
    the rollout did), ``empty_generations`` and ``turns_without_routes`` (where others have them).

    Args:
        frame: None: no call reached the server.
        options: Flags and side calls are made after them.
        known: Tokens of the main conversation, where the agent's answer carries them.

    Returns:
        Without turns where nothing was sampled; the tokens are then the first call's prompt.
    """
    if frame is None or not frame.calls:
        empty = np.empty(0, dtype=np.int32)
        return EpisodeTokens(token_ids=empty, logprobs=np.empty(0, dtype=np.float32), turns=())
    reader = LedgerReader(frame)
    chains = read_chains(reader, known)
    calls = frame.calls
    counts = {
        "side_calls": sum(len(chain.places) - chain.num_shared for chain in chains[1:]),
        "unmatched_calls": sum(call.is_unmatched for call in calls),
        "calls_in_flight": frame.in_flight,
        "empty_generations": sum(not call.num_sampled for call in calls),
    }
    notes = {name: count for name, count in counts.items() if count}
    if not chains:
        prompt = reader.token_ids(0)
        zeros = np.zeros(len(prompt), dtype=np.float32)
        shown = tuple(image.digest for image in reader.images(0))
        return EpisodeTokens(
            token_ids=prompt, logprobs=zeros, turns=(), notes=notes, served=((shown,),)
        )
    token_ids, logprobs, turns = _sequence(reader, chains[0], options)
    sides = chains[1:] if options.side_calls == "keep" else []
    routes = _routes(reader, chains[0], options)
    missing = tuple(
        turn for turn, place in enumerate(chains[0].places) if not calls[place].num_route_rows
    )
    made_sides = tuple(_side(reader, chain, options) for chain in sides)
    served = [_images(reader, chains[0], turns)]
    served += [_images(reader, c, s.turns) for c, s in zip(sides, made_sides, strict=True)]
    return EpisodeTokens(
        token_ids=token_ids,
        logprobs=logprobs,
        turns=turns,
        notes={**notes, **routes_notes(routes, missing)},
        routed_experts=routes,
        missing_routes=missing,
        sides=made_sides,
        weight_versions=_weight_versions(frame, chains[0], turns),
        served=tuple(served),
    )


def _images(reader: LedgerReader, chain: Chain, turns: Sequence[Turn]) -> TurnImages:
    images = reader.images(chain.places[-1])
    return tuple(
        tuple(image.digest for image in images if turn.start <= image.start < turn.end)
        for turn in turns
    )


def _sequence(
    reader: LedgerReader, chain: Chain, options: EpisodeOptions
) -> tuple[Int32Array, Float32Array, tuple[Turn, ...]]:
    token_ids = reader.token_ids(chain.places[-1])
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    turns: list[Turn] = []
    for place in chain.places[chain.num_shared :]:
        call = reader.frame.calls[place]
        end = reader.lengths[place]
        logprobs[call.num_prompt : end] = reader.logprobs(place)
        invalid, malformed = detect_invalid_tool_call_and_malformed_thinking(
            {"content": call.content}, options.invalid_tool_call_patterns, options.thinking_tags
        )
        turns.append(
            Turn(
                start=turns[-1].end if turns else 0,
                generation_start=call.num_prompt,
                end=end,
                is_invalid_tool_call=invalid,
                has_malformed_thinking=malformed,
            )
        )
    return token_ids, logprobs, tuple(turns)


def _routes(reader: LedgerReader, chain: Chain, options: EpisodeOptions) -> RoutesArray | None:
    routes = reader.routes(chain.places[-1])
    if routes is None or options.routed_experts_dtype is None:
        return routes
    try:
        return fit_routes(routes, options.routed_experts_dtype)
    except RouteFormatError as error:
        raise RoutedExpertsError(f"routed_experts of the ledger: {error}") from error


def _side(reader: LedgerReader, chain: Chain, options: EpisodeOptions) -> SideTrajectory:
    token_ids, logprobs, turns = _sequence(reader, chain, options)
    return SideTrajectory(
        token_ids=token_ids,
        logprobs=logprobs,
        turns=turns,
        routed_experts=_routes(reader, chain, options),
    )


def _weight_versions(
    frame: LedgerFrame, chain: Chain, turns: Sequence[Turn]
) -> tuple[WeightVersionSpan, ...]:
    return tuple(
        WeightVersionSpan(version, turn.generation_start + start, turn.generation_start + end)
        for place, turn in zip(chain.places, turns, strict=True)
        for version, start, end in frame.calls[place].weight_versions
    )


def confirmed(
    made: EpisodeTokens, frame: LedgerFrame | None, options: EpisodeOptions
) -> EpisodeTokens:
    """The tokens that the agent's answer carries, once the ledger says the same.

    Args:
        made: From the answer.
        frame: From the server.
        options: As for :func:`read_ledger`.

    Returns:
        `made`, with what only the ledger knows.

    Raises:
        LedgerMismatchError: They differ; names the turn, the field and the first place.
    """
    told = read_ledger(frame, options, None if made.is_placeholder else made.token_ids)
    if not made.is_placeholder:
        _require_same(made, told)
    elif told.turns:
        raise _mismatch(0, "turns", 0, [len(told.turns)], [0])
    # An agent may drop the routes and keep the tokens; the server's serve as well.
    with_routes = told if made.missing_routes and not made.is_placeholder else made
    return msgspec.structs.replace(
        made,
        notes=told.notes
        | {name: n for name, n in made.notes.items() if name != TURNS_WITHOUT_ROUTES},
        sides=told.sides,
        weight_versions=told.weight_versions,
        routed_experts=with_routes.routed_experts,
        missing_routes=with_routes.missing_routes,
        served=told.served,
    )


def _require_same(made: EpisodeTokens, told: EpisodeTokens) -> None:
    for number, (ours, theirs) in enumerate(zip(told.turns, made.turns, strict=False)):
        spans = (
            ("prompt_token_ids", "token_ids", "start", "generation_start"),
            ("generation_token_ids", "token_ids", "generation_start", "end"),
            ("generation_log_probs", "logprobs", "generation_start", "end"),
        )
        for field, array, start, end in spans:
            expected = getattr(told, array)[getattr(ours, start) : getattr(ours, end)]
            received = getattr(made, array)[getattr(theirs, start) : getattr(theirs, end)]
            if np.array_equal(expected, received):
                continue
            common = min(len(expected), len(received))
            different = np.flatnonzero(expected[:common] != received[:common])
            place = int(different[0]) if len(different) else common
            window = slice(max(0, place - WINDOW), place + WINDOW)
            # A prompt's position counts in the whole prompt, not in what the turn added.
            offset = ours.start if field == "prompt_token_ids" else 0
            raise _mismatch(
                number, field, place + offset, expected[window].tolist(), received[window].tolist()
            )
    if len(made.turns) != len(told.turns):
        number = min(len(made.turns), len(told.turns))
        raise _mismatch(number, "turns", number, [len(told.turns)], [len(made.turns)])


def _mismatch(
    turn: int, field: str, position: int, expected: list[float], received: list[float]
) -> LedgerMismatchError:
    return LedgerMismatchError(
        f"the agent's answer and the policy server's ledger differ in {field} at position "
        f"{position}: the server has {expected}, the answer {received}. The agent changed, lost or "
        "left out what a model call returned; token_source='ledger' takes the server's word",
        turn=turn,
        field=field,
        position=position,
        expected=expected,
        received=received,
    )
