"""The environments that check an answer: reasoning-gym's datasets, and mathematics."""

import pytest

from gymrl.environments import settled
from gymrl.environments.builtin import maths, python_code, reasoning_gym
from gymrl.environments.builtin.maths import MathsEnvironment
from gymrl.environments.builtin.reasoning_gym import ReasoningGymEnvironment
from gymrl.errors import ConfigError


def said(text):
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]


def scored(environment, metadata, *texts):
    answer = environment.step([said(text) for text in texts], [metadata] * len(texts))
    return settled(answer, len(texts), "world")


def test_the_datasets_own_scorer_gives_the_reward():
    [task] = reasoning_gym.make_tasks("chain_sum", 1, 7)
    right = task.metadata["entry"]["answer"]

    answer = scored(
        ReasoningGymEnvironment(),
        task.metadata,
        f"It is <answer>{right}</answer>",
        "<answer>wrong</answer>",
        "no tag",
    )

    assert answer.rewards == [1.0, 0.0, 0.0]
    assert answer.terminateds == [True] * 3
    assert answer.answers == [right, "wrong", None]


def test_equal_seeds_make_equal_tasks():
    assert reasoning_gym.make_tasks("chain_sum", 3, 7) == reasoning_gym.make_tasks(
        "chain_sum", 3, 7
    )


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"dataset": "no_such", "entry": {"answer": "1"}},
        {"dataset": "chain_sum", "entry": {"answer": None}},
        {"dataset": "chain_sum", "entry": None},
        {"dataset": ["chain_sum"], "entry": {"answer": "1"}},
    ],
)
def test_what_cannot_be_scored_gets_no_reward_at_all(metadata):
    answer = scored(ReasoningGymEnvironment("whole"), metadata, "1")

    assert answer.rewards == [None]


def test_a_scorer_that_raises_means_a_wrong_answer_and_says_so():
    metadata = {"dataset": "futoshiki", "entry": {"answer": "1+2", "metadata": {}}}

    answer = scored(ReasoningGymEnvironment("whole"), metadata, "1+2")

    assert answer.rewards == [0.0]
    assert "KeyError" in answer.metadata[0]["scorer_error"]


def test_unknown_datasets_and_settings_are_refused():
    with pytest.raises(ConfigError, match="no dataset 'chain_som'"):
        reasoning_gym.make_tasks("chain_som", 1, 0)
    with pytest.raises(ConfigError, match="refuses the settings"):
        reasoning_gym.make_tasks("chain_sum", 1, 0, min_terms=9, max_terms=1)


@pytest.mark.parametrize(
    ("text", "truth", "reward"),
    [
        (r"So it is $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        ("the answer is 3", "4", 0.0),
        ("I don't know", "4", 0.0),
        ("4", "", None),
    ],
)
async def test_mathematical_answers_are_compared_by_their_meaning(text, truth, reward):
    async with MathsEnvironment(in_process=True) as environment:
        answer = await environment.step([said(text)], [{"ground_truth": truth}])

    assert settled(answer, 1, "maths").rewards == [reward]


async def test_a_maths_task_without_a_reference_cannot_be_scored():
    async with MathsEnvironment(in_process=True) as environment:
        answer = await environment.step([said("4")] * 2, [None, {"ground_truth": None}])

    assert answer.rewards == [None, None]


def test_maths_metrics_count_an_answer_that_was_cut_off_as_wrong():
    batch = {
        "rewards": [1.0, 1.0, 0.0, 0.0],
        "is_end": [True, False, True, True],
        "group_index": [0, 0, 1, 1],
        "generation_lengths": [10, 50, 20, 40],
        "prompt_lengths": [5, 5, 7, 7],
    }

    columns, metrics = MathsEnvironment().global_post_process_and_metrics(batch)

    assert columns["rewards"] == [1.0, 0.0, 0.0, 0.0]
    assert batch["rewards"] == [1.0, 1.0, 0.0, 0.0]
    assert metrics == {
        "accuracy": 0.25,
        "pass@samples_per_prompt": 0.5,
        "fraction_of_samples_properly_ended": 0.75,
        "num_problems_in_batch": 4.0,
        "generation_lengths": 30.0,
        "prompt_lengths": 6.0,
        "correct_solution_generation_lengths": 10.0,
    }


def test_maths_and_code_tasks_say_how_to_answer():
    assert r"\boxed{}" in maths.make_task("1+1?", "2").messages[0]["content"]
    with pytest.raises(ConfigError, match="seconds=0"):
        MathsEnvironment(seconds=0)
    task = python_code.make_task("Say hello.", expected_output="hello\n", max_attempts=2)
    assert "```python" in task.messages[0]["content"]
    assert task.metadata["expected_output"] == "hello\n"
    with pytest.raises(ValueError, match="either tests or expected_output"):
        python_code.make_task("x")
