"""Materialized tasks: what an environment server is sent, and what its answer says."""

import json

import pytest

from gymrl.errors import GymSchemaError, RowValueError
from gymrl.gym.materialized import agents_answer, is_materialized
from gymrl.gym.shards import row_route


def answer(**fields):
    identity = {"episode_id": {"rollout_id": "x", "attempt": 0}, "task_id": {}}
    return json.dumps(identity | fields).encode()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"task_id": "a", "question": "1+1"}, False),
        ({"task_id": {"taskset": "t", "task_id": "a"}, "task_input": {}}, True),
        ({"task_id": {"taskset": "t", "task_id": "a"}}, True),
        ({"task_input": {}}, True),
    ],
)
def test_a_row_with_an_envelope_is_materialized_though_it_be_malformed(row, expected):
    assert is_materialized(row) is expected


def test_the_result_is_what_an_agent_would_have_answered():
    assert json.loads(agents_answer(answer(result={"reward": 1.0, "x": 2}, failure=None))) == {
        "reward": 1.0,
        "x": 2,
    }


def test_a_failure_is_reported_as_gyms_servers_report_one():
    failure = {
        "failure_reason": "gone",
        "terminal": True,
        "stage": "seed",
        "partial_response": None,
    }
    assert json.loads(agents_answer(answer(result=None, failure=failure))) == {
        "_ng_failure_class": "environment_server_failed",
        "_ng_failure_terminal": True,
        "_ng_failure_message": "gone",
        "_ng_failure_stage": "seed",
    }


@pytest.mark.parametrize(
    "body", [answer(), answer(result=None), b"[]", b"not JSON", b'{"failure": 3}']
)
def test_an_answer_that_is_no_episodes_is_refused(body):
    with pytest.raises(GymSchemaError):
        agents_answer(body)


def test_where_flat_rows_are_needed_a_materialized_one_is_told_from_one_without_a_route():
    row = {"task_id": {"taskset": "t", "task_id": "a"}, "task_input": {}, "task_source": "math"}
    with pytest.raises(RowValueError, match="row 3 is a materialized task"):
        row_route(row, 3)
