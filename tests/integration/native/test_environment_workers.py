"""Environments in real worker processes."""

import os
import signal
import sys

import anyio
import psutil
import pytest

from gymrl.actors import spawn
from gymrl.environments import EnvironmentActor, open_environment, spawn_environment
from gymrl.environments.builtin.maths import MathsEnvironment, MathsVerifier
from gymrl.errors import ActorDiedError, ActorStartError, ConfigError
from gymrl.rollout.native import NativeConfig, NativePrompt, run_native_rollout
from gymrl.testing import ScriptedGenerator
from tests.unit.native.worlds import Characters, says

WORLDS = "tests.unit.environments.worlds"


def logs(*contents):
    return [[{"role": "user", "content": content}] for content in contents]


async def test_a_step_of_many_is_split_over_the_workers_and_put_together_in_order():
    async with spawn_environment(f"{WORLDS}:Echo", {"prefix": "> "}, num_workers=2) as world:
        opened = open_environment(world, name="echo")
        answer = await opened.step(logs("a", "b", "c"), [{"n": 1}, None, None])
        _, metrics = await opened.global_post_process_and_metrics({"rewards": [1.0]})

    assert [o["content"] for o in answer.observations] == ["> a", "> b", "> c"]
    pids = {text.partition("/")[0] for text in answer.answers}
    assert len(pids) == 2
    assert str(os.getpid()) not in pids
    assert metrics == {"rows": 1.0}


async def test_a_worker_that_dies_fails_its_step_and_the_next_one_finds_a_new_worker():
    async with spawn_environment(f"{WORLDS}:Dies") as world:
        with pytest.raises(ActorDiedError):
            await world.step(logs("die"), [None])
        answer = await world.step(logs("live"), [None])

    assert answer.terminateds == [True]


async def test_a_worker_that_only_ever_dies_is_not_started_for_ever():
    async with spawn_environment(f"{WORLDS}:Dies") as world:
        for _ in range(4):
            with pytest.raises(ActorDiedError, match="exit"):
                await world.step(logs("die"), [None])
        with pytest.raises(ActorDiedError, match="died 4 times in a row"):
            await world.step(logs("live"), [None])


async def test_a_sample_whose_worker_died_is_tried_again_as_the_fleets_failure():
    texts = iter(["die", "live"])
    generator = ScriptedGenerator(lambda prompt, sampling: says(next(texts)))
    async with spawn_environment(f"{WORLDS}:Dies") as world:
        rollout = await run_native_rollout(
            [NativePrompt(task_name="w", messages=[{"role": "user", "content": "a"}])],
            generator,
            {"w": world},
            codec=Characters(),
            config=NativeConfig(retry_delay_s=0.0),
        )

    [trajectory] = rollout.groups[0].trajectories
    assert Characters().decode(trajectory.token_ids.tolist()) == "alive"


async def test_a_handle_of_an_actor_is_an_environment_as_well():
    async with spawn(
        EnvironmentActor, factory=f"{WORLDS}:Echo", arguments={}, name="echo", max_threads=1
    ) as handle:
        answer = await open_environment(handle, name="echo").step(logs("a"), [None])

    assert answer.observations[0]["content"] == "a"


async def test_a_factory_that_does_not_import_ends_the_start():
    with pytest.raises((ActorStartError, ConfigError), match="Missing"):
        async with spawn_environment(f"{WORLDS}:Missing", num_workers=2):
            pass


async def test_cancelling_a_rollout_leaves_its_workers_usable():
    started = anyio.Event()

    def answer(prompt, sampling):
        started.set()
        return says("x")

    async with spawn_environment(f"{WORLDS}:Slow") as world:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def cancel():
                    await started.wait()
                    await anyio.sleep(0.05)
                    scope.cancel()

                group.start_soon(cancel)
                await run_native_rollout(
                    [NativePrompt(task_name="w", messages=[{"role": "user", "content": "a"}])],
                    ScriptedGenerator(answer),
                    {"w": world},
                    codec=Characters(),
                )
        assert scope.cancelled_caught
        answered = await world.step(logs("now"), [{"seconds": 0}])

    assert answered.terminateds == [True]


def said(text):
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]


async def test_mathematics_is_verified_in_workers_of_its_own():
    async with MathsEnvironment(num_workers=2) as maths:
        answer = await maths.step(
            [said(r"$\frac{2}{4}$"), said("0.4"), said(r"\boxed{50\%}")],
            [{"ground_truth": "0.5"}] * 3,
        )

    assert answer.rewards == [1.0, 0.0, 1.0]


async def test_an_answer_that_takes_too_long_to_compare_is_not_right():
    tower = said(r"\boxed{9^{9^{9^{9^{9}}}}}")
    async with MathsEnvironment(seconds=1) as maths:
        hard = await maths.step([tower], [{"ground_truth": r"9^{9^{9^{9^{8}}}}"}])
        easy = await maths.step([said("2")], [{"ground_truth": "2"}])

    assert hard.rewards == [0.0]
    assert easy.rewards == [1.0]


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_verifier_that_does_not_come_back_costs_its_sample_and_is_replaced(fault):
    before = set(psutil.Process().children())
    async with MathsEnvironment(seconds=1) as maths:
        [worker] = set(psutil.Process().children()) - before
        worker.send_signal(fault)
        lost = await maths.step([said("2")], [{"ground_truth": "2"}])
        next_one = await maths.step([said("2")], [{"ground_truth": "2"}])

    assert lost.rewards == [None]
    assert next_one.rewards == [1.0]
    assert set(psutil.Process().children()) <= before


async def test_the_first_answer_has_its_time_for_itself():
    """math-verify loads what reads LaTeX with the first answer, and a second is all it has."""
    verifier = MathsVerifier()
    await verifier.setup()
    loaded = set(sys.modules)
    await verifier.verify(r"\boxed{\frac{2}{4}}", "0.5", 5)
    assert set(sys.modules) == loaded
