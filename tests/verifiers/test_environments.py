"""Environments of the verifiers package, played as they are."""

import itertools
import json

import anyio
import numpy as np
import psutil
import pytest

from gymrl import GenerationConfig, GymConfig, RolloutConfig, SamplingParams
from gymrl.benchmark import load_benchmark
from gymrl.cli.plan import RolloutOptions, make_plan
from gymrl.errors import ConfigError
from gymrl.rollout.engine import RolloutEngine
from gymrl.testing import build_tiny_model

# Loading verifiers takes seconds, in a process for each list of tasks and each environment.
pytestmark = pytest.mark.timeout(240)

SUMS, AGAIN, BROKEN, COUNT, ORDER = range(5)


@pytest.fixture(scope="module")
def benchmarks(v1_python, classic_python, environments):
    """One of each, with a task or two; they are told apart by their instances' names."""
    classic = {"python": classic_python}
    made = [
        load_benchmark(
            "verifiers/add_digits", num_tasks=2, params={**classic, "arguments": {"size": 3}}
        ),
        load_benchmark("verifiers/ask_again", params=classic),
        load_benchmark("verifiers/broken_scorer", num_tasks=1, params=classic),
        load_benchmark(
            "verifiers/count_up",
            num_tasks=2,
            params={"python": v1_python, "arguments": {"size": 9}},
        ),
        load_benchmark("verifiers/first_in_line", num_tasks=3, params={**classic, "group_size": 2}),
    ]
    assert {benchmark.token_source for benchmark in made} == {"ledger"}
    return made


def begun_since(before):
    """Processes that this one has started, with theirs."""
    begun = [process for process in psutil.Process().children() if process not in before]
    return [*begun, *(p for process in begun for p in process.children(recursive=True))]


@pytest.fixture(scope="module")
def played(benchmarks, tmp_path_factory, classic_python):
    """The groups of every benchmark, played side by side in one engine."""
    model = str(build_tiny_model(tmp_path_factory.mktemp("model")))
    config = RolloutConfig(
        generation=GenerationConfig(model=model, num_threads=1),
        gym=GymConfig(
            servers={name: block for made in benchmarks for name, block in made.servers.items()},
            token_source="ledger",
            tokenizer=model,
            spinup_timeout_s=200,
        ),
        sampling=SamplingParams(max_tokens=6),
        failure_policy="mask",
        in_process=True,
        seed=3,
    )
    # A browser of other tests, say, whose own processes come and go.
    before = psutil.Process().children()
    rows = [row for made in benchmarks for row in made.rows]

    async def play():
        async with RolloutEngine(config) as engine:
            running = [process.cmdline()[:1] for process in begun_since(before)]
            return running, await engine.run(rows, num_generations=2)

    running, groups = anyio.run(play)
    left = begun_since(before)
    places = np.cumsum([0, *(len(made.rows) for made in benchmarks)])
    return {
        "groups": [groups[a:b] for a, b in itertools.pairwise(places)],
        "peers": running.count([classic_python]),
        "left": left,
    }


def test_a_classic_environment_gives_its_tasks_and_its_rewards(benchmarks, played):
    rows = benchmarks[SUMS].rows
    assert [row["verifiers_task"]["answer"] for row in rows] == ["1", "2"]
    assert rows[0]["responses_create_params"]["input"] == [
        {"role": "system", "content": "Add the numbers."},
        {"role": "user", "content": "What is 0 + 1?"},
    ]
    trajectories = [t for group in played["groups"][SUMS] for t in group.trajectories]
    assert len(trajectories) == 4
    for trajectory in trajectories:
        result = json.loads(trajectory.result)
        right = result["verifiers_task"]["answer"] in trajectory.turns[0].generation_text
        assert trajectory.reward.total == 0.25 + right
        assert result["verifiers_metrics"]["said_something"] == 1.0
        assert trajectory.num_generated == 6


def test_turns_of_a_classic_environment_are_one_contiguous_trajectory(benchmarks, played):
    assert len(benchmarks[AGAIN].rows) == 1
    [group] = played["groups"][AGAIN]
    for trajectory in group.trajectories:
        assert trajectory.reward.total == 3.0
        assert len(trajectory.turns) == 3
        assert trajectory.turns[1].prompt_text.count("Are you sure?") == 1
        assert np.array_equal(trajectory.logprobs != 0, trajectory.token_mask())
        assert trajectory.notes == {}
        items = json.loads(trajectory.result)["response"]["output"]
        assert [item["role"] for item in items] == ["assistant", "user"] * 2 + ["assistant"]
    assert len(group.trajectories) == 2


def test_a_reward_function_that_raises_fails_the_row_instead_of_scoring_0(played):
    """verifiers itself logs it and counts 0."""
    [group] = played["groups"][BROKEN]
    assert group.trajectories == ()
    for failure in group.failures:
        assert failure.kind == "data"
        assert "scored 0 where scoring failed" in failure.message
        assert "the scorer is broken" in failure.message


def test_a_taskset_of_v1_gives_reward_components(benchmarks, played):
    assert [row["verifiers_task"] for row in benchmarks[COUNT].rows] == [
        {"idx": 0, "prompt": "Count to 0.", "answer": "0"},
        {"idx": 1, "prompt": "Count to 1.", "answer": "1"},
    ]
    trajectories = [t for group in played["groups"][COUNT] for t in group.trajectories]
    assert len(trajectories) == 4
    for trajectory in trajectories:
        assert set(trajectory.reward.components) == {"counts_far_enough", "answers"}
        assert trajectory.reward.components["answers"] == 0.5
        assert trajectory.reward.is_sum_of_components()
        assert trajectory.incomplete_reason == "max_output_tokens"
        assert trajectory.num_generated == 6


def test_a_rubric_that_compares_the_rollouts_of_a_group_scores_them_together(benchmarks, played):
    assert [made.group_size for made in benchmarks] == [1, 1, 1, 1, 2]
    for group in played["groups"][ORDER]:
        assert len(group.trajectories) == 2
        answers = [json.loads(trajectory.result) for trajectory in group.trajectories]
        texts = [answer["response"]["output"][0]["content"][0]["text"] for answer in answers]
        rewards = [trajectory.reward.total for trajectory in group.trajectories]
        assert rewards == [sorted(texts).index(text) + 0.25 for text in texts]
        for trajectory, text in zip(group.trajectories, texts, strict=True):
            assert trajectory.turns[0].generation_text.startswith(text)
    spread = {t.reward.total for group in played["groups"][ORDER] for t in group.trajectories}
    assert spread == {0.25, 1.25}


@pytest.mark.parametrize(
    ("group_size", "said"),
    [(1, "say how many with group_size"), (2, "--num-generations 3: .* a multiple of 2")],
)
def test_attempts_that_cannot_be_scored_together_are_refused(classic_python, group_size, said):
    options = RolloutOptions(
        target="verifiers/first_in_line",
        params=(f"python={classic_python}", f"group_size={group_size}"),
        num_generations=3,
        model="tiny",
    )
    with pytest.raises(ConfigError, match=said):
        make_plan(options)


def test_nothing_of_an_environment_is_left_when_the_engine_closes(played):
    assert played["peers"] == 4
    assert played["left"] == []


def test_a_harness_that_runs_code_must_be_told_where(v1_python):
    with pytest.raises(ConfigError, match=r"'bash' of 'agent' runs what the model writes"):
        load_benchmark(
            "verifiers/count_up",
            params={
                "python": v1_python,
                "arguments": {"agent": {"harness": {"id": "bash"}}},
            },
        )


def test_an_environment_for_an_older_verifiers_is_refused_with_the_remedy(
    v1_python, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_old.py").write_text("def load_environment():\n    return None\n")
    with pytest.raises(ConfigError, match=r"put 'verifiers<0\.4' into the interpreter"):
        load_benchmark("verifiers/of_old", params={"python": v1_python})
