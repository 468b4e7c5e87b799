import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import ProtocolError
from gymrl.generation.base import Generated, WeightSpan
from gymrl.generation.images import PixelCache, PromptImages
from gymrl.generation.ledger import (
    Answer,
    LedgerBook,
    LedgerEvictedError,
    LedgerNotFoundError,
    RolloutLedger,
)
from gymrl.generation.ledger_calls import CALL_BYTES
from gymrl.generation.prefix import TruePrefix
from gymrl.media import EncodedImage
from gymrl.token_ledger import (
    VERSION,
    LedgerCall,
    LedgerFrame,
    LedgerImage,
    LedgerReader,
    read_chains,
    rollout_base_url,
)


def sampled(ids, logprob=-0.5, **fields) -> Generated:
    values = [logprob - i for i in range(len(ids))]
    return Generated(token_ids=ids, logprobs=values, finish_reason="stop", **fields)


def record(ledger, prompt, ids, **answer) -> None:
    ledger.record(ledger.begin(), prompt, sampled(ids), Answer(**answer))
    ledger.end()


def reader_of(ledger) -> LedgerReader:
    return LedgerReader(LedgerFrame.decode(ledger.frame("s").encode()))


def chains_of(ledger) -> list[tuple[tuple[int, ...], int]]:
    return [(chain.places, chain.num_shared) for chain in read_chains(reader_of(ledger))]


def test_a_conversation_is_one_chain_and_holds_each_id_once():
    ledger = RolloutLedger("r")
    record(ledger, [1, 2, 3], [4, 5])
    record(ledger, [1, 2, 3, 4, 5, 6], [7])
    record(ledger, [1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11])
    frame = ledger.frame("s")
    assert len(frame.ids) == 4 * 11
    assert len(frame.logprobs) == 4 * 5
    assert [(c.parent, c.common, c.num_prompt, c.num_sampled) for c in frame.calls] == [
        (-1, 0, 3, 2),
        (0, 5, 6, 1),
        (1, 7, 9, 2),
    ]
    reader = reader_of(ledger)
    assert reader.token_ids(2).tolist() == list(range(1, 12))
    assert reader.logprobs(2).tolist() == [-0.5, -1.5]
    assert chains_of(ledger) == [((0, 1, 2), 0)]


def images(**starts: int) -> PromptImages:
    """Images of one pixel, called after the letter that fills their digest, where they begin."""
    shown = [EncodedImage(name.encode() * 3, name * 64, "image/png", 1, 1) for name in starts]
    return PromptImages(shown, [(s, s + 2) for s in starts.values()], [7], PixelCache())


def record_shown(ledger, prompt, ids, **starts) -> None:
    ledger.record(ledger.begin(), prompt, sampled(ids), None, images(**starts))
    ledger.end()


def shown_in(reader, place) -> list[tuple[int, str]]:
    return [(image.start, image.digest[0]) for image in reader.images(place)]


def test_images_of_a_conversation_are_kept_once_and_known_by_their_place():
    ledger = RolloutLedger("r")
    record_shown(ledger, [1, 7, 7, 2], [3], a=1)
    record_shown(ledger, [1, 7, 7, 2, 3, 7, 7, 4, 7, 7], [5], a=1, b=5, c=8)
    record_shown(ledger, [1, 7, 7, 2, 3, 7, 7, 4, 7, 7, 5, 6], [8], a=1, b=5, c=8)
    frame = LedgerFrame.decode(ledger.frame("s", with_media=True).encode())
    assert [[image.start for image in call.images] for call in frame.calls] == [[1], [5, 8], []]
    assert frame.media == {"a" * 64: b"aaa", "b" * 64: b"bbb", "c" * 64: b"ccc"}
    assert ledger.frame("s").media == {}
    reader = LedgerReader(frame)
    assert shown_in(reader, 0) == [(1, "a")]
    assert shown_in(reader, 2) == [(1, "a"), (5, "b"), (8, "c")]
    assert chains_of(ledger) == [((0, 1, 2), 0)]


def test_a_prompt_of_equal_tokens_that_shows_another_image_continues_nothing():
    """All images of one size are the same tokens. An agent that swaps its screenshot for the newest
    one would else be trained on a turn with an image that the turn was not shown.
    """
    ledger = RolloutLedger("r")
    record_shown(ledger, [1, 7, 7, 2], [3], a=1)
    record_shown(ledger, [1, 7, 7, 2, 3, 4], [5], b=1)
    record_shown(ledger, [1, 7, 7, 2, 3, 4], [5], a=1)
    reader = reader_of(ledger)
    assert [(call.parent, call.common) for call in reader.frame.calls] == [(-1, 0), (0, 1), (0, 5)]
    assert [shown_in(reader, place) for place in range(3)] == [[(1, "a")], [(1, "b")], [(1, "a")]]
    assert reader.token_ids(1).tolist() == reader.token_ids(2).tolist() == [1, 7, 7, 2, 3, 4, 5]
    assert chains_of(ledger) == [((0, 2), 0), ((1,), 0)]


def test_files_of_images_are_held_once_for_all_rollouts_and_as_long_as_one_is_there():
    """16 attempts at a prompt show its image; it must not count 16 times towards the limit."""
    book = LedgerBook()
    book.shelf.is_wanted = True
    shown = PromptImages(
        [EncodedImage(b"x" * 5000, "a" * 64, "image/png", 1, 1)], [(1, 3)], [7], PixelCache()
    )
    for number in range(16):
        ledger = book.open(f"r{number}")
        for _ in range(2):
            ledger.record(ledger.begin(), [1, 7, 7], sampled([4]), None, shown)
    without = 16 * (1024 + 2 * (CALL_BYTES + 200))
    assert 5000 < book.nbytes < 5000 + without
    for number in range(15):
        book.take(f"r{number}")
    assert book.take("r15", with_media=True).media == {"a" * 64: b"x" * 5000}
    assert book.nbytes == 0


def test_files_of_images_are_kept_from_when_somebody_wants_them():
    """A worker that trains on texts, or has the images from answers, does not pay for them."""
    book = LedgerBook()
    early = book.open("early")
    record_shown(early, [1, 7, 7, 2], [3], a=1)
    assert book.shelf.nbytes == 0
    book.shelf.is_wanted = True
    late = book.open("late")
    record_shown(late, [1, 7, 7, 2], [3], a=1)
    frame = book.take("early", with_media=True)
    assert (len(frame.calls[0].images), frame.media) == (1, {})
    assert book.take("late", with_media=True).media == {"a" * 64: b"aaa"}


def test_a_side_call_that_shares_the_first_prompt_is_a_chain_of_its_own():
    ledger = RolloutLedger("r")
    record(ledger, [1, 2, 3], [4])
    record(ledger, [1, 2, 9], [5])
    record(ledger, [1, 2, 3, 4, 6], [7])
    assert chains_of(ledger) == [((0, 2), 0), ((1,), 0)]
    assert len(ledger.frame("s").ids) == 4 * (4 + 2 + 2)


def test_an_answer_that_was_asked_for_again_is_not_the_one_that_is_trained_on():
    """A client whose connection broke had the later answer, and the reward was that one's."""
    ledger = RolloutLedger("r")
    record(ledger, [1, 2], [3])
    record(ledger, [1, 2, 3, 4], [5, 6])
    record(ledger, [1, 2, 3, 4], [5, 7])
    record(ledger, [1, 2, 3, 4], [8])
    record(ledger, [9], [9])
    assert chains_of(ledger) == [((0, 3), 0), ((0, 1), 1), ((0, 2), 1), ((4,), 0)]


def test_of_the_choices_of_one_request_the_first_is_the_main_one():
    ledger = RolloutLedger("r")
    numbers = [ledger.begin() for _ in range(3)]
    for number, ids in zip(numbers[::-1], ([3], [4, 5], [4, 6]), strict=True):
        ledger.record(number, [1, 2], sampled(ids))
    assert chains_of(ledger) == [((2,), 0), ((1,), 0), ((0,), 0)]
    record(ledger, [1, 2], [7])
    assert chains_of(ledger)[0] == ((3,), 0)


def test_a_side_call_before_an_answer_that_was_asked_for_again_changes_nothing():
    ledger = RolloutLedger("r")
    record(ledger, [1, 2], [3])
    record(ledger, [7, 7], [8])
    record(ledger, [1, 2], [4])
    assert chains_of(ledger)[0] == ((2,), 0)


def test_a_branch_off_the_main_chain_owns_only_its_own_calls():
    ledger = RolloutLedger("r")
    record(ledger, [1], [2])
    record(ledger, [1, 2, 3], [4])
    record(ledger, [1, 2, 8], [9])
    record(ledger, [1, 2, 3, 4, 5], [6])
    assert chains_of(ledger) == [((0, 1, 3), 0), ((0, 2), 1)]


def test_samples_of_one_prompt_that_begin_alike_are_told_apart():
    ledger = RolloutLedger("r")
    record(ledger, [1], [2, 3, 4])
    record(ledger, [1], [2, 3, 5])
    record(ledger, [1, 2, 3, 5, 6], [7])
    assert chains_of(ledger) == [((1, 2), 0), ((0,), 0)]
    assert reader_of(ledger).token_ids(2).tolist() == [1, 2, 3, 5, 6, 7]
    assert reader_of(ledger).logprobs(1).tolist() == [-0.5, -1.5, -2.5]


def test_a_sample_that_ends_inside_another_can_be_continued():
    ledger = RolloutLedger("r")
    record(ledger, [1], [2, 3, 4])
    record(ledger, [1], [2])
    record(ledger, [1, 2, 9], [5])
    assert chains_of(ledger) == [((1, 2), 0), ((0,), 0)]


def test_of_equal_calls_the_latest_is_continued():
    ledger = RolloutLedger("r")
    record(ledger, [1], [2])
    record(ledger, [1], [2])
    record(ledger, [1, 2, 3], [4])
    assert chains_of(ledger) == [((1, 2), 0), ((0,), 0)]


def test_of_chains_of_one_length_the_one_that_began_first_is_the_main_one():
    ledger = RolloutLedger("r")
    first, second = ledger.begin(), ledger.begin()
    ledger.record(second, [5], sampled([6]))
    ledger.record(first, [1], sampled([2]))
    assert chains_of(ledger) == [((1,), 0), ((0,), 0)]


def test_a_call_that_sampled_nothing_is_no_turn():
    ledger = RolloutLedger("r")
    record(ledger, [1, 2], [3])
    record(ledger, [1, 2, 3, 4], [])
    assert chains_of(ledger) == [((0,), 0)]
    only_empty = RolloutLedger("r")
    record(only_empty, [1, 2], [])
    assert chains_of(only_empty) == []
    assert reader_of(only_empty).token_ids(0).tolist() == [1, 2]


token = st.integers(0, 2)


@st.composite
def rollouts(draw):
    """Calls over a tiny vocabulary, so that prompts and samples often share and equal each other."""
    calls = []
    for _ in range(draw(st.integers(1, 8))):
        continued = draw(st.sampled_from([None, *range(len(calls))]))
        before = [] if continued is None else [*calls[continued][0], *calls[continued][1]]
        cut = draw(st.integers(0, len(before))) if draw(st.booleans()) else len(before)
        prompt = before[:cut] + draw(st.lists(token, min_size=0 if cut else 1, max_size=3))
        calls.append((prompt, draw(st.lists(token, max_size=3))))
    return calls


@settings(deadline=None, max_examples=60)
@given(rollouts())
def test_any_calls_come_back_as_they_were_and_chains_own_every_sample_once(calls):
    ledger = RolloutLedger("r")
    for prompt, ids in calls:
        record(ledger, prompt, ids)
    reader = reader_of(ledger)
    sequences = [[*prompt, *ids] for prompt, ids in calls]
    assert [reader.token_ids(place).tolist() for place in range(len(calls))] == sequences
    for place, (prompt, _) in enumerate(calls):
        fits = [
            (len(sequences[k]), k)
            for k in range(place)
            if prompt[: len(sequences[k])] == sequences[k]
        ]
        assert reader.extended(place) == max(fits, default=(0, -1))[1]
    owned = [place for c in read_chains(reader) for place in c.places[c.num_shared :]]
    assert sorted(owned) == [place for place, (_, ids) in enumerate(calls) if ids]
    for chain in read_chains(reader):
        for earlier, later in zip(chain.places, chain.places[1:], strict=False):
            prompt = calls[later][0]
            assert prompt[: len(sequences[earlier])] == sequences[earlier]


def with_pictures(prompt, letters):
    """Where 7 stands an image begins; `letters` say which, in turn."""
    places = [place for place, token_id in enumerate(prompt) if token_id == 7]
    return list(zip(places, itertools.cycle(letters), strict=False))


@settings(deadline=None, max_examples=40)
@given(rollouts(), st.lists(st.text("ab", min_size=1, max_size=3), min_size=8, max_size=8))
def test_a_prompt_continues_what_has_its_tokens_and_its_images(calls, letters):
    calls = [([7 if t == 2 else t for t in prompt], ids) for prompt, ids in calls]
    shown = [with_pictures(prompt, letters[place]) for place, (prompt, _) in enumerate(calls)]
    ledger = RolloutLedger("r")
    for (prompt, ids), pictures in zip(calls, shown, strict=True):
        files = [EncodedImage(c.encode(), c * 64, "image/png", 1, 1) for _, c in pictures]
        spans = [(start, start + 1) for start, _ in pictures]
        prompt_images = PromptImages(files, spans, [7], PixelCache())
        ledger.record(ledger.begin(), prompt, sampled(ids), None, prompt_images)
    reader = reader_of(ledger)
    assert [shown_in(reader, place) for place in range(len(calls))] == shown
    sequences = [[*prompt, *ids] for prompt, ids in calls]
    assert [reader.token_ids(place).tolist() for place in range(len(calls))] == sequences
    for place, (prompt, _) in enumerate(calls):
        fits = [
            (len(before), k)
            for k, before in enumerate(sequences[:place])
            if prompt[: len(before)] == before
            and shown[k] == [picture for picture in shown[place] if picture[0] < len(before)]
        ]
        assert reader.extended(place) == max(fits, default=(0, -1))[1]


def test_an_answer_is_found_by_its_key_and_the_latest_counts():
    ledger = RolloutLedger("r")
    record(ledger, [1, 2], [3], keys=(b"a",))
    record(ledger, [1, 2, 3, 4], [5], keys=(b"b", b"c"))
    record(ledger, [1, 2], [3, 9], keys=(b"a",))
    assert ledger.answered(b"a") == TruePrefix([1, 2], [3, 9])
    assert ledger.answered(b"c") == TruePrefix([1, 2, 3, 4], [5])
    assert ledger.knows(b"b")
    assert not ledger.knows(b"z")
    assert ledger.served(TruePrefix([1, 2], [3]))
    assert not ledger.served(TruePrefix([1], [2, 3]))
    assert not ledger.served(TruePrefix([1, 2], [4]))


def test_what_a_call_was_is_in_the_frame():
    ledger = RolloutLedger("r")
    spans = [WeightSpan("0", 0, 1), WeightSpan("1", 1, 2)]
    generated = sampled([3, 4], stop_reason="\n", weight_versions=spans)
    ledger.record(ledger.begin(), [1], generated, Answer(content="hi", is_unmatched=True))
    ledger.begin()
    frame = LedgerFrame.decode(ledger.frame("server").encode())
    assert (frame.rollout_id, frame.server_id, frame.in_flight) == ("r", "server", 2)
    (call,) = frame.calls
    assert (call.finish_reason, call.stop_reason, call.content) == ("stop", "\n", "hi")
    assert call.weight_versions == (("0", 0, 1), ("1", 1, 2))
    assert call.is_unmatched


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no token ledger"),
        (b"\x80", "no token ledger"),
        (LedgerFrame(9, "r", "s", 0, (), b"", b"").encode(), "version 9"),
        (
            LedgerFrame(
                VERSION,
                "r",
                "s",
                0,
                (LedgerCall(0, -1, 0, 1, 0, "stop", images=(LedgerImage(1, "a"),)),),
                b"\0\0\0\0",
                b"",
            ).encode(),
            "images outside of the new tokens",
        ),
        (LedgerFrame(VERSION, "r", "s", 0, (), b"\0\0\0\0", b"").encode(), "4 bytes of ids"),
        (
            LedgerFrame(
                VERSION, "r", "s", 0, (LedgerCall(0, 0, 1, 1, 0, "stop"),), b"", b""
            ).encode(),
            "which there are not",
        ),
        (
            LedgerFrame(
                VERSION, "r", "s", 0, (LedgerCall(0, -1, 0, -1, 1, "stop"),), b"", b""
            ).encode(),
            "which there are not",
        ),
    ],
)
def test_a_body_that_is_no_ledger_is_refused(body, said):
    with pytest.raises(ProtocolError, match=said):
        LedgerFrame.decode(body)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_taken_ledger_is_forgotten_and_its_id_is_free():
    book = LedgerBook()
    ledger = book.open("r")
    record(ledger, [1], [2])
    assert book.open("r") is ledger
    assert len(book.read("r").calls) == 1
    assert len(book.take("r").calls) == 1
    with pytest.raises(LedgerNotFoundError, match="/ng-rollout/r/v1"):
        book.take("r")
    assert (len(book), book.nbytes) == (0, 0)
    assert book.open("r") is not ledger


def test_a_call_that_ends_after_its_ledger_was_taken_is_recorded_nowhere():
    book = LedgerBook()
    ledger = book.open("r")
    number = ledger.begin()
    assert book.take("r").in_flight == 1
    ledger.record(number, [1], sampled([2]))
    assert (len(book), book.nbytes) == (0, 0)


def test_the_rollout_that_was_quiet_the_longest_is_evicted_first_and_the_book_says_so():
    book = LedgerBook(max_bytes=3 * (CALL_BYTES + 1024) + 400)
    for name in ("a", "b", "c"):
        record(book.open(name), [1] * 8, [2] * 4)
    record(book.open("a"), [1] * 8 + [2] * 4 + [3], [4])
    with pytest.raises(LedgerEvictedError, match="ledger_max_bytes") as caught:
        book.read("b")
    assert caught.value.rollout_id == "b"
    assert len(book.read("a").calls) == 2
    assert book.nbytes <= book.max_bytes
    assert book.num_evicted == 1


def test_an_evicted_rollout_stays_evicted_until_it_is_asked_for():
    book = LedgerBook(max_bytes=2 * CALL_BYTES + 1024)
    record(book.open("a"), [1], [2] * 500)
    assert book.open("a") is None
    with pytest.raises(LedgerEvictedError):
        book.take("a")
    assert book.open("a") is not None


def test_a_rollout_that_was_quiet_for_too_long_is_evicted():
    clock = Clock()
    book = LedgerBook(max_age_s=10, clock=clock)
    record(book.open("a"), [1], [2])
    clock.now = 9.0
    record(book.open("b"), [1], [2])
    clock.now = 11.0
    with pytest.raises(LedgerEvictedError, match="ledger_max_age_s=10"):
        book.take("a")
    assert len(book.take("b").calls) == 1


def test_a_rollout_whose_call_takes_longer_than_the_age_is_not_quiet():
    """It was evicted while its call ran, and the row was lost with a remedy that was none."""
    clock = Clock()
    book = LedgerBook(max_age_s=10, clock=clock)
    ledger = book.open("slow")
    number = ledger.begin()
    clock.now = 50.0
    book.open("other")
    ledger.record(number, [1], sampled([2]))
    ledger.end()
    clock.now = 59.0
    assert len(book.read("slow").calls) == 1
    clock.now = 61.0
    with pytest.raises(LedgerEvictedError, match="ledger_max_age_s=10"):
        book.read("slow")


def test_a_book_without_room_keeps_nothing():
    book = LedgerBook(max_bytes=0)
    assert book.open("a") is None
    assert book.nbytes == 0


def test_the_bytes_held_grow_with_the_new_ids_only():
    ledger = RolloutLedger("r")
    prompt = list(range(1000))
    sizes = []
    for turn in range(20):
        record(ledger, prompt, [turn] * 10)
        prompt = [*prompt, *[turn] * 10, 7]
        sizes.append(ledger.nbytes)
    steps = np.diff(sizes)
    assert set(steps.tolist()) == {CALL_BYTES + 4 * 11 + 4 * 10}


def test_the_base_url_of_a_rollout_has_its_id_before_the_version():
    expected = "http://127.0.0.1:8000/ng-rollout/r1/v1"
    assert rollout_base_url("http://127.0.0.1:8000/v1", "r1") == expected
    assert rollout_base_url("http://127.0.0.1:8000/v1/", "r1") == expected
