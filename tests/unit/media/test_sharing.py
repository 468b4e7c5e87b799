"""Each image crosses once for the rows of a task, and is whole on the other side."""

from __future__ import annotations

import hashlib
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import RolloutStreamError
from gymrl.media import MediaExchange, MediaPayload
from gymrl.media.sharing import give_media, take_media
from gymrl.types import Failure, FailureKind, Reward, RolloutGroup, Row, RowResult, Trajectory


def media_of(*images: bytes) -> dict[str, bytes]:
    return {hashlib.sha256(data).hexdigest(): data for data in images}


def row(index: int, task: int, *images: bytes) -> Row:
    return Row(
        index=index,
        task_index=task,
        rollout_index=0,
        route="math",
        rollout_id=f"r{index}",
        body=b"{}",
        media=media_of(*images),
    )


def result(index: int, *images: bytes) -> RowResult:
    trajectory = Trajectory(
        agent="math",
        token_ids=np.zeros(1, np.int32),
        logprobs=np.zeros(1, np.float32),
        turns=(),
        reward=Reward(1.0),
        media=media_of(*images),
    )
    return RowResult(index=index, agent="math", outcome=trajectory)


CAT, DOG, OWL = b"cat" * 100, b"dog" * 100, b"owl" * 100


def test_rows_of_a_task_send_their_image_once_and_results_do_not_send_it_back():
    rows = [row(0, 0, CAT), row(1, 0, CAT), row(2, 1, CAT)]
    payload = MediaPayload()
    driver = MediaExchange(rows, [payload])
    thin = driver.thin_rows(rows)
    assert [list(r.media.values()) for r in thin] == [[CAT], [b""], [CAT]]
    worker = MediaExchange(thin)
    assert worker.full_rows(thin) == rows
    came = [worker.thin_result(result(i, CAT, DOG)) for i in range(2)]
    assert [list(r.outcome.media.values()) for r in came] == [[b"", DOG], [b"", b""]]
    assert [driver.full_result(r).outcome.media for r in came] == [media_of(CAT, DOG)] * 2
    assert payload.images == 3 + 4
    assert payload.sent == 2 + 1
    assert payload.logical_bytes == 7 * 300
    assert payload.physical_bytes == 3 * 300
    sent = [r.media for r in thin] + [r.outcome.media for r in came]
    assert payload.serialized_bytes == sum(len(msgspec.msgpack.encode(media)) for media in sent)


def test_a_group_whose_rows_are_all_back_is_forgotten():
    rows = [row(0, 0, CAT), row(1, 1, DOG)]
    worker = MediaExchange(rows)
    worker.full_rows(MediaExchange(rows).thin_rows(rows))
    worker.thin_result(result(0, CAT))
    assert list(worker._known) == [1]


def test_an_image_that_was_left_out_and_never_came_ends_the_stream():
    rows = [row(0, 0, CAT)]
    thin = MediaExchange(rows).thin_rows(rows)
    lost = [msgspec.structs.replace(thin[0], media=dict.fromkeys(thin[0].media, b""))]
    with pytest.raises(RolloutStreamError, match="row 0: image sha256:"):
        MediaExchange(lost).full_rows(lost)


images = st.lists(st.sampled_from([CAT, DOG, OWL, b"x"]), max_size=3, unique=True)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), images, images, st.booleans()), max_size=8), st.data())
def test_every_row_and_result_arrives_as_it_was_and_each_image_of_a_task_crosses_once(plan, data):
    rows = [row(i, task, *shown) for i, (task, shown, _, _) in enumerate(plan)]
    payload = MediaPayload()
    driver = MediaExchange(rows, [payload])
    thin = driver.thin_rows(rows)
    worker = MediaExchange(thin)
    assert worker.full_rows(thin) == rows
    crossed = Counter((r.task_index, d) for r in thin for d, b in r.media.items() if b)
    order = data.draw(st.permutations(range(len(plan))))
    for index in order:
        task, _, made, fails = plan[index]
        if fails:
            failure = Failure(kind=FailureKind.DATA, error="E", message="")
            whole = RowResult(index=index, agent="math", outcome=failure)
        else:
            whole = result(index, *made)
        sent = worker.thin_result(whole)
        received = driver.full_result(sent)
        assert received.index == whole.index
        if not fails:
            assert received.outcome.media == whole.outcome.media
            crossed.update((task, d) for d, b in sent.outcome.media.items() if b)
    assert all(count == 1 for count in crossed.values())
    assert payload.sent == sum(crossed.values())
    assert driver._known == worker._known == {}


def group_of(*samples) -> RolloutGroup:
    rows = tuple(row(index, 0, CAT) for index in range(len(samples)))
    return RolloutGroup(index=0, task_index=0, rows=rows, samples=samples)


def test_a_message_of_groups_has_each_image_once():
    failure = Failure(kind=FailureKind.DATA, error="E", message="")
    groups = [
        group_of(result(0, CAT, DOG).outcome, failure),
        group_of(result(0, DOG).outcome, result(1).outcome),
    ]
    thin, table = take_media(groups)
    assert sorted(table.values()) == sorted([CAT, DOG])
    assert {data for g in thin for s in g.trajectories for data in s.media.values()} == {b""}
    whole = give_media(thin, table)
    for before, after in zip(groups, whole, strict=True):
        assert after.rows == before.rows
        assert [s.media for s in after.trajectories] == [s.media for s in before.trajectories]
    (digest,) = media_of(DOG)
    shown = [whole[0].trajectories[0].media[digest], whole[1].trajectories[0].media[digest]]
    assert shown[0] is shown[1]


def test_groups_of_text_are_left_as_they_are():
    group = RolloutGroup(index=0, task_index=0, rows=(row(0, 0),), samples=(result(0).outcome,))
    thin, table = take_media([group])
    assert (thin[0], table) == (group, {})
