"""Bytes to lines, and lines to what the index keeps."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.types import Reward, SideTrajectory, Turn
from gymrl.viewer.scan import MASKED, SIDES, TRUNCATED, LineScanner
from tests.rollout_files import failure, trajectory, write_rollouts


def scan(data, block=1 << 20, **options):
    scanner = LineScanner(**options)
    rows, broken, runs = [], [], []
    for start in range(0, len(data), block):
        found = scanner.scan(data[start : start + block])
        rows += found.rows
        broken += found.broken
        runs += found.runs
    return scanner, rows, broken, runs


@pytest.fixture
def file(tmp_path):
    def write(*outcomes, **options):
        return write_rollouts(tmp_path / "rollouts.jsonl", *outcomes, **options).read_bytes()

    return write


def test_a_row_is_known_by_its_line_and_its_bytes(file):
    data = file([trajectory(), trajectory()])
    _, rows, broken, runs = scan(data)

    lines = data.splitlines(keepends=True)
    assert [row.line for row in rows] == [2, 3]
    assert [data[row.offset : row.offset + row.size] for row in rows] == lines[1:]
    assert runs == [(0, len(lines[0]))]
    assert broken == []


def test_a_rows_facts_are_those_of_its_trajectory(file):
    turns = (
        Turn(start=0, generation_start=3, end=4),
        Turn(start=4, generation_start=5, end=7),
    )
    made = trajectory(
        Reward(1.0).adjusted("effort", 0.25),
        prompt=3,
        logprobs=(-1.0, 0.0, -1.0, -1.0),
        turns=turns,
        agent="solver",
    )
    _, [row], _, _ = scan(file([made]))

    assert (row.reward, row.tokens, row.generated, row.turns) == (0.25, 7, 3, 2)
    assert (row.agent, row.route, row.failure, row.flags) == ("solver", "math", "", 0)


def test_a_failure_has_its_kind_and_no_reward(file):
    _, [row], _, _ = scan(file([failure("GymTransportError")]))

    assert row.failure == "infra: GymTransportError"
    assert math.isnan(row.reward)
    assert (row.tokens, row.turns) == (0, 0)


def test_what_marks_a_trajectory_becomes_bits(file):
    side = SideTrajectory(
        token_ids=trajectory().token_ids,
        logprobs=trajectory().logprobs,
        turns=trajectory().turns,
    )
    outcomes = [
        trajectory(incomplete_reason="max_output_tokens"),
        trajectory(incomplete_reason="content_filter"),
        trajectory(truncated_prefix=True),
        trajectory(mask_sample=True, side_trajectories=(side,)),
    ]
    _, rows, _, _ = scan(file(outcomes))

    assert [row.flags for row in rows] == [TRUNCATED, 0, TRUNCATED, MASKED | SIDES]


@settings(deadline=None, max_examples=60)
@given(block=st.integers(1, 700), data=st.data())
def test_blocks_of_any_size_give_the_same_rows(block, data, tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "rollouts.jsonl"
    whole = write_rollouts(path, [trajectory(), failure()], [trajectory(0.5)]).read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    _, expected, _, _ = scan(whole[:cut])
    scanner, rows, broken, _ = scan(whole[:cut], block)

    assert repr(rows) == repr(expected)  # NaN is not equal to itself
    assert broken == []
    assert scanner.read_to == cut
    assert scanner.complete == whole[:cut].rfind(b"\n") + 1


def test_a_half_last_line_is_no_row_until_its_end_comes(file):
    data = file([trajectory(), trajectory()])
    scanner = LineScanner()

    first = scanner.scan(data[:-10])
    assert len(first.rows) == 1
    assert first.broken == []
    assert len(scanner.scan(data[-10:]).rows) == 1


def test_a_half_line_that_is_dropped_is_read_again_from_its_beginning(file):
    data = file([trajectory(), trajectory()])
    scanner = LineScanner()
    scanner.scan(data[:-10])
    scanner.drop_pending()

    again = scanner.scan(data[scanner.read_to :])
    assert [row.line for row in again.rows] == [3]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json}\n", "malformed"),
        (b'{"record":"row","group":1}\n', "missing required field"),
        (b"[1, 2]\n", "Expected `object`"),
        (b"\xff\xfe\n", "malformed"),
        (b'{"record":"row"' + b"[" * 100_000 + b"\n", ""),
    ],
)
def test_a_broken_line_is_counted_and_named_and_the_rest_is_read(file, line, reason):
    data = file([trajectory()])
    _, rows, broken, _ = scan(data + line + data.splitlines(keepends=True)[1])

    assert [row.line for row in rows] == [2, 4]
    assert [(one.line, one.offset) for one in broken] == [(3, len(data))]
    assert reason in broken[0].error


def test_numbers_that_no_column_holds_are_broken_lines(file):
    data = file([trajectory()])
    too_large = data.replace(b'"task_index":0', b'"task_index":99999999999')
    overlapping = data.replace(b'"generation_start":3', b'"generation_start":9')
    _, rows, broken, _ = scan(too_large + overlapping)

    assert rows == []
    assert [one.line for one in broken] == [2, 4]


def test_a_row_without_an_outcome_is_a_broken_line(file):
    line = file([failure()]).splitlines()[1]
    head, _, _ = line.partition(b',"failure"')
    _, rows, broken, _ = scan(head + b"}\n")

    assert rows == []
    assert "no trajectory and no failure" in broken[0].error


def test_a_line_over_the_limit_is_passed_over_without_being_held(file):
    data = file([trajectory()])
    scanner, rows, broken, _ = scan(
        data + b"x" * 9000 + b"\n" + data.splitlines(keepends=True)[1], 64, max_line_bytes=4000
    )

    assert [row.line for row in rows] == [2, 4]
    assert broken[0].error == "9,001 bytes; lines of at most 4,000 are read"
    assert scanner.read_to == scanner.complete


def test_empty_lines_are_nothing(file):
    _, rows, broken, _ = scan(b"\n\n" + file([trajectory()]) + b"  \n")
    assert len(rows) == 1
    assert broken == []


def test_files_put_together_are_runs_of_their_own(file):
    data = file([trajectory()])
    _, rows, _, runs = scan(data + data)
    assert [row.run for row in rows] == [1, 2]
    assert len(runs) == 2
