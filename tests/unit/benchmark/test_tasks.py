import inspect

import pytest

import gymrl
from gymrl.benchmark import BaseServerConfig, TaskRunner
from gymrl.errors import ConfigError, RowError

SERVER = BaseServerConfig("127.0.0.1", 11000)


def row(task_id="a", prompt="x", **fields):
    return {
        "task_id": task_id,
        "task_source": "math",
        "responses_create_params": {"input": prompt},
        **fields,
    }


def required(function):
    """Parameters that callers may pass by place, with their defaults."""
    return [
        (name, parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]


def test_the_signatures_are_those_that_callers_were_promised():
    empty = inspect.Parameter.empty
    assert required(gymrl.plan_benchmark) == [
        ("benchmark", empty),
        ("task_ids", None),
        ("overrides", None),
        ("work_dir", None),
    ]
    assert required(gymrl.serve_benchmark) == [
        ("benchmark", empty),
        ("model_type", "openai_model"),
        ("overrides", None),
        ("registry_port", None),
    ]
    assert required(gymrl.TaskRunner) == [("rows", empty), ("registry_server", empty)]
    assert required(gymrl.TaskRunner.run_task) == [
        ("self", empty),
        ("task_id", empty),
        ("num_repeats", 1),
        ("rollout_id", None),
    ]
    assert required(gymrl.TaskRunner.task_ids) == [("self", empty)]
    assert required(gymrl.PlannedBenchmark) == [("plan", empty), ("rows", empty)]
    assert required(gymrl.TaskResult) == [
        ("task_id", empty),
        ("rewards", empty),
        ("results", empty),
    ]
    assert required(gymrl.BaseServerConfig) == [("host", empty), ("port", empty)]


def test_every_further_parameter_has_a_default():
    for function in (gymrl.plan_benchmark, gymrl.serve_benchmark, gymrl.TaskRunner):
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                assert parameter.default is not inspect.Parameter.empty


def test_the_results_have_the_fields_that_callers_were_promised():
    assert gymrl.TaskResult.__struct_fields__ == ("task_id", "rewards", "results")
    assert gymrl.PlannedBenchmark.__struct_fields__ == ("plan", "rows")
    assert set(gymrl.EvalPlan.__struct_fields__) == {
        "schema_name",
        "gym",
        "benchmark",
        "selected_task_ids",
        "tasks",
    }


def test_repeats_of_a_task_are_one_task():
    rows = [row("b"), row("b", _ng_rollout_index=1), row("a", agent_ref={"name": "x"})]

    assert TaskRunner(rows, SERVER).task_ids() == ["b", "a"]


def test_different_rows_that_share_an_id_are_refused():
    with pytest.raises(ConfigError, match="different rows share a task id: row 1"):
        TaskRunner([row("a", "one"), row("a", "two")], SERVER)


def test_a_row_without_an_id_is_refused():
    with pytest.raises(ConfigError, match=r"1 of 2 tasks have no task id .*rows \[1\]"):
        TaskRunner([row(), row(None)], SERVER)


def test_a_row_without_a_route_is_refused():
    with pytest.raises(RowError, match="row 1 has no route"):
        TaskRunner([row("a"), row("b", task_source=None)], SERVER)


def test_materialized_rows_are_tasks_that_need_no_route():
    task = {"task_id": {"taskset": "t", "task_id": "a"}, "task_input": {"question": "1+1"}}
    assert TaskRunner([task, dict(task)], SERVER).task_ids() == ["a"]


@pytest.mark.parametrize(
    "task",
    [
        {"task_id": {"taskset": "t", "task_id": "a"}},
        {"task_id": {"task_id": "a"}, "task_input": {}},
        {"task_id": "a", "task_input": {}},
        {"task_id": {"taskset": "", "task_id": "a"}, "task_input": {}},
        {"task_id": {"taskset": "t", "task_id": "a"}, "task_input": "text"},
    ],
)
def test_a_malformed_materialized_row_is_refused(task):
    with pytest.raises(ConfigError, match="row 0 is no materialized task"):
        TaskRunner([task], SERVER)


async def test_an_unknown_task_is_refused_before_anything_is_asked():
    with pytest.raises(ConfigError, match=r"No input rows for task ids \['z'\]"):
        await TaskRunner([row()], SERVER).run_task("z")


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
async def test_a_number_of_repeats_that_is_not_positive_is_refused(count):
    with pytest.raises(ConfigError, match="num_repeats="):
        await TaskRunner([row()], SERVER).run_task("a", num_repeats=count)


@pytest.mark.parametrize("rollout_id", ["", "-a", ".x", "a/b", "a b", "ä", "a\n", 7])
async def test_a_malformed_rollout_id_is_refused(rollout_id):
    with pytest.raises(ConfigError, match="rollout_id="):
        await TaskRunner([row()], SERVER).run_task("a", rollout_id=rollout_id)


def test_a_server_has_an_address():
    assert SERVER.url == "http://127.0.0.1:11000"
    assert BaseServerConfig("::1", 80).url == "http://[::1]:80"
