"""Routes in the token ledger: kept once a token, and laid together along any call's sequence."""

import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import ProtocolError
from gymrl.generation.base import Generated
from gymrl.generation.ledger import LedgerBook, RolloutLedger
from gymrl.token_ledger import LedgerFrame, LedgerReader


def route(prefix: list[int]) -> int:
    """What a router might choose for the last token of a prefix: it depends on all before."""
    return zlib.crc32(bytes(prefix)) % 100


def answered(prompt: list[int], ids: list[int], *, has_routes: bool = True) -> Generated:
    sequence = [*prompt, *ids]
    rows = [route(sequence[: p + 1]) for p in range(len(sequence))]
    if ids:
        rows[-1] = -1
    routes = np.array(rows, dtype=np.int8).reshape(-1, 1, 1).repeat(2, axis=2)
    return Generated(
        token_ids=ids,
        logprobs=[-0.5] * len(ids),
        finish_reason="stop",
        routed_experts=routes if has_routes else None,
    )


def reader_of(ledger: RolloutLedger) -> LedgerReader:
    return LedgerReader(LedgerFrame.decode(ledger.frame("s").encode()))


def naive_routes(place: int, calls: list[tuple[list[int], list[int], bool]]) -> list[int]:
    """By the definition: the first call that had a prefix is the one that knows its route."""
    sequences = [[*prompt, *ids] for prompt, ids, _ in calls]
    sequence = sequences[place]

    def owner(p: int) -> int:
        return next(k for k, s in enumerate(sequences) if s[: p + 1] == sequence[: p + 1])

    rows = []
    for p in range(len(sequence)):
        known = calls[owner(p)][2]
        if len(sequences[owner(p)]) == p + 1 and p + 1 < len(sequence):
            known = known and calls[owner(p + 1)][2]
        rows.append(route(sequence[: p + 1]) if known else -1)
    return rows


@st.composite
def rollouts(draw):
    calls: list[tuple[list[int], list[int], bool]] = []
    token = st.integers(0, 2)
    for _ in range(draw(st.integers(1, 8))):
        continued = draw(st.sampled_from([None, *range(len(calls))]))
        before = [] if continued is None else [*calls[continued][0], *calls[continued][1]]
        cut = draw(st.integers(0, len(before))) if draw(st.booleans()) else len(before)
        prompt = before[:cut] + draw(st.lists(token, min_size=0 if cut else 1, max_size=3))
        ids = draw(st.lists(token, min_size=1, max_size=3))
        calls.append((prompt, ids, draw(st.integers(0, 3)) > 0))
    return calls


@settings(deadline=None, max_examples=60)
@given(rollouts())
def test_routes_of_any_call_are_those_of_whoever_computed_each_token_first(calls):
    ledger = RolloutLedger("r")
    for prompt, ids, has_routes in calls:
        ledger.record(ledger.begin(), prompt, answered(prompt, ids, has_routes=has_routes))
    reader = reader_of(ledger)

    for place, (prompt, ids, _) in enumerate(calls):
        routes, naive = reader.routes(place), naive_routes(place, calls)
        if routes is None:
            assert all(row == -1 for row in naive)
            continue
        assert routes.shape == (len(prompt) + len(ids), 1, 2)
        assert routes[:-1, 0, 0].tolist() == naive[:-1]
        # The last token's own call can't know; one that went on with it may.
        assert routes[-1, 0, 0] in (-1, naive[-1])


def test_each_row_is_kept_once_and_one_more_for_the_last_token_before():
    ledger = RolloutLedger("r")
    sequence = [1, 2, 3]
    for _ in range(20):
        ledger.record(ledger.begin(), sequence, answered(sequence, [4, 5]))
        sequence = [*sequence, 4, 5, 6]

    frame = ledger.frame("s")

    assert [call.num_route_rows for call in frame.calls] == [5] + [4] * 19
    assert len(frame.routes) == 2 * (5 + 4 * 19)


def test_the_memory_of_routes_counts_against_the_ledgers_limit():
    plain, with_routes = RolloutLedger("r"), RolloutLedger("r")
    plain.record(plain.begin(), [1, 2], answered([1, 2], [3], has_routes=False))
    with_routes.record(with_routes.begin(), [1, 2], answered([1, 2], [3]))

    assert with_routes.nbytes - plain.nbytes == 6


def test_a_rollout_without_routes_has_none_on_the_wire():
    ledger = RolloutLedger("r")
    ledger.record(ledger.begin(), [1], answered([1], [2], has_routes=False))

    frame = LedgerFrame.decode(ledger.frame("s").encode())

    assert (frame.routes, frame.routes_dtype, frame.routes_shape) == (b"", "", (0, 0))
    assert LedgerReader(frame).routes(0) is None


def test_a_taken_ledger_has_its_routes():
    book = LedgerBook()
    ledger = book.open("r")
    ledger.record(ledger.begin(), [1, 2], answered([1, 2], [3]))

    frame = LedgerFrame.decode(book.take("r").encode())

    assert LedgerReader(frame).routes(0)[:, 0, 0].tolist() == [route([1]), route([1, 2]), -1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routes": b"\0"}, "1 bytes of routes for 3 rows of 1x2 int8"),
        ({"routes_shape": (2, 2)}, "6 bytes of routes for 3 rows of 2x2 int8"),
        ({"routes_dtype": "uint8"}, "fit none of its calls"),
        ({"routes_shape": (0, 0), "routes": b""}, "fit none of its calls"),
        ({"routes_shape": (-1, -2)}, "fit none of its calls"),
    ],
)
def test_a_frame_whose_routes_do_not_fit_is_refused(changes, message):
    ledger = RolloutLedger("r")
    ledger.record(ledger.begin(), [1, 2], answered([1, 2], [3]))
    torn = msgspec.structs.replace(ledger.frame("s"), **changes)

    with pytest.raises(ProtocolError) as caught:
        LedgerFrame.decode(torn.encode())

    assert message in str(caught.value)


def test_a_call_with_rows_for_a_part_of_its_new_tokens_is_refused():
    ledger = RolloutLedger("r")
    ledger.record(ledger.begin(), [1, 2], answered([1, 2], [3]))
    frame = ledger.frame("s")
    call = msgspec.structs.replace(frame.calls[0], num_route_rows=2)
    torn = msgspec.structs.replace(frame, calls=(call,), routes=frame.routes[:4])

    with pytest.raises(ProtocolError, match="fit none of its calls"):
        LedgerFrame.decode(torn.encode())
