import threading

import anyio
import pytest

from gymrl.errors import (
    ConfigError,
    EnvironmentContractError,
    GenerationError,
    NoGenerationError,
    RolloutDataFailure,
    RolloutInfraFailure,
    RolloutRedispatchExhausted,
    RowTypeError,
    RowValueError,
)
from gymrl.rollout.native import (
    NativeConfig,
    NativePrompt,
    run_native_rollout,
    stream_native_rollout,
)
from gymrl.scoring import ScoringConfig, resolve_scoring, score_group
from gymrl.testing import ScriptedGenerator
from gymrl.types import Failure
from tests.unit.native.worlds import Characters, Scripted, says

SCHEDULERS = pytest.mark.parametrize("scheduler", ["async", "batched"])


def a_prompt(content, task_name="world", **fields):
    return NativePrompt(
        task_name=task_name, messages=[{"role": "user", "content": content}], **fields
    )


def one_turn(log, metadata):
    return {"terminated": True, "reward": 1.0}


def x_always(prompt_ids, sampling):
    return says("x")


async def run(prompts, environment=one_turn, generator=None, *, num_generations=1, **config):
    world = Scripted(environment) if callable(environment) else environment
    return await run_native_rollout(
        prompts,
        generator or ScriptedGenerator(x_always),
        world if isinstance(world, dict) else {"world": world},
        codec=Characters(),
        config=NativeConfig(**{"retry_delay_s": 0.0, **config}),
        num_generations=num_generations,
    )


@SCHEDULERS
async def test_an_unknown_task_name_is_refused_before_the_first_generate_call(scheduler):
    generator = ScriptedGenerator(x_always)

    with pytest.raises(RowValueError, match=r"row 2: .*'would' \(known: other, world\)"):
        await run(
            [a_prompt("a"), a_prompt("b", "would")],
            {"world": Scripted(one_turn), "other": Scripted(one_turn)},
            generator,
            num_generations=2,
            scheduler=scheduler,
        )
    assert generator.calls == []


async def test_what_cannot_be_a_prompt_is_refused_by_row():
    with pytest.raises(RowTypeError, match="row 0 is a dict"):
        await run([{"task_name": "world"}])
    with pytest.raises(RowTypeError, match="row 0: message"):
        await run([NativePrompt(task_name="world", messages=[{"role": "user", "content": None}])])
    with pytest.raises(RowValueError, match="row 0: the prompt holds no token"):
        await run([a_prompt("")])
    with pytest.raises(RowValueError, match=r"row 1: extra_env_info\.big"):
        await run([a_prompt("a"), a_prompt("b", metadata={"big": 2**70})])
    with pytest.raises(RowValueError, match="empty"):
        await run([])
    with pytest.raises(RowValueError, match="num_generations=0"):
        await run([a_prompt("a")], num_generations=0)
    with pytest.raises(ConfigError, match="no step method"):
        await run([a_prompt("a")], {"world": object()})
    with pytest.raises(ConfigError, match="max_turns=0"):
        NativeConfig(max_turns=0)


@SCHEDULERS
async def test_groups_come_in_input_order_with_metrics_of_their_own(scheduler):
    def slow_first(log, metadata):
        return {"terminated": len(log) > metadata, "reward": metadata}

    rollout = await run(
        [a_prompt("a", metadata=5), a_prompt("b", metadata=1)],
        slow_first,
        num_generations=2,
        scheduler=scheduler,
    )

    assert [group.index for group in rollout.groups] == [0, 1]
    assert [row.index for group in rollout.groups for row in group.rows] == [0, 1, 2, 3]
    assert [g.metrics["turns_per_sample/mean"] for g in rollout.groups] == [3.0, 1.0]
    assert [g.metrics["total_reward/mean"] for g in rollout.groups] == [15.0, 1.0]
    assert rollout.metrics["turns_per_sample/mean"] == 2.0


@SCHEDULERS
async def test_four_rows_with_one_dead_environment_step_never_give_a_reward_of_zero(scheduler):
    def third_fails(log, metadata):
        return {"terminated": True, "reward": None if log[0]["content"] == "c" else 1.0}

    prompts = [a_prompt(content) for content in "abcd"]

    masked = await run(prompts, third_fails, scheduler=scheduler, failure_policy="mask")
    samples = [sample for group in masked.groups for sample in group.samples]
    assert [isinstance(sample, Failure) for sample in samples] == [False, False, True, False]
    assert masked.metrics["total_reward/mean"] == 1.0
    assert masked.metrics["rollout_failures/RewardContractError"] == 1

    dropped = await run(prompts, third_fails, scheduler=scheduler, failure_policy="drop_group")
    assert [group.index for group in dropped.groups] == [0, 1, 3]
    assert dropped.num_dropped == 1
    assert dropped.metrics["dropped_groups"] == 1
    assert dropped.metrics["rollout_failures/data"] == 1

    with pytest.raises(RuntimeError, match=r"row 2 \(environment 'world', turn 0\).*None"):
        await run(prompts, third_fails, scheduler=scheduler)


@SCHEDULERS
async def test_one_error_in_a_hundred_rows_is_shown_whole_and_cancels_nobody(scheduler):
    async def answer(prompt_ids, sampling):
        if prompt_ids == [ord("!")]:
            raise KeyError("x")
        return says("x")

    prompts = [a_prompt("!" if row == 57 else "a") for row in range(100)]

    rollout = await run(
        prompts, one_turn, ScriptedGenerator(answer), scheduler=scheduler, failure_policy="mask"
    )

    failures = [failure for group in rollout.groups for failure in group.failures]
    assert sum(len(group.trajectories) for group in rollout.groups) == 99
    [failure] = failures
    assert (failure.row, failure.error, failure.kind) == (57, "KeyError", "data")
    assert "'x'" in failure.message
    assert 'raise KeyError("x")' in failure.traceback
    assert "Cancelled" not in failure.traceback


async def test_the_policy_raise_ends_with_a_typed_error_and_its_cause():
    async def answer(prompt_ids, sampling):
        raise KeyError("x")

    with pytest.raises(RolloutDataFailure) as caught:
        await run([a_prompt("a")], one_turn, ScriptedGenerator(answer))

    assert (caught.value.row, caught.value.agent, caught.value.attempts) == (0, "world", 2)
    assert isinstance(caught.value.__cause__, KeyError)


@SCHEDULERS
async def test_a_second_attempt_equals_a_fresh_run(scheduler):
    """Nothing of a first attempt is left: no tokens, no reward, no metadata."""
    steps = 0

    def fails_once(log, metadata):
        nonlocal steps
        steps += 1
        metadata["seen"].append(len(log))
        if steps == 2:
            raise ConnectionError("gone")
        return {"terminated": len(log) > 3, "reward": 1.0, "metadata": metadata}

    given = {"seen": []}
    rollout = await run(
        [a_prompt("a", metadata=given)], fails_once, scheduler=scheduler, max_turns=5
    )

    [trajectory] = rollout.groups[0].trajectories
    assert trajectory.reward.total == 2.0
    assert trajectory.num_tokens == 3
    assert b'"seen":[2,4]' in trajectory.result
    assert given == {"seen": []}


@SCHEDULERS
async def test_the_fleets_failures_end_the_run_when_their_budget_is_spent(scheduler):
    calls = 0

    def always_gone(log, metadata):
        nonlocal calls
        calls += 1
        raise ConnectionError("gone")

    with pytest.raises(RolloutRedispatchExhausted, match="row 0") as caught:
        await run(
            [a_prompt("a")],
            always_gone,
            scheduler=scheduler,
            failure_policy="mask",
            max_infra_attempts=3,
        )
    assert caught.value.attempts == calls == 3


async def test_a_prompt_without_room_fails_its_row_and_is_not_tried_again():
    generator = ScriptedGenerator(x_always)

    rollout = await run(
        [a_prompt("long"), a_prompt("a")],
        one_turn,
        generator,
        max_seq_len=4,
        failure_policy="mask",
    )

    assert rollout.groups[0].failures[0].error == "NoGenerationError"
    assert rollout.groups[0].failures[0].attempts == 1
    assert len(generator.calls) == 1
    with pytest.raises(NoGenerationError, match="row 0"):
        await run([a_prompt("long")], max_seq_len=4)


async def test_no_call_ever_has_a_budget_below_one():
    generator = ScriptedGenerator(lambda p, s: says("x" * 3))

    await run(
        [a_prompt("ab")],
        lambda log, metadata: {"observation": "yy"},
        generator,
        max_seq_len=13,
    )

    assert [call.sampling.max_tokens for call in generator.calls] == [11, 6, 1]


@SCHEDULERS
async def test_mixed_rewards_are_refused_though_each_sample_has_one_kind(scheduler):
    def mixed(log, metadata):
        return {"reward": {"a": 1.0} if log[0]["content"] == "a" else 1.0, "terminated": True}

    with pytest.raises(EnvironmentContractError, match=r"'world'.*components"):
        await run([a_prompt("a"), a_prompt("b")], mixed, scheduler=scheduler, failure_policy="mask")


@SCHEDULERS
async def test_several_environments_with_different_rewards_share_a_batch(scheduler):
    environments = {
        "parts": Scripted(lambda log, m: {"reward": {"a": 0.25, "b": 0.5}, "terminated": True}),
        "plain": Scripted(lambda log, m: {"reward": 2.0, "terminated": True}),
    }

    rollout = await run(
        [a_prompt("x", "parts"), a_prompt("y", "plain")], environments, scheduler=scheduler
    )

    rewards = [group.trajectories[0].reward for group in rollout.groups]
    assert rewards[0].components == {"a": 0.25, "b": 0.5}
    assert rewards[1].components is None
    assert [reward.total for reward in rewards] == [0.75, 2.0]


@SCHEDULERS
async def test_a_step_beyond_its_deadline_is_the_fleets_failure(scheduler):
    class Stuck:
        async def step(self, message_logs, metadata):
            await anyio.sleep_forever()

    with pytest.raises(RolloutRedispatchExhausted, match="environment_timeout_s"):
        await run(
            [a_prompt("a")],
            Stuck(),
            scheduler=scheduler,
            environment_timeout_s=0.02,
            max_infra_attempts=1,
        )


@SCHEDULERS
async def test_cancelling_a_rollout_ends_its_generate_calls_before_it_returns(scheduler):
    started = anyio.Event()

    async def forever(prompt_ids, sampling):
        started.set()
        await anyio.sleep_forever()

    generator = ScriptedGenerator(forever)
    async with anyio.create_task_group() as group:

        async def play():
            await run([a_prompt("a"), a_prompt("b")], one_turn, generator, scheduler=scheduler)

        group.start_soon(play)
        await started.wait()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()

    assert generator.cancelled == 2


@SCHEDULERS
async def test_cancelling_a_rollout_ends_its_environment_steps_before_it_returns(scheduler):
    started = anyio.Event()
    ended = []

    class Waiting:
        async def step(self, message_logs, metadata):
            started.set()
            try:
                await anyio.sleep_forever()
            finally:
                ended.extend(message_logs)

    async with anyio.create_task_group() as group:

        async def play():
            await run([a_prompt("a"), a_prompt("b")], Waiting(), scheduler=scheduler)

        group.start_soon(play)
        await started.wait()
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()

    assert len(ended) == 2


async def test_cancelling_a_rollout_waits_for_a_blocking_step():
    entered, release = threading.Event(), threading.Event()
    left = []

    class Blocking:
        def step(self, message_logs, metadata):
            entered.set()
            release.wait(10)
            left.append(True)
            raise RuntimeError("nobody listens any more")

    async with anyio.create_task_group() as group:

        async def play():
            await run([a_prompt("a")], Blocking())

        group.start_soon(play)
        await anyio.to_thread.run_sync(entered.wait)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.02)
            assert left == []
            release.set()

    assert left == [True]


def stream(prompts, environment, generator, **config):
    return stream_native_rollout(
        prompts,
        generator,
        {"world": Scripted(environment)},
        codec=Characters(),
        config=NativeConfig(**config),
    )


@SCHEDULERS
async def test_a_stream_yields_groups_as_they_complete(scheduler):
    def turns(log, metadata):
        return {"terminated": len(log) > metadata}

    prompts = [a_prompt("a", metadata=7), a_prompt("b", metadata=1), a_prompt("c", metadata=4)]

    order = [
        group.index
        async for group in stream(prompts, turns, ScriptedGenerator(x_always), scheduler=scheduler)
    ]

    assert order == [1, 2, 0]


async def test_a_group_is_yielded_while_another_still_generates():
    async def answer(prompt_ids, sampling):
        if prompt_ids == [ord("a")]:
            await anyio.sleep_forever()
        return says("x")

    generator = ScriptedGenerator(answer)
    groups = stream([a_prompt("a"), a_prompt("b")], one_turn, generator)

    assert (await anext(groups)).index == 1
    await groups.aclose()
    assert generator.cancelled == 1


async def test_a_stream_raises_after_the_groups_that_were_complete():
    other_came = anyio.Event()

    async def answer(prompt_ids, sampling):
        if prompt_ids == [ord("a")]:
            await other_came.wait()
            raise GenerationError("broken")
        return says("x")

    groups = stream(
        [a_prompt("a"), a_prompt("b")], one_turn, ScriptedGenerator(answer), max_data_attempts=1
    )
    assert (await anext(groups)).index == 1
    other_came.set()
    with pytest.raises(RolloutDataFailure, match=r"row 0.*broken"):
        await anext(groups)


async def test_an_aborted_call_is_tried_again_as_the_fleets_failure():
    generator = ScriptedGenerator([says("", finish_reason="abort"), says("x")])

    rollout = await run([a_prompt("a")], one_turn, generator)
    assert rollout.groups[0].trajectories[0].num_generated == 1

    always = ScriptedGenerator(lambda p, s: says("", finish_reason="abort"))
    with pytest.raises(RolloutRedispatchExhausted) as caught:
        await run([a_prompt("a")], one_turn, always, max_infra_attempts=2)
    assert isinstance(caught.value.__cause__, RolloutInfraFailure)


async def test_environments_look_at_all_finished_episodes_at_the_end():
    class Judging(Scripted):
        def global_post_process_and_metrics(self, batch):
            self.batch = batch
            return batch, {"accuracy": sum(batch["rewards"]) / len(batch["rewards"])}

    judge = Judging(
        lambda log, m: {
            "reward": float(log[0]["content"] == "a"),
            "terminated": True,
            "answer": log[-1]["content"],
        }
    )

    rollout = await run([a_prompt("a"), a_prompt("bb")], judge)

    assert rollout.metrics["world/accuracy"] == 0.5
    assert judge.batch == {
        "text": ["x", "x"],
        "rewards": [1.0, 0.0],
        "is_end": [True, True],
        "answers": ["x", "x"],
        "prompt_lengths": [1, 2],
        "generation_lengths": [1, 1],
        "group_index": [0, 1],
    }


async def test_native_groups_are_scored_and_measured_like_any_other():
    rollout = await run(
        [a_prompt("a")], lambda log, m: {"reward": 0.5, "terminated": True}, num_generations=2
    )

    scored = score_group(rollout.groups[0], resolve_scoring(ScoringConfig()))

    assert [t.reward.total for t in scored.trajectories] == [0.5, 0.5]


@pytest.mark.parametrize("block", ["effort", "penalties", "length_penalty"])
def test_native_rollouts_have_no_place_for_rules_that_read_the_gyms_answer(block):
    with pytest.raises(ConfigError, match=block):
        NativeConfig.from_dict({block: {}})
