import json
import os
import random
import sys
from pathlib import Path

import pytest

import gymrl
from gymrl.errors import ConfigError

TINYMATH = Path(__file__).parents[2] / "data" / "plans" / "tinymath.json"


def test_a_benchmark_of_the_field_is_planned_as_nemo_gym_plans_it(tinymath):
    planned = gymrl.plan_benchmark("tinymath", roots=[tinymath.root])

    expected = json.loads(TINYMATH.read_text())
    document = json.loads(planned.plan.to_json())
    assert document["tasks"] == expected["tasks"]
    assert document["benchmark"] == expected["benchmark"]
    assert planned.task_ids() == ["tm-0", "tm-1", "tm-2"]


def test_rows_are_collated_with_prompt_route_and_repeats(tinymath, tmp_path):
    planned = gymrl.plan_benchmark(
        "tinymath", work_dir=tmp_path / "work", roots=[str(tinymath.root)]
    )

    assert [row["task_id"] for row in planned.rows] == [
        *["tm-0"] * 2,
        *["tm-1"] * 2,
        *["tm-2"] * 2,
    ]
    assert planned.rows[2] == {
        "task_id": "tm-1",
        "question": "1+3",
        "expected_answer": "4",
        "task_source": "tinymath_agent",
        "responses_create_params": {
            "max_output_tokens": 64,
            "input": [
                {"role": "system", "content": "You are a careful calculator."},
                {"role": "user", "content": "Solve: 1+3\nPut the answer in \\boxed{}."},
            ],
        },
    }
    lines = (tmp_path / "work" / "benchmark.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == planned.rows


def test_chosen_tasks_are_planned_and_collated_alone(tinymath):
    planned = gymrl.plan_benchmark("tinymath", task_ids=["tm-2", "tm-0"], roots=[tinymath.root])

    assert planned.plan.selected_task_ids == ["tm-0", "tm-2"]
    assert [row["task_id"] for row in planned.rows] == ["tm-0", "tm-0", "tm-2", "tm-2"]


def test_unknown_task_ids_are_refused(tinymath):
    with pytest.raises(ConfigError, match=r"'tinymath' has no tasks with ids \['tm-9'\]"):
        gymrl.plan_benchmark("tinymath", task_ids=["tm-9"], roots=[tinymath.root])


def test_one_text_is_no_list_of_task_ids(tinymath):
    with pytest.raises(ConfigError, match="a list of ids is needed"):
        gymrl.plan_benchmark("tinymath", task_ids="tm-0", roots=[tinymath.root])


def test_overrides_reach_the_prepare_script(tinymath):
    planned = gymrl.plan_benchmark("tinymath", overrides={"count": 5}, roots=[tinymath.root])

    assert len(planned.task_ids()) == 5


def test_the_script_sees_the_configuration_only_while_it_runs(tinymath, monkeypatch):
    seen = tinymath.folder / "seen.json"
    tinymath.rewrite(
        "prepare.py",
        "def prepare(count=3):",
        "import os, yaml\n"
        "from gymrl.benchmark.prepare import prepare_config\n"
        "def prepare(count=3):\n"
        "    told = yaml.safe_load(os.environ['NEMO_GYM_CONFIG_DICT'])\n"
        f"    Path({str(seen)!r}).write_text(json.dumps([told['judge'], prepare_config()['judge']]))",
    )
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", "mine")
    overrides = {"judge": {"model": "j"}}

    gymrl.plan_benchmark("tinymath", overrides=overrides, roots=[tinymath.root])

    assert json.loads(seen.read_text()) == [{"model": "j"}, {"model": "j"}]
    assert os.environ["NEMO_GYM_CONFIG_DICT"] == "mine"
    assert overrides == {"judge": {"model": "j"}}


def test_planning_changes_nothing_of_the_process(tinymath):
    (tinymath.folder / "helper_of_tinymath.py").write_text("COUNT = 3\n")
    tinymath.rewrite(
        "prepare.py",
        "import json",
        "import json, sys\nsys.path.append('/nowhere')\n"
        "from benchmarks.tinymath import helper_of_tinymath",
    )
    before = (list(sys.path), list(sys.argv), dict(os.environ), os.getcwd(), random.getstate())

    gymrl.plan_benchmark("tinymath", roots=[tinymath.root])

    after = (list(sys.path), list(sys.argv), dict(os.environ), os.getcwd(), random.getstate())
    assert after == before
    assert not [name for name in sys.modules if "helper_of_tinymath" in name]
    assert "gymrl_prepare_script" not in sys.modules


def test_the_command_line_is_not_read(tinymath, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", "++count=1", "--help", "config_paths=[x]"])

    assert len(gymrl.plan_benchmark("tinymath", roots=[tinymath.root]).task_ids()) == 3


def test_roots_are_found_through_the_environment_and_the_working_directory(tinymath, monkeypatch):
    with pytest.raises(ConfigError, match="no benchmark is called 'tinymath'"):
        gymrl.plan_benchmark("tinymath")
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", os.pathsep.join(["/nowhere", str(tinymath.root)]))
    assert gymrl.plan_benchmark("tinymath").task_ids() == ["tm-0", "tm-1", "tm-2"]
    monkeypatch.delenv("NEMO_GYM_EXTRA_ROOTS")
    monkeypatch.chdir(tinymath.root)
    assert gymrl.plan_benchmark("tinymath").task_ids() == ["tm-0", "tm-1", "tm-2"]


def test_an_installed_nemo_gym_is_found_and_not_imported(tinymath, monkeypatch):
    package = tinymath.root / "nemo_gym"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tinymath.root)

    planned = gymrl.plan_benchmark("tinymath")

    assert planned.task_ids() == ["tm-0", "tm-1", "tm-2"]
    assert planned.gym_commit is None
    assert planned.plan.gym.version == "unknown"


def test_a_script_that_writes_elsewhere_is_refused(tinymath):
    tinymath.rewrite("prepare.py", '"tinymath.jsonl"', '"other.jsonl"')

    with pytest.raises(ConfigError, match=r"wrote .*other\.jsonl, but jsonl_fpath is"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


def test_a_script_that_fails_is_named_with_its_error(tinymath):
    tinymath.rewrite("prepare.py", "    return file", "    raise KeyError('split')")

    with pytest.raises(ConfigError, match=r"prepare\.py failed: KeyError: 'split'") as caught:
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_script_that_exits_does_not_end_the_process(tinymath):
    tinymath.write("prepare.py", "import sys\nsys.exit(3)\n")

    with pytest.raises(ConfigError, match="failed: SystemExit: 3"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


def test_a_script_without_prepare_is_refused(tinymath):
    tinymath.write("prepare.py", "x = 1\n")

    with pytest.raises(ConfigError, match="has no function prepare"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


def test_a_script_that_returns_nothing_is_refused(tinymath):
    tinymath.rewrite("prepare.py", "    return file", "    return None")

    with pytest.raises(ConfigError, match="returned None; the path of the dataset is needed"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


def test_a_script_that_is_not_there_is_refused(tinymath):
    (tinymath.folder / "prepare.py").unlink()

    with pytest.raises(ConfigError, match="'tinymath' is missing a valid prepare script"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


def test_rows_with_an_input_and_a_prompt_are_refused(tinymath):
    tinymath.write_rows([{"task_id": "a", "responses_create_params": {"input": "x"}}])

    with pytest.raises(ConfigError, match=r"but prompt_config is also specified, e\.g\. row 0"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


def test_a_field_that_the_prompt_wants_and_a_row_lacks_is_named(tinymath):
    tinymath.write_rows([{"task_id": "a", "question": "1+1"}, {"task_id": "b"}])

    with pytest.raises(ConfigError, match="row 1 does not fit: KeyError: 'question'"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


def test_a_prompt_may_have_no_system_message(tinymath):
    tinymath.write("prompt.yaml", "user: 'Q: {question}'\n")

    planned = gymrl.plan_benchmark("tinymath", roots=[tinymath.root])

    assert planned.rows[0]["responses_create_params"]["input"] == [
        {"role": "user", "content": "Q: 0+4"}
    ]


def test_a_prompt_without_a_user_message_is_refused(tinymath):
    tinymath.write("prompt.yaml", "system: x\n")

    with pytest.raises(ConfigError, match="user must be a text"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


def test_rows_without_ids_are_refused(tinymath):
    tinymath.write_rows([{"question": "1+1"}, {"question": "2+2", "task_id": "b"}])

    with pytest.raises(ConfigError, match=r"1 of 2 tasks have no task id .* e\.g\. rows \[0\]"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


def test_a_configuration_without_a_benchmark_is_refused(tinymath):
    tinymath.rewrite("config.yaml", "type: benchmark", "type: train")

    with pytest.raises(ConfigError, match="exactly one benchmark, but the config declares 0"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


@pytest.mark.parametrize("datasets", [-1, "tinymath", True])
def test_datasets_that_are_no_list_are_refused_by_their_instance(tinymath, datasets):
    agent = {"responses_api_agents": {"simple_agent": {"datasets": datasets}}}
    with pytest.raises(ConfigError, match=r"'tinymath_agent': datasets=.* a list of blocks"):
        gymrl.plan_benchmark("tinymath", overrides={"tinymath_agent": agent}, roots=[tinymath.root])


def test_two_benchmarks_in_one_configuration_are_refused(tinymath):
    text = (tinymath.folder / "config.yaml").read_text()
    block = text[text.index("        - name") : text.index("count: 3")]
    tinymath.rewrite("config.yaml", "count: 3", block + "count: 3")

    with pytest.raises(ConfigError, match="exactly one benchmark, but the config declares 2"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


def test_repeats_that_are_no_positive_number_are_refused(tinymath):
    tinymath.rewrite("config.yaml", "num_repeats: 2", "num_repeats: 0")

    with pytest.raises(ConfigError, match="num_repeats=0"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("chain_sum", "chain_sum-s0-00000"),
        ("tool_arithmetic", "tool_arithmetic-s0-00000"),
        ("instruction_following", "instruction_following-s0-00000"),
        ("exact_maths", "exact_maths-s0-00000"),
        ("reasoning_gym/gcd", "reasoning_gym_gcd-s0-00000"),
    ],
)
def test_shipped_benchmarks_are_planned_by_name(name, first):
    planned = gymrl.plan_benchmark(name, overrides={"num_tasks": 2})

    assert planned.task_ids()[0] == first
    assert len(planned.rows) == 2
    assert planned.plan.benchmark.name == name
    assert planned == gymrl.PlannedBenchmark.from_json(planned.to_json())


def test_parameters_of_a_shipped_benchmark_are_overrides():
    planned = gymrl.plan_benchmark(
        "reasoning_gym/chain_sum",
        overrides={
            "num_tasks": 1,
            "seed": 7,
            "settings": {"min_terms": 5, "max_terms": 5},
            "sampling": {"max_output_tokens": 9},
        },
    )

    [row] = planned.rows
    assert row["task_id"] == "reasoning_gym_chain_sum-s7-00000"
    assert row["entry"]["metadata"]["num_terms"] == 5
    assert row["responses_create_params"]["max_output_tokens"] == 9


def test_a_parameter_that_a_dataset_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="has no parameter 'min_words'"):
        gymrl.plan_benchmark("reasoning_gym/gcd", overrides={"settings": {"min_words": 1}})


ROWS = [
    {"question": "1+1", "about": {"uid": 7}},
    {"question": "2+2", "about": {"uid": "eight"}},
    {"question": "3+3", "about": {"uid": 9}, "task_id": "mine"},
]


def test_ids_are_taken_from_a_field_where_rows_have_none_of_their_own(tinymath):
    tinymath.write_rows(ROWS)
    overrides = {"task_ids_from": "about.uid"}
    planned = gymrl.plan_benchmark("tinymath", roots=[tinymath.root], overrides=overrides)
    assert planned.task_ids() == ["7", "eight", "mine"]
    assert [row["task_id"] for row in planned.rows[::2]] == ["7", "eight", "mine"]


def test_a_row_without_the_field_that_ids_are_taken_from_is_named(tinymath):
    tinymath.write_rows([*ROWS, {"question": "4+4", "about": {}}])
    overrides = {"task_ids_from": "about.uid"}
    with pytest.raises(ConfigError, match=r"'about\.uid': row 3 has no text .* question, about"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root], overrides=overrides)


def test_ids_of_what_is_asked_do_not_depend_on_the_order_of_rows(tinymath):
    tinymath.write_rows([*ROWS, ROWS[0]])
    overrides = {"task_ids_from": "content"}
    planned = gymrl.plan_benchmark("tinymath", roots=[tinymath.root], overrides=overrides)
    ids = planned.task_ids()
    assert (len(ids), "mine" in ids) == (4, True)
    (twice,) = [name for name in ids if f"{name}-2" in ids]

    (tinymath.folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [ROWS[0], *reversed(ROWS)])
    )
    again = gymrl.plan_benchmark("tinymath", roots=[tinymath.root], overrides=overrides)
    assert again.plan == planned.plan
    alone = gymrl.plan_benchmark("tinymath", [twice], overrides, roots=[tinymath.root])
    assert "Solve: 1+1" in alone.rows[0]["responses_create_params"]["input"][1]["content"]


def test_a_prepare_script_gets_the_arguments_that_stand_at_the_top_of_the_configuration(tinymath):
    tinymath.rewrite("config.yaml", "count: 3", "prepare_script_args: {count: 2}\ncount: 3")
    assert len(gymrl.plan_benchmark("tinymath", roots=[tinymath.root]).task_ids()) == 2


def test_a_file_that_was_prepared_before_is_taken_as_it_is_where_that_is_asked_for(tinymath):
    gymrl.plan_benchmark("tinymath", roots=[tinymath.root])
    tinymath.rewrite("prepare.py", "    return file", "    raise OSError('no network')")
    with pytest.raises(ConfigError, match="no network"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])
    overrides = {"use_cached_prepared_benchmarks": True}
    planned = gymrl.plan_benchmark("tinymath", roots=[tinymath.root], overrides=overrides)
    assert planned.task_ids() == ["tm-0", "tm-1", "tm-2"]


def test_a_script_that_fails_is_named_with_the_packages_that_it_wants(tinymath):
    tinymath.rewrite("prepare.py", "import json\n", "import json\nimport some_package\n")
    tinymath.rewrite("config.yaml", "num_repeats: 2", "prepare_dependencies: [some-package]")
    with pytest.raises(ConfigError, match=r"'some_package'; .* its script needs: some-package"):
        gymrl.plan_benchmark("tinymath", roots=[tinymath.root])
