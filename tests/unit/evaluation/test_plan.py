import json

import msgspec
import pytest

from gymrl.errors import ConfigError
from gymrl.evaluation import (
    EvaluationPlan,
    EvaluationSettings,
    PolicySettings,
    RunOptions,
    SamplingSettings,
    plan_differences,
)
from gymrl.evaluation.engine import completed_plan, engine_config
from gymrl.evaluation.fingerprint import fingerprint_of
from gymrl.evaluation.settings import check_policy
from gymrl.evaluation.tasks import attempt_row, attempt_seed


def settings(**changes):
    return EvaluationSettings.from_dict(changes)


def test_a_plan_survives_its_file(make_plan):
    plan = make_plan(settings=settings(policy={"model": "smollm2"}, seed=4))
    again = EvaluationPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert json.loads(plan.to_json())["schema"] == "gymrl.evaluation-plan.v1"


def test_a_plans_file_keeps_the_order_of_keys_which_prompts_show(make_plan):
    tool = {"type": "function", "name": "add", "parameters": {"z": 1, "a": 2}}
    params = {"input": "x", "tools": [tool]}
    row = {"task_id": "t1", "task_source": "math", "responses_create_params": params}
    again = EvaluationPlan.from_json(make_plan(tasks=(row,)).to_json())
    assert json.dumps(again.benchmarks[0].rows) == json.dumps([row])


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 1},
        {"sampling": {"temperature": 0.5}},
        {"sampling": {"max_output_tokens": 8}},
        {"policy": {"model": "smollm2"}},
        {"policy": {"dtype": "bfloat16"}},
        {"policy": {"name": "other"}},
        {"policy": {"engine_args": {"quantization": "fp8"}}},
    ],
)
def test_every_setting_that_decides_a_result_is_in_the_digest(make_plan, changed):
    before, after = make_plan(), make_plan(settings=settings(**changed))
    assert after.config_digest != before.config_digest
    assert len(plan_differences(before, after)) == 1


def test_a_servers_setting_is_in_the_digest_and_its_place_is_not(make_benchmark, make_plan):
    def with_block(**block):
        servers = {"math": {"resources_servers": {"ours": {"entrypoint": "a.b:C", **block}}}}
        return make_plan(make_benchmark(servers=servers))

    base = with_block(level=1)
    assert with_block(level=2).config_digest != base.config_digest
    assert with_block(level=1, host="0.0.0.0", port=8000).config_digest == base.config_digest
    assert plan_differences(base, with_block(level=2)) == [
        "servers.math.math.resources_servers.ours.level: 1 -> 2"
    ]


def test_repeats_and_tasks_are_no_part_of_the_configuration(make_plan):
    # A finished row is known by configuration, task and repeat.
    assert make_plan(repeats=5, tasks=("t1",)).config_digest == make_plan().config_digest


def test_a_model_directory_may_move_but_not_change(make_plan, tmp_path):
    def plan(model, weights):
        return make_plan(settings=settings(policy={"model": model, "weights": weights}))

    assert plan("/a", "sha256:1").config_digest == plan("/b", "sha256:1").config_digest
    assert plan("/a", "sha256:1").config_digest != plan("/a", "sha256:2").config_digest
    assert plan_differences(plan("/a", "sha256:1"), plan("/b", "sha256:1")) == []


def test_a_fingerprint_sees_the_ends_of_large_files_and_not_their_place(tmp_path):
    def write(folder, weights, config="{}"):
        folder.mkdir()
        (folder / "config.json").write_text(config)
        (folder / "model.safetensors").write_bytes(weights)
        return fingerprint_of(folder)

    large = bytes(3 << 20)
    first = write(tmp_path / "a", large)
    assert write(tmp_path / "b", large) == first
    assert write(tmp_path / "c", large[:-1] + b"x") != first
    assert write(tmp_path / "d", b"x" + large[1:]) != first
    assert write(tmp_path / "e", large + b"\0") != first
    assert write(tmp_path / "f", large, config="{ }") != first


def test_weights_that_changed_since_the_plan_are_refused(make_plan, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    planned = settings(policy={"model": str(tmp_path), "weights": fingerprint_of(tmp_path)})
    plan = make_plan(settings=planned)
    assert completed_plan(plan, RunOptions()) == plan
    (tmp_path / "config.json").write_text("{ }")
    with pytest.raises(ConfigError, match="not the one that was planned with"):
        completed_plan(plan, RunOptions())


def test_a_plan_made_without_weights_gets_them_when_it_is_run(make_plan, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    plan = make_plan(settings=settings(policy={"model": str(tmp_path)}))
    completed = completed_plan(plan, RunOptions())
    assert completed.settings.policy.weights == fingerprint_of(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: plan["settings"].update(seed=9), "config_digest"),
        (lambda plan: plan["benchmarks"][0]["rows"][1].update(answer=3), "differ in the tasks"),
        (lambda plan: plan["benchmarks"][0]["rows"].pop(), "differ in the tasks"),
        (lambda plan: plan["benchmarks"][0]["rows"].append(plan["benchmarks"][0]["rows"][0]),
         "differ in the tasks"),
        (lambda plan: plan.update(schema="gymrl.evaluation-plan.v9"), "this gymrl reads"),
        (lambda plan: plan["settings"].update(colour="red"), "colour"),
        (lambda plan: plan.pop("benchmarks"), "benchmarks"),
    ],
)  # fmt: skip
def test_a_plan_that_was_changed_by_hand_is_refused(make_plan, change, text):
    plain = json.loads(make_plan().to_json())
    change(plain)
    with pytest.raises(ConfigError, match=text):
        EvaluationPlan.from_json(json.dumps(plain), "plan.json")


def test_fields_of_a_newer_version_are_passed_over(make_plan):
    plain = json.loads(make_plan().to_json())
    plain["made_by"] = "somebody"
    plain["benchmarks"][0]["colour"] = "red"
    assert EvaluationPlan.from_json(json.dumps(plain)) == make_plan()


def test_two_benchmarks_need_labels_of_their_own(make_benchmark, make_plan):
    with pytest.raises(ConfigError, match="'math' is named twice"):
        make_plan(make_benchmark(), make_benchmark())
    with pytest.raises(ConfigError, match="at least one benchmark"):
        EvaluationPlan.of(EvaluationSettings(), ())


def test_benchmarks_that_come_and_go_are_told(make_benchmark, make_plan):
    before = make_plan(make_benchmark("a"), make_benchmark("b"))
    after = make_plan(make_benchmark("b"), make_benchmark("c"))
    assert plan_differences(before, after) == [
        "benchmark 'a': is no longer in the plan",
        "benchmark 'c': is new in the plan",
    ]


def test_rows_are_numbered_through_benchmarks_of_different_repeats(make_benchmark, make_plan):
    plan = make_plan(make_benchmark("a", ("t1", "t2"), 3), make_benchmark("b", ("t1", "t2"), 1))
    assert [task.first_row for task in plan.tasks()] == [0, 3, 6, 7]
    assert [task.number for task in plan.tasks()] == [0, 1, 2, 3]
    assert plan.num_rows == 8


def test_an_attempts_seed_depends_on_its_task_and_repeat_alone(make_benchmark, make_plan):
    def seeds(plan, task_id):
        found = {}
        for task in plan.tasks():
            if task.task_id == task_id:
                for repeat in range(task.repeats):
                    row, _ = attempt_row(task, repeat, plan.settings)
                    extra = row["responses_create_params"]["metadata"]["extra_body"]
                    found[repeat] = json.loads(extra)["seed"]
        return found

    alone = seeds(make_plan(make_benchmark("math", ("t2",))), "t2")
    among = seeds(make_plan(make_benchmark("other"), make_benchmark("math", repeats=4)), "t2")
    # The same id in another benchmark comes first; the task's input decides.
    other = seeds(make_plan(make_benchmark("other")), "t2")
    assert alone.items() <= among.items()
    assert len({*among.values()}) == 4
    assert other == alone
    assert attempt_seed(0, "sha256:a", 0) != attempt_seed(1, "sha256:a", 0)


def test_a_row_is_asked_as_its_task_says_unless_the_settings_say_otherwise(make_plan):
    params = {"input": "x", "temperature": 0.3, "top_p": 0.8, "max_output_tokens": 5}
    row = {"task_id": "t1", "task_source": "math", "responses_create_params": params}
    before = json.dumps(row)
    (task,) = make_plan(tasks=(row,)).tasks()

    asked, sampling = attempt_row(task, 1, EvaluationSettings())
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.3, 0.8, None)
    assert asked["responses_create_params"]["max_output_tokens"] == 5
    assert (asked["_ng_task_index"], asked["_ng_rollout_index"]) == (0, 1)

    otherwise = settings(sampling={"temperature": 0.0, "max_output_tokens": 50})
    asked, sampling = attempt_row(task, 1, otherwise)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.0, 0.8, 50)
    assert "max_output_tokens" not in asked["responses_create_params"]
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"max_tries": 0}, "max_tries"),
        ({"row_timeout_s": float("inf")}, "row_timeout_s"),
        ({"workers": -1}, "workers"),
    ],
)
def test_run_options_out_of_range_are_refused(changes, setting):
    with pytest.raises(ConfigError) as caught:
        RunOptions(**changes)
    assert caught.value.setting == setting


@pytest.mark.parametrize("changes", [{"temperature": -1.0}, {"top_p": 0.0}, {"temperature": "hot"}])
def test_sampling_out_of_range_is_refused(changes):
    with pytest.raises(ConfigError):
        SamplingSettings.from_dict(changes)


def test_a_run_needs_one_policy():
    with pytest.raises(ConfigError, match="no model"):
        check_policy(PolicySettings(), RunOptions())
    with pytest.raises(ConfigError, match="give one of them"):
        check_policy(PolicySettings(model="m"), RunOptions(base_urls=("http://a/v1",)))
    with pytest.raises(ConfigError, match="know their policy"):
        check_policy(PolicySettings(model="m"), RunOptions(registry_url="http://a"))
    check_policy(PolicySettings(), RunOptions(registry_url="http://a"))


def test_a_batch_size_that_vllm_would_not_keep_to_is_refused():
    with pytest.raises(ConfigError, match=r"batch_size=8 .* engine_args=\{'max_num_seqs': 8\}"):
        check_policy(PolicySettings(model="m", backend="vllm"), RunOptions(batch_size=8))
    check_policy(PolicySettings(model="m", backend="vllm"), RunOptions())
    check_policy(PolicySettings(model="m"), RunOptions(batch_size=8))
    with pytest.raises(ConfigError, match="batch_size"):
        RunOptions(batch_size=0)


def test_servers_need_a_name_to_ask_for(make_plan):
    with pytest.raises(ConfigError, match="set the policy's name"):
        completed_plan(make_plan(), RunOptions(base_urls=("http://a/v1",)))


def test_options_and_settings_reach_the_engine(make_plan, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    policy = {"model": str(tmp_path), "dtype": "bfloat16", "max_model_len": 64, "name": "mine"}
    options = RunOptions(workers=2, batch_size=3, row_timeout_s=9.0, num_threads=1)
    config = engine_config(make_plan(settings=settings(policy=policy)), options, {"a": {}})
    generation = config.generation
    assert (generation.dtype, generation.max_batch_size, generation.max_model_len) == (
        "bfloat16", 3, 64,
    )  # fmt: skip
    assert (generation.served_model_name, generation.num_threads) == ("mine", 1)
    assert (config.num_workers, config.failure_policy, config.seed) == (2, "mask", None)
    assert (config.gym.servers, config.gym.row_timeout_s) == ({"a": {}}, 9.0)
    assert (config.gym.on_broken_prefix, config.gym.model_name) == ("truncate", "mine")


def test_a_registry_stands_for_the_servers(make_plan):
    options = RunOptions(registry_url="http://a:1")
    config = engine_config(make_plan(), options, {"a": {}})
    assert (config.gym.servers, config.gym.registry_url) == ({}, "http://a:1")
    assert config.generation is None


def test_settings_are_plain_data_and_back():
    made = settings(policy={"model": "m"}, sampling={"top_p": 0.5}, seed=2)
    assert EvaluationSettings.from_dict(msgspec.to_builtins(made)) == made
