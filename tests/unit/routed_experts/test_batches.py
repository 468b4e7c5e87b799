"""Routes in batches of tensors, in files and in metrics."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import RowValueError
from gymrl.records import RecordWriter, RunRecord, read_groups
from gymrl.scoring import group_stats
from gymrl.scoring.native_metrics import native_group_stats
from gymrl.scoring.stats import GroupStats
from gymrl.tensors import message_log, to_batch
from gymrl.types import (
    Failure,
    FailureKind,
    Reward,
    RolloutGroup,
    Row,
    SideTrajectory,
    Trajectory,
    Turn,
)


def routes_of(*rows: int, dtype: str = "int8") -> np.ndarray:
    """``[T, 1, 2]``, both experts of a token alike."""
    return np.array(rows, dtype=dtype).reshape(-1, 1, 1).repeat(2, axis=2)


def trajectory(*turns: tuple[int, int], routes=None, **fields) -> Trajectory:
    """Turns given as (number of prompt tokens, number of sampled tokens)."""
    spans, end = [], 0
    for prompt, sampled in turns:
        spans.append(Turn(start=end, generation_start=end + prompt, end=end + prompt + sampled))
        end += prompt + sampled
    return Trajectory(
        agent="a",
        token_ids=np.arange(1, end + 1, dtype=np.int32),
        logprobs=np.zeros(end, dtype=np.float32),
        turns=tuple(spans),
        reward=Reward(1.0),
        routed_experts=routes,
        **fields,
    )


def failure() -> Failure:
    return Failure(kind=FailureKind.INFRA, error="RolloutTimeout", message="too slow")


def group(*samples, index: int = 0) -> RolloutGroup:
    rows = tuple(
        Row(
            index=place,
            task_index=index,
            rollout_index=place,
            route="a",
            rollout_id=f"r{place}",
            body=b"{}",
        )
        for place in range(len(samples))
    )
    return RolloutGroup(index=index, task_index=index, rows=rows, samples=samples)


TWO_TURNS = trajectory((2, 1), (1, 2), routes=routes_of(5, 6, 7, 8, 9, -1))


def test_a_batch_has_each_tokens_route_and_sentinels_in_the_padding():
    batch = to_batch(
        [group(TWO_TURNS, trajectory((1, 1), routes=routes_of(3, -1)))], pad_token_id=0
    )

    assert batch.routed_experts.dtype == torch.int8
    assert batch.routed_experts.shape == (2, 6, 1, 2)
    assert batch.routed_experts[:, :, 0, 0].tolist() == [
        [5, 6, 7, 8, 9, -1],
        [3, -1, -1, -1, -1, -1],
    ]
    assert batch.missing_routes.tolist() == [0, 0]


def test_the_packed_batch_has_the_same_routes_without_padding():
    batch = to_batch(
        [group(TWO_TURNS, trajectory((1, 1), routes=routes_of(3, -1)))], pad_token_id=0
    )

    packed = batch.packed()

    assert packed.routed_experts[:, 0, 0].tolist() == [5, 6, 7, 8, 9, -1, 3, -1]
    assert packed.routed_experts.shape[0] == packed.token_ids.shape[0]


def test_a_batch_without_any_routes_is_left_alone():
    batch = to_batch([group(trajectory((1, 1)), failure())], pad_token_id=0)

    assert batch.routed_experts is None
    assert batch.missing_routes is None
    assert batch.packed().routed_experts is None
    assert all(
        "routed_experts" not in message
        for log in batch.final_batch["message_log"]
        for message in log
    )


def test_one_sample_of_the_group_without_routes_and_a_failed_one_get_sentinels():
    """NVIDIA-NeMo/RL#3378: ragged routes of a batch were concatenated as they came."""
    samples = group(TWO_TURNS, trajectory((2, 3)), failure())

    batch = to_batch([samples], pad_token_id=0)

    assert batch.routed_experts[1:, :, 0, 0].unique().tolist() == [-1]
    assert batch.routed_experts.dtype == torch.int8
    assert batch.missing_routes.tolist() == [0, 4, 0]
    logs = batch.final_batch["message_log"]
    for log in logs:
        for message in log:
            assert message["routed_experts"].shape == (len(message["token_ids"]), 1, 2)


def test_a_sample_of_a_wider_type_widens_the_batch():
    wide = trajectory((1, 1), routes=routes_of(300, -1, dtype="int16"))

    batch = to_batch([group(TWO_TURNS, wide)], pad_token_id=0)

    assert batch.routed_experts.dtype == torch.int16
    assert batch.routed_experts[1, :2, 0, 0].tolist() == [300, -1]


def test_samples_of_different_models_are_refused():
    other = trajectory((1, 1), routes=np.zeros((2, 3, 4), dtype=np.int8))

    with pytest.raises(RowValueError, match=r"sample 1 has routes of shape \[3, 4\].*\[1, 2\]"):
        to_batch([group(TWO_TURNS, other)], pad_token_id=0)


def test_messages_have_their_slices():
    log = message_log(TWO_TURNS)

    assert [m["routed_experts"][:, 0, 0].tolist() for m in log] == [[5, 6], [7], [8], [9, -1]]


def test_routes_that_came_over_the_wire_are_not_to_be_written_to_and_are_copied():
    routes = routes_of(1, -1)
    routes.flags.writeable = False

    batch = to_batch([group(trajectory((1, 1), routes=routes))], pad_token_id=0)
    batch.final_batch["message_log"][0][0]["routed_experts"][:] = 9

    assert routes[:, 0, 0].tolist() == [1, -1]


@st.composite
def batches(draw):
    samples = []
    for _ in range(draw(st.integers(1, 4))):
        turns = draw(
            st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3)
        )
        count = sum(map(sum, turns))
        known = st.lists(st.integers(-1, 100), min_size=count, max_size=count)
        rows = draw(st.none() | known)
        samples.append(trajectory(*turns, routes=None if rows is None else routes_of(*rows)))
    return samples


@settings(deadline=None, max_examples=60)
@given(batches())
def test_padded_packed_and_messages_say_the_same_as_a_naive_loop(samples):
    batch = to_batch([group(*samples)], pad_token_id=0)
    if all(s.routed_experts is None for s in samples):
        assert batch.routed_experts is None
        return
    packed = batch.packed().routed_experts[:, 0, 0].tolist()
    place = 0
    for index, sample in enumerate(samples):
        given_rows = sample.routed_experts
        naive = [
            -1 if given_rows is None else int(given_rows[t, 0, 0])
            for t in range(len(sample.token_ids))
        ]
        width = batch.token_ids.shape[1]
        padded = batch.routed_experts[index, :, 0, 0].tolist()
        assert padded == naive + [-1] * (width - len(naive))
        assert packed[place : place + len(naive)] == naive
        log = batch.final_batch["message_log"][index]
        assert [r for m in log for r in m["routed_experts"][:, 0, 0].tolist()] == naive
        assert int(batch.missing_routes[index]) == sum(row == -1 for row in naive[:-1])
        place += len(naive)


def written(tmp_path, *samples):
    path = tmp_path / "rollouts.jsonl"
    with RecordWriter(path, RunRecord()) as writer:
        writer.write(group(*samples))
    return path


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_routes_in_a_file_are_one_envelope_and_come_back_exactly(tmp_path, dtype):
    routes = routes_of(5, 6, 7, 8, 9, -1, dtype=dtype)
    side = SideTrajectory(
        token_ids=np.array([1, 2], dtype=np.int32),
        logprobs=np.zeros(2, dtype=np.float32),
        turns=(Turn(start=0, generation_start=1, end=2),),
        routed_experts=routes_of(4, -1, dtype=dtype),
    )
    path = written(
        tmp_path,
        trajectory((2, 1), (1, 2), routes=routes, side_trajectories=(side,)),
        trajectory((1, 1)),
    )

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1]["trajectory"]["routed_experts"].startswith(f"nrlre1:{dtype}:6x1x2:")
    assert "routed_experts" not in lines[2]["trajectory"]
    ((first, second),) = (g.samples for g in read_groups(path))
    assert first.routed_experts.dtype == np.dtype(dtype)
    assert first.routed_experts.tolist() == routes.tolist()
    assert first.side_trajectories[0].routed_experts.tolist() == side.routed_experts.tolist()
    assert second.routed_experts is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nrlre1:int8:6x1x2:", "nrlre1:int8:5x1x2:", "12 elements of int8 where its shape 5x1x2"),
        ("nrlre1:int8:6x1x2:", "nrlre2:int8:6x1x2:", "begins with 'nrlre2"),
        ("nrlre1:int8:6x1x2:", "nrlre1:int16:3x1x2:", "3 rows of routes for 6 tokens"),
    ],
)
def test_a_file_whose_routes_do_not_fit_is_refused_with_the_row(tmp_path, old, new, message):
    path = written(tmp_path, TWO_TURNS)
    path.write_text(path.read_text().replace(old, new))

    with pytest.raises(RowValueError) as caught:
        list(read_groups(path))

    assert "row 0: routed_experts: " in str(caught.value)
    assert message in str(caught.value)


R3 = "r3/routed_experts_"


def r3(stats: GroupStats) -> dict[str, float]:
    return {n.removeprefix(R3): v for n, v in stats.scalars().items() if n.startswith("r3/")}


@pytest.mark.parametrize("stats_of", [group_stats, native_group_stats])
def test_fallback_metrics_count_tokens_that_a_loss_may_depend_on(stats_of):
    half = trajectory((2, 1), (1, 2), routes=routes_of(-1, -1, -1, 8, 9, -1))

    stats = stats_of(group(TWO_TURNS, half, trajectory((2, 3)), failure()))

    assert r3(stats) == {
        "fallback_samples": 2,
        "fallback_token_routes": 3 + 4,
        "expected_token_routes": 5 + 5 + 4,
        "actual_token_routes": 7,
        "fallback_token_route_fraction": 0.5,
    }


def test_no_metric_speaks_of_routes_where_no_sample_has_any():
    assert r3(group_stats(group(trajectory((1, 1)), failure()))) == {}


def test_the_fraction_over_many_groups_is_of_all_their_tokens_and_no_mean_of_means():
    parts = [
        group_stats(group(TWO_TURNS)),
        group_stats(group(trajectory((1, 1), routes=routes_of(-1, -1)))),
    ]

    assert [r3(part)["fallback_token_route_fraction"] for part in parts] == [0.0, 1.0]
    assert r3(GroupStats.merged(parts))["fallback_token_route_fraction"] == 1 / 6


def test_a_group_without_any_routes_counts_as_fallback_in_a_batch_that_has_some():
    bare = group_stats(group(trajectory((2, 3))))

    assert r3(bare) == {}
    merged = r3(GroupStats.merged([group_stats(group(TWO_TURNS)), bare]))
    assert merged["fallback_token_routes"] == 4
    assert merged["expected_token_routes"] == 9
    assert merged["fallback_samples"] == 1


def test_the_fraction_is_zero_where_nothing_was_expected():
    nothing = trajectory((1, 0), routes=routes_of(-1), placeholder=True)

    assert r3(group_stats(group(nothing)))["fallback_token_route_fraction"] == 0.0
