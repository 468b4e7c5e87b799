"""A run's settings, its lines on disk, its checkpoints."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gymrl.errors import ConfigError
from gymrl.recipes import checkpoint
from gymrl.recipes.grpo import main
from gymrl.recipes.settings import (
    PRESETS,
    GrpoConfig,
    own_device,
    read_config,
    rollout_config,
)
from gymrl.recipes.tasks import validation_rows
from gymrl.recipes.tracking import Tracker, read_metrics, sparkline


def test_a_command_line_sets_fields_and_blocks():
    config, is_live = read_config(["--set", "steps=7", "--set", "sampling.max_tokens=9", "--live"])
    assert (config.steps, config.sampling.max_tokens, is_live) == (7, 9, True)


def test_a_file_is_read_and_the_command_line_wins(tmp_path):
    (tmp_path / "run.yaml").write_text("steps: 3\nseed: 5\nloss: {clip_high: 0.3}\n")
    config, _ = read_config([str(tmp_path / "run.yaml"), "--set", "seed=6"])
    assert (config.steps, config.seed, config.loss.clip_high) == (3, 6, 0.3)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_settings_that_come_with_the_recipe_can_be_read(name):
    config, _ = read_config(["--task", name])
    assert config.output == f"runs/{name.replace('_', '-')}"


def test_a_file_goes_over_a_task_and_the_command_line_over_both(tmp_path):
    (tmp_path / "run.yaml").write_text("steps: 3\nseed: 5\n")
    arguments = ["--task", "look_up", str(tmp_path / "run.yaml"), "--set", "seed=6"]
    config, _ = read_config(arguments)
    assert (config.benchmark, config.steps, config.seed) == ("look_up", 3, 6)


def test_an_unknown_field_is_named():
    with pytest.raises(ConfigError, match="stepz"):
        read_config(["--set", "stepz=7"])


def test_a_group_of_one_is_refused():
    with pytest.raises(ConfigError, match="2 or more"):
        GrpoConfig(num_generations=1)


def test_a_benchmark_wants_a_model():
    with pytest.raises(ConfigError, match="chain_sum"):
        GrpoConfig(benchmark="chain_sum")


def test_validation_tasks_of_a_generated_benchmark_are_not_trained_on():
    config = GrpoConfig(benchmark="tool_arithmetic", model="m", num_tasks=16)
    _, rows = rollout_config(config, "m")
    trained = {row["task_id"] for row in rows}
    held = {row["task_id"] for row in validation_rows(config)}
    assert len(held) == config.validation_prompts
    assert not trained & held


@pytest.mark.parametrize(("name", "count"), [("say_word", 8), ("look_up", 20)])
def test_the_recipes_own_tasks_have_the_rows_that_are_asked_for_if_there_are_as_many(name, count):
    config = GrpoConfig(benchmark=name, num_tasks=20, validation_prompts=11)
    _, rows = rollout_config(config, "m")
    assert len({row["task_id"] for row in rows}) == len(rows) == count
    assert len(validation_rows(config)) == 11


def test_settings_of_a_benchmark_reach_it():
    config = GrpoConfig(
        benchmark="tool_arithmetic", model="m", num_tasks=2, benchmark_params={"num_items": 1}
    )
    _, rows = rollout_config(config, "m")
    assert all("plus" not in r["responses_create_params"]["input"][0]["content"] for r in rows)


def test_each_step_is_a_line_on_disk_at_once(tmp_path):
    with Tracker(tmp_path, steps=2, tensorboard=False) as tracker:
        tracker.add(1, {"reward_mean": 0.5})
        assert read_metrics(tmp_path) == [{"step": 1, "reward_mean": 0.5}]


def test_a_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path):
    lines = [{"step": 1, "reward_mean": 0.1}, {"step": 2, "reward_mean": 0.2}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "rew')
    with Tracker(tmp_path, steps=3, resumed_at=1, tensorboard=False) as tracker:
        tracker.add(2, {"reward_mean": 0.3})
    assert read_metrics(tmp_path) == [lines[0], {"step": 2, "reward_mean": 0.3}]


def test_rewards_are_drawn(tmp_path):
    with Tracker(tmp_path, steps=2, tensorboard=False) as tracker:
        tracker.add(1, {"reward_mean": 0.1})
        tracker.add(2, {"reward_mean": 0.9, "validation/reward_mean": 1.0})
        assert tracker.plot().read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_every_number(tmp_path):
    with Tracker(tmp_path, steps=2) as tracker:
        tracker.add(1, {"reward_mean": 0.5, "share/train": 0.25})
        tracker.add(2, {"reward_mean": 0.75, "share/train": 0.25})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward_mean", "share/train"]
    assert [(e.step, e.value) for e in events.Scalars("reward_mean")] == [(1, 0.5), (2, 0.75)]


def test_a_sparkline_shows_the_last_values():
    assert sparkline([0.0, 0.5, 1.0, 1.0], width=3) == "▅██"


def trained_pair():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_a_checkpoint_brings_back_the_model_the_optimizer_and_the_data(tmp_path):
    model, optimizer = trained_pair()
    checkpoint.save(tmp_path, 2, model, optimizer, {"rollouts": {"position": 5, "pending": [1]}})
    fresh = torch.nn.Linear(3, 2)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    step, extra = checkpoint.load(checkpoint.latest(tmp_path), fresh, other)
    assert (step, extra) == (2, {"rollouts": {"position": 5, "pending": [1]}})
    for pair in ((model, optimizer), (fresh, other)):
        pair[0](torch.ones(1, 3)).sum().backward()
        pair[1].step()
    assert torch.equal(model.weight, fresh.weight)


def test_the_two_newest_checkpoints_are_kept_and_a_half_written_one_is_ignored(tmp_path):
    model, optimizer = trained_pair()
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, model, optimizer, {})
    (tmp_path / "step_00000009.part").write_bytes(b"half")
    assert [path.name for path in sorted(tmp_path.glob("step_*.pt"))] == [
        "step_00000002.pt",
        "step_00000003.pt",
    ]
    assert checkpoint.latest(tmp_path).name == "step_00000003.pt"


def test_a_directory_without_checkpoints_has_none(tmp_path):
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--set", "steps=-3"], "steps=-3"),
        (["--set", "seed=1", "--set", "seed.a=1"], "seed is no block of settings"),
        (["--set", "seed=[1"], "the value does not parse"),
    ],
)
def test_a_wrong_setting_of_the_recipe_is_a_message_and_exit_code_2(capsys, arguments, said):
    with pytest.raises(SystemExit) as exit_request:
        main(arguments)

    assert exit_request.value.code == 2
    assert said in capsys.readouterr().err


def test_a_learning_rate_is_written_as_everywhere():
    config, _ = read_config(["--set", "learning_rate=1e-5"])

    assert config.learning_rate == 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_a_rank_trains_on_its_gpu_where_there_is_one_and_on_the_cpu_else():
    assert own_device("auto") == own_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="GPU 0, and torch sees 0; start as many ranks"):
        own_device("cuda")
