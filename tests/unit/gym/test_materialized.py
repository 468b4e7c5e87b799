"""Materialized tasks: what an environment server is sent, and what its answer says."""

import json

import pytest

from gymrl.config import SamplingParams
from gymrl.errors import GymSchemaError, RowValueError
from gymrl.gym.materialized import agents_answer, episode_body, flat_row, is_materialized
from gymrl.gym.shards import row_route
from gymrl.records.digests import task_digest
from gymrl.rollout.prepare import GroupSizes, next_attempt, prepare_rows


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


def test_a_failure_whose_fields_are_null_is_a_failure_all_the_same():
    fields = ("failure_reason", "terminal", "failure_kind", "stage")
    reported = json.loads(agents_answer(answer(failure=dict.fromkeys(fields))))
    assert reported["_ng_failure_class"] == "environment_server_failed"
    assert (reported["_ng_failure_terminal"], reported["_ng_failure_message"]) == (False, "")


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


def test_a_materialized_row_has_the_route_of_its_taskset_flat_or_not():
    row = {"task_id": {"taskset": "t", "task_id": "a"}, "task_input": {"task_source": "math"}}
    assert row_route(row, 3) == row_route(dict(flat_row(row, 3)), 3) == "taskset:t"
    assert flat_row({"task_source": "math"}, 0) == {"task_source": "math"}


@pytest.mark.parametrize(
    "row",
    [
        {"task_id": {"taskset": "t"}, "task_input": {}},
        {"task_id": "a", "task_input": {}},
        {"task_id": {"taskset": "", "task_id": "a"}, "task_input": {}},
        {"task_id": {"taskset": "t", "task_id": "a"}, "task_input": []},
    ],
)
def test_a_malformed_materialized_row_has_no_route(row):
    with pytest.raises(RowValueError, match="row 3 is no materialized task"):
        row_route(row, 3)
    with pytest.raises(RowValueError, match="row 0 is no materialized task"):
        prepare_rows([row], SamplingParams(), GroupSizes(group=1))


def test_a_prepared_episode_has_the_sampling_in_its_task_and_no_stamp():
    params = {"input": "1 + 1", "max_output_tokens": 8}
    task_input = {"task_id": "a", "responses_create_params": params, "weight": 1.10}
    task = {"task_id": {"taskset": "t", "task_id": "a"}, "task_input": task_input}
    before = json.dumps(task)
    sampling = SamplingParams(temperature=0.5, max_tokens=4)
    rows = prepare_rows([task] * 2, sampling, GroupSizes(group=2), seed=1)
    assert json.dumps(task) == before
    assert [row.route for row in rows] == ["taskset:t", "taskset:t"]
    # A record of it is that of the same task as a flat row.
    flat = prepare_rows([{**task_input, "task_source": "x"}], sampling, GroupSizes(group=1))
    assert {task_digest(row.body) for row in rows} == {task_digest(flat[0].body)}
    again = next_attempt(rows[1], 1)
    request = json.loads(episode_body(again.body, again.rollout_id))
    assert request["episode_id"] == {"rollout_id": f"{rows[1].rollout_id}.1", "attempt": 0}
    assert request["task"]["task_id"] == task["task_id"]
    sent = request["task"]["task_input"]
    assert set(sent) == set(task_input)
    stamped = sent["responses_create_params"]
    assert (stamped["temperature"], stamped["max_output_tokens"]) == (0.5, 4)
    assert "seed" in stamped["metadata"]["extra_body"]
