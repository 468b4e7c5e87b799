"""Rows as columns, groups and their numbers."""

import math

import numpy as np
import pytest

from gymrl.viewer.index import BROKEN_KEPT, BYTES_PER_ROW, RolloutIndex, take_snapshot
from gymrl.viewer.scan import BrokenLine, LineScanner, Scanned
from tests.rollout_files import failure, trajectory, write_rollouts


def indexed(data):
    index = RolloutIndex()
    index.extend(LineScanner().scan(data))
    return index


def snapshot_of(index):
    return take_snapshot(*index.freeze())


@pytest.fixture
def snapshot(tmp_path):
    def make(*outcomes):
        path = write_rollouts(tmp_path / "rollouts.jsonl", *outcomes)
        return snapshot_of(indexed(path.read_bytes()))

    return make


def test_a_groups_numbers_are_over_the_rewards_of_its_rows(snapshot):
    found = snapshot([trajectory(1.0), trajectory(0.0), failure()], [trajectory(-2.0)])
    stats = found.stats

    assert stats.rows.tolist() == [3, 1]
    assert stats.failures.tolist() == [1, 0]
    assert stats.minimum.tolist() == [0.0, -2.0]
    assert stats.mean.tolist() == [0.5, -2.0]
    assert stats.maximum.tolist() == [1.0, -2.0]
    assert stats.deviation.tolist() == [0.5, 0.0]
    assert stats.tokens.tolist() == [5.0, 5.0]
    assert stats.first.tolist() == [0, 3]


def test_a_group_of_failures_has_no_reward(snapshot):
    stats = snapshot([failure(), failure()]).stats
    assert all(
        math.isnan(column[0])
        for column in (stats.minimum, stats.mean, stats.maximum, stats.deviation, stats.tokens)
    )


def test_a_file_without_rows_has_no_groups():
    found = snapshot_of(RolloutIndex())
    assert (found.num_rows, found.groups) == (0, [])
    assert found.stats.mean.tolist() == []


def test_an_attempt_that_was_made_again_counts_once(tmp_path):
    path = write_rollouts(tmp_path / "rollouts.jsonl", [failure(), trajectory(1.0)])
    lines = path.read_bytes().splitlines(keepends=True)
    again = write_rollouts(tmp_path / "again.jsonl", [trajectory(0.0), trajectory(1.0)])
    found = snapshot_of(indexed(b"".join(lines) + again.read_bytes().splitlines(keepends=True)[1]))

    assert found.superseded.tolist() == [True, False, False]
    assert (found.stats.rows[0], found.stats.failures[0], found.stats.mean[0]) == (2, 0, 0.5)
    assert found.rows_of(0) == [0, 2, 1]


def test_rows_of_groups_may_come_in_any_order(tmp_path):
    path = write_rollouts(tmp_path / "rollouts.jsonl", [trajectory(1.0)] * 3, [trajectory(0.0)] * 3)
    head, *rows = path.read_bytes().splitlines(keepends=True)
    mixed = [rows[4], rows[0], rows[5], rows[2], rows[3], rows[1]]
    found = snapshot_of(indexed(head + b"".join(mixed)))

    assert [group.group for group in found.groups] == [1, 0]
    assert found.stats.mean.tolist() == [0.0, 1.0]
    assert found.rows_of(0) == [4, 0, 2]
    assert found.stats.first.tolist() == [0, 1]


def test_a_row_is_found_by_its_line_and_only_by_that(snapshot):
    found = snapshot([trajectory(), trajectory()])
    assert [found.row_at_line(line) for line in (0, 1, 2, 3, 4)] == [None, None, 0, 1, None]


def test_what_was_handed_out_stays_while_rows_come(tmp_path):
    path = write_rollouts(tmp_path / "rollouts.jsonl", *[[trajectory()]] * 40)
    head, *rows = path.read_bytes().splitlines(keepends=True)
    index, scanner = RolloutIndex(), LineScanner()
    index.extend(scanner.scan(head + rows[0]))
    early = snapshot_of(index)
    for _ in range(60):
        index.extend(scanner.scan(b"".join(rows)))

    assert early.num_rows == 1
    assert early.columns["line"].tolist() == [2]
    assert snapshot_of(index).columns["line"].tolist() == list(range(2, 2403))


def test_a_row_takes_the_bytes_that_the_documentation_says():
    assert BYTES_PER_ROW == 77


def test_only_the_first_broken_lines_are_kept():
    index = RolloutIndex()
    broken = [BrokenLine(n, n * 10, "no") for n in range(1, 31)]
    index.extend(Scanned(broken=broken[:15]))
    index.extend(Scanned(broken=broken[15:]))

    assert index.num_broken == 30
    assert index.broken == broken[:BROKEN_KEPT]


def test_rewards_that_cancel_do_not_lose_the_spread(snapshot):
    found = snapshot([trajectory(1e8), trajectory(1e8 + 1)])
    assert found.stats.deviation.tolist() == [0.5]
    assert np.isfinite(found.stats.mean).all()


def test_groups_of_one_number_in_two_files_are_two(tmp_path):
    data = write_rollouts(tmp_path / "rollouts.jsonl", [trajectory()]).read_bytes()
    found = snapshot_of(indexed(data + data))
    assert [(group.run, group.group) for group in found.groups] == [(1, 0), (2, 0)]


def test_rewards_without_a_square_have_a_mean_and_no_spread(snapshot):
    stats = snapshot([trajectory(1e300), trajectory(-1e300)]).stats
    assert (stats.mean[0], stats.deviation[0]) == (0.0, math.inf)
