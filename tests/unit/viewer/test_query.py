"""Filters and orders, from a query string to rows and groups."""

import pytest

from gymrl.errors import ConfigError
from gymrl.types import FailureKind
from gymrl.viewer.index import RolloutIndex, take_snapshot
from gymrl.viewer.query import matching_rows, ordered_groups, ordered_rows, parse_query
from gymrl.viewer.scan import LineScanner
from tests.rollout_files import failure, trajectory, write_rollouts

# Lines 2 to 4, 5 to 6, 7 to 8.
OUTCOMES = (
    [
        trajectory(1.0, agent="solver"),
        trajectory(0.0, logprobs=(-1.0,) * 10),
        trajectory(0.5, incomplete_reason="max_output_tokens"),
    ],
    [failure("GymTransportError"), failure("BadLogprobsError", FailureKind.DATA)],
    [trajectory(0.25), trajectory(0.25, mask_sample=True)],
)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = write_rollouts(tmp_path_factory.mktemp("query") / "rollouts.jsonl", *OUTCOMES)
    index = RolloutIndex()
    index.extend(LineScanner().scan(path.read_bytes()))
    return index


@pytest.fixture(scope="module")
def lines(index):
    snapshot = take_snapshot(*index.freeze())

    def select(**parameters):
        query = parse_query(parameters)
        rows = ordered_rows(snapshot, matching_rows(snapshot, index.names, query), query)
        return snapshot.columns["line"][rows].tolist()

    return select


@pytest.fixture(scope="module")
def groups(index):
    snapshot = take_snapshot(*index.freeze())

    def select(**parameters):
        query = parse_query(parameters)
        return ordered_groups(snapshot, matching_rows(snapshot, index.names, query), query).tolist()

    return select


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, [2, 3, 4, 5, 6, 7, 8]),
        ({"agent": "solver"}, [2]),
        ({"agent": "nobody"}, []),
        ({"route": "math"}, [2, 3, 4, 5, 6, 7, 8]),
        ({"failure": "none"}, [2, 3, 4, 7, 8]),
        ({"failure": "any"}, [5, 6]),
        ({"failure": "infra"}, [5]),
        ({"failure": "data: BadLogprobsError"}, [6]),
        ({"failure": "never"}, []),
        ({"reward_min": "0.5"}, [2, 4]),
        ({"reward_max": "0.25"}, [3, 7, 8]),
        ({"reward_min": "0.2", "reward_max": "0.5"}, [4, 7, 8]),
        ({"tokens_min": "6"}, [3]),
        ({"tokens_max": "5", "failure": "none"}, [2, 4, 7, 8]),
        ({"truncated": "yes"}, [4]),
        ({"truncated": "no", "failure": "none"}, [2, 3, 7, 8]),
        ({"masked": "yes"}, [8]),
        ({"mixed": "yes"}, [2, 3, 4]),
        ({"mixed": "no"}, [7, 8]),
        ({"group": "1"}, [5, 6]),
        ({"agent": "", "failure": ""}, [2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_filter_keeps_the_rows_that_it_names(lines, parameters, expected):
    assert lines(**parameters) == expected


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("reward", [3, 7, 8, 4, 2, 5, 6]),
        ("-reward", [2, 4, 7, 8, 3, 5, 6]),
        ("-tokens", [3, 2, 4, 7, 8, 5, 6]),
        ("-line", [8, 7, 6, 5, 4, 3, 2]),
    ],
)
def test_rows_are_in_order_equals_as_in_the_file_and_failures_last(lines, sort, expected):
    assert lines(sort=sort) == expected


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("", [0, 1, 2]),
        ("mean", [2, 0, 1]),
        ("-mean", [0, 2, 1]),
        ("-std", [0, 2, 1]),
        ("spread", [2, 0, 1]),
        ("-failures", [1, 0, 2]),
        ("-tokens", [0, 2, 1]),
        ("-truncated", [0, 1, 2]),
        ("-rows", [0, 1, 2]),
    ],
)
def test_groups_are_in_order_and_those_without_rewards_last(groups, sort, expected):
    assert groups(sort=sort) == expected


def test_a_group_is_listed_when_one_of_its_rows_matches(groups):
    assert groups(masked="yes") == [2]
    assert groups(failure="any") == [1]
    assert groups(tokens_min="6") == [0]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"reward_min": "much"}, "reward_min"),
        ({"limit": "100000"}, "limit"),
        ({"offset": "-1"}, "offset"),
        ({"truncated": "maybe"}, "truncated"),
        ({"colour": "red"}, "colour"),
        ({"q": "x" * 501}, "500"),
    ],
)
def test_a_wrong_parameter_is_named(parameters, said):
    with pytest.raises(ConfigError, match=said):
        parse_query(parameters)


@pytest.mark.parametrize("sort", ["colour", "index", "-mean"])
def test_rows_have_no_other_orders(lines, sort):
    with pytest.raises(ConfigError, match="there is line, reward, tokens"):
        lines(sort=sort)


def test_groups_have_no_other_orders(groups):
    with pytest.raises(ConfigError, match="spread"):
        groups(sort="line")
