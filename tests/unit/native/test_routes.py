"""Routes of native episodes: of each call, laid along the sample's tokens."""

import msgspec
import numpy as np
import pytest

from gymrl.environments.base import EnvironmentReturn
from gymrl.errors import RoutedExpertsError
from gymrl.rollout.native import NativeConfig, run_native_rollout
from gymrl.rollout.native_rows import NativePrompt
from tests.unit.native.test_episode import a_step, an_episode
from tests.unit.native.worlds import Characters, observation, says


def answer(text: str, num_prompt: int, first: int, **changes):
    """An answer whose routes tell the call (hundreds) and the row."""
    count = num_prompt + len(text)
    routes = (first + np.arange(count, dtype=np.int16)).reshape(count, 1, 1).repeat(2, axis=2)
    routes[-1:] = -1
    return msgspec.structs.replace(says(text), routed_experts=routes, **changes)


def play(*answers, **rules):
    episode = an_episode("ab", **rules)
    for number, generated in enumerate(answers):
        episode.next_request()
        episode.take_generation(generated)
        is_last = number == len(answers) - 1
        episode.take_step(a_step("ef", reward=1.0, terminated=is_last))
    return episode.trajectory()


def test_an_observation_has_the_routes_of_the_call_that_computed_it():
    trajectory = play(answer("cd", 2, 100), answer("g", 6, 200))

    assert trajectory.routed_experts[:, 0, 0].tolist() == [100, 101, 102, 203, 204, 205, -1]
    assert trajectory.routed_experts.shape == (7, 1, 2)
    assert "turns_without_routes" not in trajectory.notes


def test_an_answer_without_routes_beside_one_that_has_them_is_missing_and_counted():
    trajectory = play(says("cd"), answer("g", 6, 200))

    assert trajectory.routed_experts[:, 0, 0].tolist() == [-1, -1, -1, -1, 204, 205, -1]
    assert trajectory.notes["turns_without_routes"] == 1


def test_a_generator_without_routes_gives_none():
    assert play(says("cd"), says("g")).routed_experts is None


def test_an_answer_without_required_routes_fails_the_row_and_names_the_switch():
    with pytest.raises(RoutedExpertsError, match="return_routed_experts") as caught:
        play(answer("cd", 2, 100), says("g"), require_routed_experts=True)

    assert caught.value.turn == 1


def test_too_few_rows_fail_the_row_with_both_numbers():
    with pytest.raises(RoutedExpertsError, match="5 rows of routes for 7 tokens"):
        play(answer("cd", 2, 100), answer("g", 4, 200))


def test_empty_answers_at_the_end_leave_with_their_routes():
    trajectory = play(answer("cd", 2, 100), answer("", 6, 200, finish_reason="stop"))

    assert trajectory.num_tokens == 4
    assert len(trajectory.routed_experts) == 4


class Routed:
    """Answers "x" to everything, with the routes of a model of one layer."""

    max_model_len = 50

    async def generate(self, prompt_ids, sampling, *, on_token=None):
        return answer("x", len(prompt_ids), 0)

    async def close(self) -> None: ...


class TwoTurns:
    def step(self, message_logs, metadata):
        ends = [sum(m["role"] == "assistant" for m in log) == 2 for log in message_logs]
        return EnvironmentReturn(
            observations=[observation("ok")] * len(ends),
            metadata=metadata,
            next_stop_strings=[None] * len(ends),
            rewards=[1.0] * len(ends),
            terminateds=ends,
        )


@pytest.mark.parametrize("scheduler", ["async", "batched"])
async def test_both_schedulers_keep_the_routes_and_report_that_none_is_missing(scheduler):
    prompts = [NativePrompt(task_name="w", messages=[{"role": "user", "content": "ab"}])]

    rollout = await run_native_rollout(
        prompts,
        Routed(),
        {"w": TwoTurns()},
        codec=Characters(),
        config=NativeConfig(scheduler=scheduler, require_routed_experts=True),
        num_generations=2,
    )

    for trajectory in rollout.groups[0].trajectories:
        assert trajectory.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, -1]
    assert rollout.metrics["r3/routed_experts_expected_token_routes"] == 10
    assert rollout.metrics["r3/routed_experts_fallback_token_routes"] == 0
    assert rollout.groups[0].metrics["r3/routed_experts_fallback_token_route_fraction"] == 0.0
