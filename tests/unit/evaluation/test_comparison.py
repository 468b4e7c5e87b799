import json
import math

import pytest

from gymrl.errors import ConfigError
from gymrl.evaluation import EvaluationSettings, compare, read_evaluation
from gymrl.evaluation.journal import Journal
from gymrl.evaluation.markdown import comparison_markdown


@pytest.fixture
def evaluated(tmp_path, make_plan, make_record):
    """An evaluation whose tasks got these rewards; None is a failure, ... no line."""

    def make(name, rewards, benchmarks=None, **fields):
        plan = (
            make_plan(*benchmarks, **fields)
            if benchmarks
            else make_plan(tasks=tuple(rewards), repeats=4, **fields)
        )
        with Journal(tmp_path / name, plan) as journal:
            for task in plan.tasks():
                for repeat, reward in enumerate(rewards[task.task_id]):
                    if reward is not ...:
                        journal.add(make_record(task, repeat, reward))
        return read_evaluation(tmp_path / name)

    return make


BEFORE = {"t1": [0.0], "t2": [0.0, 1.0], "t3": [1.0], "t4": [0.5]}
AFTER = {"t1": [1.0], "t2": [1.0, 1.0], "t3": [0.0], "t4": [0.5]}


def test_differences_are_paired_by_task(evaluated):
    found = compare(evaluated("a", BEFORE), evaluated("b", AFTER)).benchmarks["math"]
    # Differences 1, 1/2, -1, 0: mean 1/8, squares about it sum to 2.25 - 4/64 = 2.1875.
    error = math.sqrt(2.1875 / 3 / 4)
    total = found.total
    assert total.difference.mean == 0.125
    assert total.difference.standard_error == pytest.approx(error)
    assert total.difference.low == pytest.approx(0.125 - 3.18245 * error, abs=1e-4)
    assert (total.before, total.after) == (0.5, 0.625)
    assert (total.better, total.worse, total.same) == (2, 1, 1)
    assert total.p_value == 1.0  # 2 * (1 + 3) / 8
    assert [task.task_id for task in found.better] == ["t1", "t2"]
    assert [task.task_id for task in found.worse] == ["t3"]


def test_a_comparison_with_itself_is_nothing_but_ties(evaluated):
    found = compare(evaluated("a", BEFORE), evaluated("b", BEFORE)).benchmarks["math"].total
    assert (found.difference.mean, found.same, found.p_value) == (0.0, 4, 1.0)
    assert (found.difference.low, found.difference.high) == (None, None)


def test_a_task_without_a_reward_is_listed_and_not_compared(evaluated):
    before = evaluated("a", {"t1": [1.0], "t2": [None], "t3": [0.0]})
    after = evaluated("b", {"t1": [0.0], "t2": [1.0], "t3": [...]})
    found = compare(before, after).benchmarks["math"]
    assert found.unscored == ("t2", "t3")
    assert [task.task_id for task in found.tasks] == ["t1"]


def test_different_tasks_are_refused_by_name_unless_asked_for(evaluated):
    before = evaluated("a", {"t1": [1.0], "t2": [1.0]})
    after = evaluated("b", {"t2": [0.0], "t3": [0.0]})
    with pytest.raises(ConfigError) as caught:
        compare(before, after)
    assert "math: 1 tasks only in" in caught.value.message
    assert "t1" in caught.value.message
    assert "t3" in caught.value.message
    found = compare(before, after, common_only=True).benchmarks["math"]
    assert (found.only_before, found.only_after) == (("t1",), ("t3",))
    assert found.total.difference.mean == -1.0


def test_a_task_with_another_input_is_another_task(evaluated, make_benchmark):
    def benchmarks(text):
        row = {"task_id": "t1", "task_source": "s", "responses_create_params": {"input": text}}
        return [make_benchmark("math", (row,))]

    before = evaluated("a", {"t1": [1.0]}, benchmarks("old"))
    after = evaluated("b", {"t1": [1.0]}, benchmarks("new"))
    with pytest.raises(ConfigError, match="with another input: t1"):
        compare(before, after)
    assert compare(before, after, common_only=True).benchmarks["math"].changed == ("t1",)


def test_benchmarks_of_one_run_alone_are_told(evaluated, make_benchmark):
    both = [make_benchmark("math", ("t1",)), make_benchmark("more", ("t2",))]
    before = evaluated("a", {"t1": [1.0], "t2": [1.0]}, both)
    after = evaluated("b", {"t1": [1.0]}, both[:1])
    with pytest.raises(ConfigError, match="'more' is in one of them"):
        compare(before, after)
    found = compare(before, after, common_only=True)
    assert (found.only_before, found.only_after, list(found.benchmarks)) == (
        ("more",),
        (),
        ["math"],
    )
    elsewhere = evaluated("c", {"t1": [1.0]}, [make_benchmark("other", ("t1",))])
    with pytest.raises(ConfigError, match="no benchmark in common"):
        compare(after, elsewhere, common_only=True)


def test_what_was_asked_otherwise_is_said(evaluated):
    cooler = EvaluationSettings.from_dict({"sampling": {"temperature": 0.2}})
    found = compare(evaluated("a", BEFORE), evaluated("b", AFTER, settings=cooler))
    assert found.settings == ("sampling.temperature: null -> 0.2",)
    page = comparison_markdown(found)
    assert "- sampling.temperature: null -> 0.2" in page
    assert "| math | 4 | 0.500 | 0.625 | +0.125 [" in page
    assert "| t1 | 0.000 | 1.000 | +1.000 |" in page
    assert "| t3 | 1.000 | 0.000 | -1.000 |" in page
    assert json.loads(found.to_json())["schema"] == "gymrl.comparison.v1"
