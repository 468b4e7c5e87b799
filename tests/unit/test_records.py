import json
import logging
import math
import resource

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import GenerationConfig, GymConfig, RolloutConfig, SamplingParams
from gymrl.errors import BadLogprobsError, ConfigError, RewardContractError, RowValueError
from gymrl.records import (
    RecordWriter,
    RunRecord,
    config_digest,
    finished_attempts,
    read_groups,
    read_records,
    read_run,
    task_digest,
)
from gymrl.rollout.prepare import GroupSizes, prepare_rows
from gymrl.types import (
    Adjustment,
    Failure,
    FailureKind,
    Reward,
    RolloutGroup,
    Trajectory,
    Turn,
)

RUN = RunRecord(config_digest="sha256:abc")


def prepared(num_groups=1, size=2, **dataset_fields):
    rows = [
        {"responses_create_params": {"input": f"task {n}"}, "task_source": "math", **dataset_fields}
        for n in range(num_groups)
        for _ in range(size)
    ]
    sampling = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=32)
    return prepare_rows(rows, sampling, GroupSizes(group=size), seed=5)


def trajectory(logprobs=(-0.1, -0.2), reward=Reward(1.0), **fields):  # noqa: B008  # frozen
    return Trajectory(
        agent="math_agent",
        token_ids=np.arange(1 + len(logprobs), dtype=np.int32),
        logprobs=np.array([0.0, *logprobs], dtype=np.float32),
        turns=(Turn(start=0, generation_start=1, end=1 + len(logprobs), generation_text="4"),),
        reward=reward,
        **fields,
    )


def failure(message="too slow"):
    return Failure(
        kind=FailureKind.INFRA,
        error="RolloutTimeout",
        message=message,
        row=1,
        attempts=5,
        traceback="Traceback ...",
        fields={"seconds": 3.0},
    )


def groups_of(*samples, size=2, rows=None):
    rows = rows or prepared(len(samples) // size, size)
    return [
        RolloutGroup(
            index=start // size,
            task_index=rows[start].task_index,
            rows=tuple(rows[start : start + size]),
            samples=tuple(samples[start : start + size]),
        )
        for start in range(0, len(samples), size)
    ]


def write(path, groups, run=RUN, **options):
    with RecordWriter(path, run, **options) as writer:
        for group in groups:
            writer.write(group)


def same(group, other):
    """Whether two groups are equal, arrays included (structs with arrays have no equality)."""
    assert group.rows == other.rows
    assert (group.index, group.task_index) == (other.index, other.task_index)
    assert (group.metrics, group.timings) == (other.metrics, other.timings)
    for mine, theirs in zip(group.samples, other.samples, strict=True):
        if isinstance(mine, Failure):
            assert mine == theirs
            continue
        for name in mine.__struct_fields__:
            value, expected = getattr(mine, name), getattr(theirs, name)
            if isinstance(value, np.ndarray):
                assert value.dtype == expected.dtype
                assert value.tolist() == expected.tolist()
            elif name == "result":
                assert json.loads(value) == json.loads(expected)
            else:
                assert value == expected, name
    return True


def test_a_group_comes_back_as_it_was(tmp_path):
    made = RolloutGroup(
        index=0,
        task_index=0,
        rows=tuple(prepared()),
        samples=(
            trajectory(
                reward=Reward(1.0, {"a": 1.0}, (Adjustment("effort", 0.5),)),
                incomplete_reason="length",
                mask_sample=True,
                result=b'{"reward": 1.0,\n "extra": [1e400, 123456789012345678901]}'.replace(
                    b"1e400", b"2.5"
                ),
                notes={"scorer_error": 1},
            ),
            failure(),
        ),
        metrics={"total_reward/mean": 1.0},
        timings={"timing/rollout/total": 2.0},
    )
    write(tmp_path / "r.jsonl", [made])
    (read,) = read_groups(tmp_path / "r.jsonl")
    assert same(read, made)


floats = st.floats(width=32, max_value=0, min_value=-9999)
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
rewards = st.builds(
    Reward,
    st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.dictionaries(text, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    st.lists(st.builds(Adjustment, text, st.floats(-5, 5)), max_size=3).map(tuple),
)
results = st.dictionaries(
    text, st.none() | st.integers(-(2**63), 2**63) | text | st.lists(st.booleans()), max_size=3
)
samples = st.builds(
    lambda logprobs, reward, result, mask: trajectory(
        logprobs, reward, result=json.dumps(result, indent=2).encode(), mask_sample=mask
    ),
    st.lists(floats, min_size=1, max_size=5),
    rewards,
    results,
    st.booleans(),
) | st.builds(failure, text)


@settings(deadline=None, max_examples=40)
@given(st.lists(samples, min_size=4, max_size=4))
def test_whatever_is_written_is_read_back_bit_for_bit(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("records") / "r.jsonl"
    groups = groups_of(*made)
    write(path, groups)
    for read, group in zip(read_groups(path), groups, strict=True):
        assert same(read, group)


def test_every_line_is_one_json_object_and_says_how_it_was_sampled(tmp_path):
    write(
        tmp_path / "r.jsonl",
        groups_of(trajectory(), failure()),
        logprobs_mode="processed",
    )
    head, first, second = [
        json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()
    ]
    assert (head["record"], head["schema"], head["config_digest"]) == ("run", 1, "sha256:abc")
    sampling = first["sampling"]
    assert sampling.pop("seed") >= 0
    assert sampling == {
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 32,
        "logprobs_mode": "processed",
    }
    assert first["route"] == "math"
    assert second["failure"]["error"] == "RolloutTimeout"
    assert "trajectory" not in second


def test_the_task_can_be_left_out(tmp_path):
    write(tmp_path / "r.jsonl", groups_of(trajectory(), trajectory()), with_task=False)
    (group,) = read_groups(tmp_path / "r.jsonl")
    assert group.rows[0].body == b"{}"


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_logprob_that_is_not_finite_is_refused_not_written_as_null(tmp_path, bad):
    with RecordWriter(tmp_path / "r.jsonl", RUN) as writer:
        (group,) = groups_of(trajectory(), trajectory(logprobs=(-0.5, bad)))
        with pytest.raises(BadLogprobsError, match="row 1: the log-probability at token 2"):
            writer.write(group)
    assert list(read_records(tmp_path / "r.jsonl")) == []


@pytest.mark.parametrize(
    "reward",
    [
        Reward(float("nan")),
        Reward(1.0, {"a": float("inf")}),
        Reward(1.0, None, (Adjustment("x", float("nan")),)),
    ],
)
def test_a_reward_that_is_not_finite_is_refused(tmp_path, reward):
    with RecordWriter(tmp_path / "r.jsonl", RUN) as writer:
        (group,) = groups_of(trajectory(), trajectory(reward=reward))
        with pytest.raises(RewardContractError, match="row 1"):
            writer.write(group)


def test_a_lone_surrogate_in_a_failures_text_does_not_lose_the_row(tmp_path):
    write(tmp_path / "r.jsonl", groups_of(trajectory(), failure("bad \ud800 text")))
    (group,) = read_groups(tmp_path / "r.jsonl")
    assert group.samples[1].message == "bad ? text"


def test_each_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
    first, second = groups_of(trajectory(), failure(), trajectory(), trajectory())
    with RecordWriter(tmp_path / "r.jsonl", RUN) as writer:
        writer.write(first)
        assert len(list(read_records(tmp_path / "r.jsonl"))) == 2
        writer.write(second)
        assert len(list(read_records(tmp_path / "r.jsonl"))) == 4


def test_a_torn_last_line_is_left_out_with_a_warning(tmp_path, caplog):
    path = tmp_path / "r.jsonl"
    write(path, groups_of(*[trajectory()] * 4))
    whole = path.read_bytes()
    last_line = whole.splitlines(keepends=True)[-1]
    start = len(whole) - len(last_line)
    for cut in (start + 1, start + len(last_line) // 2, len(whole) - 2):
        path.write_bytes(whole[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert [record.index for record in read_records(path)] == [0, 1, 2]
        assert "torn" in caplog.text


def test_a_group_that_lost_its_last_row_is_left_out(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, groups_of(*[trajectory()] * 4))
    path.write_bytes(path.read_bytes()[:-5])
    assert [group.index for group in read_groups(path)] == [0]


def test_appending_cuts_the_torn_line_off_first(tmp_path, caplog):
    path = tmp_path / "r.jsonl"
    first, second = groups_of(*[trajectory()] * 4)
    write(path, [first])
    with path.open("ab") as file:
        file.write(b'{"record":"row","gro')
    with caplog.at_level(logging.WARNING):
        write(path, [second], append=True)
    assert "torn" in caplog.text
    assert [record.index for record in read_records(path)] == [0, 1, 2, 3]


def test_appending_ends_a_whole_last_line_that_lacks_its_newline(tmp_path):
    path = tmp_path / "r.jsonl"
    first, second = groups_of(*[trajectory()] * 4)
    write(path, [first])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    write(path, [second], append=True)
    assert [record.index for record in read_records(path)] == [0, 1, 2, 3]


def test_appending_to_a_file_whose_only_line_is_torn_starts_it_anew(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"record":"ru')
    write(path, groups_of(trajectory(), trajectory()), append=True)
    assert read_run(path) == RUN
    assert len(list(read_records(path))) == 2


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, groups_of(*[trajectory()] * 2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{}\n" + lines[1])
    with pytest.raises(RowValueError, match=r"r\.jsonl:2"):
        list(read_records(path))


def test_an_existing_file_is_not_overwritten(tmp_path):
    write(tmp_path / "r.jsonl", [])
    with pytest.raises(ConfigError, match="exists"):
        RecordWriter(tmp_path / "r.jsonl", RUN)


def test_a_run_of_another_configuration_is_not_continued(tmp_path):
    write(tmp_path / "r.jsonl", [])
    with pytest.raises(ConfigError, match=r"sha256:abc, now sha256:def"):
        RecordWriter(tmp_path / "r.jsonl", RunRecord(config_digest="sha256:def"), append=True)
    with pytest.raises(ConfigError, match="another configuration"):
        finished_attempts(tmp_path / "r.jsonl", "sha256:def")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no run"),
        (b'{"record":"run","schema":99}\n', "schema 99"),
    ],
)
def test_a_file_that_is_no_run_of_rollouts_is_refused(tmp_path, content, message):
    (tmp_path / "r.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path / "r.jsonl")


def test_a_file_without_a_header_and_a_missing_file_are_refused(tmp_path):
    write(tmp_path / "whole.jsonl", groups_of(trajectory(), trajectory()))
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "headless.jsonl").write_bytes(b"".join(lines[1:]))
    with pytest.raises(ConfigError, match="no run record"):
        list(read_records(tmp_path / "headless.jsonl"))
    with pytest.raises(ConfigError, match="No such file"):
        list(read_records(tmp_path / "missing.jsonl"))
    with pytest.raises(ConfigError, match="No such file"):
        RecordWriter(tmp_path / "no" / "such" / "directory.jsonl", RUN)


def test_failed_attempts_are_not_finished(tmp_path):
    rows = prepared(1, 4)
    write(
        tmp_path / "r.jsonl",
        groups_of(trajectory(), failure(), trajectory(), failure(), size=4, rows=rows),
    )
    digest = task_digest(rows[0].body)
    assert finished_attempts(tmp_path / "r.jsonl", "sha256:abc") == {(digest, 0), (digest, 2)}


def test_a_task_digest_depends_on_the_task_alone():
    def digest(seed=5, temperature=0.7, route="math", **fields):
        row = {
            "responses_create_params": {"input": "2+2?", "metadata": {"k": "v"}},
            "task_source": route,
            "answer": 4,
            **fields,
        }
        sampling = SamplingParams(temperature=temperature)
        (first, *_) = prepare_rows([row] * 2, sampling, GroupSizes(group=1), seed=seed)
        return task_digest(first.body)

    assert digest() == digest(seed=6) == digest(temperature=1.0) == digest(route="other")
    assert digest() == digest(_ng_task_index=9, seed=None)
    assert digest() != digest(answer=5)


def config(**changes):
    return RolloutConfig(
        **{"gym": GymConfig(base_urls=("http://127.0.0.1:1/v1",)), "seed": 1, **changes}
    )


def test_a_config_digest_ignores_where_and_how_fast_a_run_goes():
    assert config_digest(config()) == config_digest(config(num_workers=4, start_timeout_s=5.0))
    moved = msgspec.structs.replace(config().gym, host="127.0.0.2", max_connections=7)
    assert config_digest(config()) == config_digest(config(gym=moved))
    here, there = (
        RolloutConfig(generation=GenerationConfig(model="m", port=port), gym=GymConfig())
        for port in (0, 8000)
    )
    assert config_digest(here) == config_digest(there)
    assert config_digest(config()) != config_digest(config(seed=2))
    assert config_digest(config()) != config_digest(
        config(sampling=SamplingParams(temperature=0.5))
    )


@pytest.mark.parametrize(
    "metadata",
    [
        "x",
        [],
        {"extra_body": 5},
        {"extra_body": "nojson"},
        {"extra_body": "[1]"},
        {"extra_body": '{"top_k": "5", "seed": 5.5}'},
    ],
)
def test_a_row_that_asks_for_odd_things_is_written_all_the_same(tmp_path, metadata):
    rows = prepared(1, 1)
    body = json.loads(rows[0].body)
    body["responses_create_params"] |= {"metadata": metadata, "temperature": "hot"}
    odd = msgspec.structs.replace(rows[0], body=json.dumps(body).encode())
    write(tmp_path / "r.jsonl", groups_of(trajectory(), size=1, rows=[odd]))
    (record,) = read_records(tmp_path / "r.jsonl")
    sampling = record.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (None, None, None)
    assert json.loads(bytes(record.task)) == body


def test_a_metric_that_is_not_finite_does_not_make_the_file_unreadable(tmp_path):
    (group,) = groups_of(trajectory(), trajectory())
    metrics = {"a": math.inf, "b": math.nan, "c": 1.0}
    write(tmp_path / "r.jsonl", [msgspec.structs.replace(group, metrics=metrics)])
    (read,) = read_groups(tmp_path / "r.jsonl")
    assert read.metrics == {"c": 1.0}


def test_a_full_disk_leaves_no_torn_line_in_the_middle(tmp_path):
    path = tmp_path / "r.jsonl"
    first, second, third = groups_of(*[trajectory()] * 6)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RecordWriter(path, RUN) as writer:
        writer.write(first)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                writer.write(second)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        writer.write(third)
    assert [group.index for group in read_groups(path)] == [0, 2]
