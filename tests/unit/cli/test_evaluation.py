import json

import pytest

from gymrl.cli import main
from gymrl.cli.evaluation import PlanOptions, parse_overrides, planned_for_run
from gymrl.cli.plan import parse_params
from gymrl.errors import ConfigError
from gymrl.evaluation import EvaluationPlan

SMALL = (
    "chain_sum", "easy=chain_sum", "--repeats", "3",
    "--overrides", "num_tasks=2", "--overrides", "easy:num_tasks=1",
)  # fmt: skip


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_request:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return exit_request.value.code, captured.out, captured.err


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A small plan's file, made by the command."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    with pytest.raises(SystemExit) as exit_request:
        main(["eval", "plan", *SMALL, "--output", str(path)])
    assert exit_request.value.code == 0
    return path


def test_overrides_nest_and_may_be_for_one_benchmark():
    everywhere, single = parse_overrides(
        ("num_tasks=4", "judge.model=x", "judge.top.k=[1, 2]", "b/c:seed=3"), ("a", "b/c")
    )
    assert everywhere == {"num_tasks": 4, "judge": {"model": "x", "top": {"k": [1, 2]}}}
    assert single == {"a": {}, "b/c": {"seed": 3}}


def test_a_value_may_hold_what_divides():
    everywhere, _ = parse_overrides(("url=http://a:1/?b=c",), ())
    assert everywhere == {"url": "http://a:1/?b=c"}


def test_a_value_is_read_as_everywhere_else():
    everywhere, _ = parse_overrides(("rate=1e-3", "level=0x10", "name=no"), ())
    assert everywhere == parse_params(("rate=1e-3", "level=0x10", "name=no"))
    assert everywhere["rate"] == 0.001


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("num_tasks",), "key=value"),
        (("=3",), "key=value"),
        (("a:=3",), "key=value"),
        (("z:x=3",), "'z' is none of the benchmarks"),
        (("x=1", "x=2"), "x has a value already"),
        (("x=1", "x.y=2"), "x has a value already"),
        (("x..y=1",), "empty"),
        (("x={",), "does not parse"),
    ],
)
def test_overrides_that_cannot_be_meant_are_refused(overrides, text):
    with pytest.raises(ConfigError, match=text):
        parse_overrides(overrides, ("a",))


def test_a_plan_has_the_tasks_repeats_and_labels_that_were_asked_for(planned):
    plan = EvaluationPlan.from_json(planned.read_text())
    found = [(b.label, b.name, b.repeats, len(b.rows)) for b in plan.benchmarks]
    assert found == [("chain_sum", "chain_sum", 3, 2), ("easy", "chain_sum", 3, 1)]
    assert plan.num_rows == 9


def test_the_same_command_makes_the_same_plan(planned, capsys):
    code, out, _ = run(capsys, "eval", "plan", *SMALL)
    assert code == 0
    assert out == planned.read_text()


def test_a_run_completes_what_a_plan_left_open(planned, tmp_path):
    options = PlanOptions(benchmarks=(str(planned),), model="smollm2", temperature=0.5)
    plan = planned_for_run(options, tmp_path)
    assert plan.settings.policy.model == "smollm2"
    assert plan.settings.sampling.temperature == 0.5


def test_a_run_cannot_say_otherwise_than_its_plan(planned, tmp_path):
    whole = planned_for_run(PlanOptions(benchmarks=(str(planned),), model="smollm2"), tmp_path)
    path = tmp_path / "whole.json"
    path.write_text(whole.to_json())
    with pytest.raises(ConfigError, match=r"policy\.model is 'smollm2' in .* 'other'"):
        planned_for_run(PlanOptions(benchmarks=(str(path),), model="other"), tmp_path)
    with pytest.raises(ConfigError, match="seed is 0"):
        planned_for_run(PlanOptions(benchmarks=(str(path),), seed=3), tmp_path)
    with pytest.raises(ConfigError, match="--repeats makes a plan"):
        planned_for_run(PlanOptions(benchmarks=(str(path),), repeats=5), tmp_path)


@pytest.mark.parametrize("command", [(), ("plan",), ("run",), ("report",)])
def test_every_command_explains_itself(capsys, command):
    code, out, _ = run(capsys, "eval", *command, "--help")
    assert code == 0
    assert "Usage" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("plan", "chainsum"), "Did you mean 'chain_sum'"),
        (("plan", "chain_sum", "chain_sum"), "named twice"),
        (("plan", "chain_sum", "--overrides", "num_tasks=0"), "num_tasks"),
        (("plan", "chain_sum", "--task-id", "nobody"), "nobody"),
        (("plan", "chain_sum", "--temperature", "-1"), "temperature"),
        (("run", "nowhere.json", "--output", "OUT"), "nowhere.json"),
        (("run", "--output", "OUT"), "no evaluation to continue"),
        (("run", "--output", "OUT", "--overwrite"), "name a plan or benchmarks"),
        (("run", "x", "--output", "OUT", "--api-key-env", "NO_SUCH_KEY"), "is not set"),
        (("report", "OUT"), "holds no evaluation"),
        (("report", "OUT", "OUT", "OUT"), "one directory, or two"),
        (("report", "OUT", "--confidence", "1.5"), "between 0 and 1"),
    ],
)
def test_a_wrong_command_line_is_a_message_and_exit_code_2(capsys, tmp_path, arguments, text):
    given = [str(tmp_path / "out") if argument == "OUT" else argument for argument in arguments]
    code, out, err = run(capsys, "eval", *given)
    assert code == 2
    assert text in err
    assert "Traceback" not in out + err


def test_a_run_without_a_policy_is_refused_before_anything_is_written(capsys, planned, tmp_path):
    code, _, err = run(capsys, "eval", "run", planned, "--output", tmp_path / "out")
    assert code == 2
    assert "no model" in err
    assert not (tmp_path / "out").exists()


def test_reports_come_as_table_json_markdown_and_pictures(capsys, planned, tmp_path):
    # A plan without a single row run is a report of what is missing.
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_bytes(planned.read_bytes())
    code, out, _ = run(capsys, "eval", "report", tmp_path / "a")
    assert code == 0
    assert "0 rows failed and 9 are missing" in out
    _, out, _ = run(capsys, "eval", "report", tmp_path / "a", "--format", "json")
    assert json.loads(out)["benchmarks"]["easy"]["total"]["missing"] == 3
    page = tmp_path / "page.md"
    run(capsys, "eval", "report", tmp_path / "a", "--format", "markdown", "--output", page)
    assert "**Not complete**" in page.read_text()
    code, out, _ = run(
        capsys, "eval", "report", tmp_path / "a", tmp_path / "b", "--plots", tmp_path / "plots"
    )
    assert code == 0
    assert "easy: 1 tasks without a reward in A or B" in out
    code, _, err = run(capsys, "eval", "report", tmp_path / "a", "--output", page)
    assert (code, "add --format" in err) == (2, True)
