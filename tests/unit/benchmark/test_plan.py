import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.benchmark import EvalPlan, PlannedBenchmark
from gymrl.benchmark.plan import PlanBenchmark, PlanGym, build_plan, row_task_id, task_digest
from gymrl.errors import ConfigError

TINYMATH = Path(__file__).parents[2] / "data" / "plans" / "tinymath.json"


def make_plan(rows, **options):
    return build_plan(
        rows,
        benchmark=PlanBenchmark("bench", ["benchmarks/bench/config.yaml"]),
        taskset="bench",
        gym=PlanGym("0.7.0", None),
        **options,
    )


def task(task_id, prompt="solve it", **fields):
    params = {"input": [{"role": "user", "content": prompt}]}
    return {"task_id": task_id, "responses_create_params": params, **fields}


def tinymath_row(index, question):
    messages = [
        {"role": "system", "content": "You are a careful calculator."},
        {"role": "user", "content": f"Solve: {question}\nPut the answer in \\boxed{{}}."},
    ]
    return {
        "task_id": f"tm-{index}",
        "question": question,
        "expected_answer": "4",
        "responses_create_params": {"max_output_tokens": 64, "input": messages},
        "task_source": "tinymath_simple_agent",
    }


def test_a_plan_is_byte_for_byte_that_of_nemo_gyms_rules():
    plan = build_plan(
        [tinymath_row(2, "2+2"), tinymath_row(0, "0+4"), tinymath_row(1, "1+3")],
        benchmark=PlanBenchmark("tinymath", ["benchmarks/tinymath/config.yaml"]),
        taskset="tinymath",
        gym=PlanGym("0.7.0", None),
    )

    assert plan.to_json().encode() == TINYMATH.read_bytes()
    assert EvalPlan.from_json(TINYMATH.read_bytes()) == plan


def test_a_digest_is_that_of_canonical_json():
    row = {"task_id": "a", "b": [1, 2.5, None, True], "ä": "€"}
    canonical = '{"b":[1,2.5,null,true],"task_id":"a","ä":"€"}'

    assert task_digest(row) == "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def test_routing_and_bookkeeping_do_not_change_a_digest():
    plain = task("a")
    routed = task(
        "a", task_source="s", agent_ref={"name": "x"}, skills_ref={"p": 1}, _ng_task_index=7
    )

    assert task_digest(routed) == task_digest(plain)
    assert task_digest(task("a", "another prompt")) != task_digest(plain)


def test_the_id_field_is_part_of_the_digest():
    assert task_digest({"task_id": "a"}) != task_digest({"problem_id": "a"})


@given(st.permutations(["a", "b", "c", "d"]))
@settings(deadline=None, max_examples=24)
def test_the_order_of_rows_does_not_change_a_plan(order):
    assert make_plan([task(i) for i in order]) == make_plan([task(i) for i in "abcd"])


def test_an_id_is_the_first_field_that_is_not_null():
    assert row_task_id({"task_id": None, "problem_id": 12, "instance_id": "i"}) == "12"
    assert row_task_id({"instance_id": "repo__1"}) == "repo__1"
    assert row_task_id({"task_id": {"taskset": "t", "task_id": "x"}}) == "x"
    assert row_task_id({"task_name": "x"}) is None


def test_rows_without_an_id_are_refused_with_their_places():
    rows = [task("a"), *({"responses_create_params": {"input": "x"}} for _ in range(7))]

    with pytest.raises(
        ConfigError, match=r"'bench': 7 of 8 tasks have no task id .*rows \[1, 2, 3, 4, 5\]"
    ):
        make_plan(rows)


def test_an_id_that_two_rows_share_is_refused():
    with pytest.raises(ConfigError, match=r"task ids are not unique: \['a'\]"):
        make_plan([task("a", "one"), task("a", "two"), task("b")])


def test_a_materialized_row_is_refused():
    row = {"task_id": {"taskset": "t", "task_id": "a"}, "task_input": {"prompt": "x"}}

    with pytest.raises(ConfigError, match="Expected a flat dataset row"):
        make_plan([row])


def test_selected_ids_limit_the_plan_and_are_sorted_in_it():
    plan = make_plan([task(i) for i in "abc"], selected_task_ids=["c", "a", "c"])

    assert plan.selected_task_ids == ["a", "c"]
    assert [entry.task_id.task_id for entry in plan.tasks] == ["a", "c"]


def test_selected_ids_that_no_row_has_are_refused():
    with pytest.raises(ConfigError, match=r"has no tasks with ids \['y', 'z'\]"):
        make_plan([task("a")], selected_task_ids=["z", "a", "y"])


def test_half_a_surrogate_pair_is_refused_by_name():
    with pytest.raises(ConfigError, match="task 'a' cannot be written as JSON"):
        make_plan([task("a", "\ud800")])


def test_a_plan_of_another_format_is_refused():
    document = json.loads(TINYMATH.read_text()) | {"schema": "nemo-gym.eval-plan.v2"}

    with pytest.raises(ConfigError, match=r"schema='nemo-gym\.eval-plan\.v2'"):
        EvalPlan.from_json(json.dumps(document))


def test_an_unknown_field_of_a_plan_is_refused():
    document = json.loads(TINYMATH.read_text()) | {"extra": 1}

    with pytest.raises(ConfigError, match="extra"):
        EvalPlan.from_json(json.dumps(document))


def planned():
    rows = [task("a"), task("b", "é")]
    return PlannedBenchmark(make_plan(rows), [rows[0], rows[0], rows[1], rows[1]])


def test_a_planned_benchmark_travels_as_json():
    assert PlannedBenchmark.from_json(planned().to_json()) == planned()


def test_rows_for_another_process_keep_the_order_of_keys_which_prompts_show():
    row = task("a", tools=[{"name": "add", "parameters": {"z": 1, "a": 2}}])
    text = PlannedBenchmark(make_plan([row]), [row]).to_json()
    assert json.dumps(PlannedBenchmark.from_json(text).rows) == json.dumps([row])
    assert planned().task_ids() == ["a", "b"]
    assert planned().task_digests()["a"] == task_digest(task("a"))
    assert planned().gym_commit is None


def test_a_planned_benchmark_whose_rows_were_changed_is_refused():
    document = json.loads(planned().to_json())
    document["rows"][2]["responses_create_params"]["input"] = "an easier question"

    with pytest.raises(ConfigError, match=r"differ in the tasks \['b'\]"):
        PlannedBenchmark.from_json(json.dumps(document))
