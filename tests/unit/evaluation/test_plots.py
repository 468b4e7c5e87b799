import pytest

from gymrl.evaluation import compare, read_evaluation, report_evaluation
from gymrl.evaluation.journal import Journal
from gymrl.evaluation.plots import plot_comparison, plot_evaluation

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def evaluated(tmp_path, make_plan, make_record):
    def make(name, rewards, label="math", plan=None):
        plan = plan or make_plan(label=label, repeats=4)
        with Journal(tmp_path / name, plan) as journal:
            for task, reward in zip(plan.tasks(), rewards, strict=True):
                for repeat in range(task.repeats):
                    journal.add(make_record(task, repeat, reward))
        return read_evaluation(tmp_path / name)

    return make


def test_rewards_and_pass_at_k_are_drawn_without_a_display_each_benchmark_in_files_of_its_own(
    evaluated, make_benchmark, make_plan, tmp_path, monkeypatch
):
    monkeypatch.delenv("DISPLAY", raising=False)
    plan = make_plan(
        *(make_benchmark(label, ("t1",), 1) for label in ("maths/$hard", "maths hard"))
    )
    written = plot_evaluation(evaluated("a", [1.0, 0.0], plan=plan), tmp_path / "plots")
    assert [path.name for path in written] == [
        "maths_hard-rewards.png",
        "maths_hard-pass-at-k.png",
        "maths_hard-2-rewards.png",
        "maths_hard-2-pass-at-k.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in written)


def test_differences_are_drawn(evaluated, tmp_path):
    comparison = compare(evaluated("a", [0.0, 1.0, 0.5]), evaluated("b", [1.0, 0.0, 0.5]))
    (path,) = plot_comparison(comparison, tmp_path / "plots")
    assert path.name == "math-differences.png"
    assert path.read_bytes().startswith(PNG)


def test_a_benchmark_without_any_reward_has_no_pictures(evaluated, tmp_path):
    failed = evaluated("a", [None, None, None])
    assert plot_evaluation(failed, tmp_path / "plots") == []
    assert plot_comparison(compare(failed, failed), tmp_path / "plots") == []


def test_the_curve_is_of_what_the_report_says_passes(evaluated, tmp_path):
    evaluation = evaluated("a", [0.5, 0.5, 0.0])
    lenient = report_evaluation(evaluation, pass_reward=0.5)
    pictures = [
        plot_evaluation(evaluation, tmp_path / name, report)[1].read_bytes()
        for name, report in (("strict", None), ("lenient", lenient))
    ]
    assert pictures[0] != pictures[1]
