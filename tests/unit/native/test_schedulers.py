"""Both schedulers over the same scripted generator and environments give the same results."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from gymrl.config import SamplingParams
from gymrl.errors import GenerationError
from gymrl.rollout.native import NativeConfig, NativePrompt, run_native_rollout
from gymrl.rollout.native_steps import GeneratesBatches
from gymrl.testing import ScriptedGenerator
from tests.unit.native.worlds import Characters, Scripted, says


def a_prompt(content, task_name="count", **fields):
    return NativePrompt(
        task_name=task_name, messages=[{"role": "user", "content": content}], **fields
    )


def plain(rollout):
    """Everything of a rollout but the ids of its attempts."""
    return msgspec.to_builtins(
        [
            (
                group.index,
                [msgspec.structs.replace(row, rollout_id="-") for row in group.rows],
                [
                    msgspec.structs.replace(
                        s, token_ids=s.token_ids.tolist(), logprobs=s.logprobs.tolist()
                    )
                    if hasattr(s, "token_ids")
                    else msgspec.structs.replace(s, traceback="")
                    for s in group.samples
                ],
                group.metrics,
            )
            for group in rollout.groups
        ]
    ), rollout.metrics


def an_answer(prompt_ids, sampling):
    """A text that depends on everything a generator gets."""
    total = sum(prompt_ids) + len(sampling.stop) + (sampling.seed or 0) % 7
    length = total % 4
    if total % 11 == 0:
        raise GenerationError(f"no answer to {total}")
    text = "".join(chr(97 + (total * k) % 26) for k in range(1, length + 1))
    return says(text, logprob=-1.0 / (1 + total % 5))


def counting(log, metadata):
    count = metadata["count"] - 1
    return {
        "observation": f"<{log[-1]['content']}|{count}>",
        "metadata": {"count": count} if count % 2 else None if count < 0 else {"count": count},
        "stop": ["!"] if count % 3 == 0 else None,
        "reward": count / 4,
        "terminated": count <= 0,
        "answer": log[-1]["content"] or None,
    }


def parts(log, metadata):
    return {
        "observation": "." * metadata["size"],
        "reward": {"length": float(len(log)), f"last_{log[-1]['content'][:1]}": 0.5},
        "terminated": len(log) > 5,
    }


async def played(scheduler, prompts, **settings_):
    generator = ScriptedGenerator(an_answer, max_model_len=60)
    config = NativeConfig(scheduler=scheduler, failure_policy="mask", seed=3, **settings_)
    environments = {"count": Scripted(counting), "parts": Scripted(parts)}
    return await run_native_rollout(
        prompts, generator, environments, codec=Characters(), config=config, num_generations=2
    )


prompts_of = st.lists(
    st.one_of(
        st.builds(
            lambda text, count: a_prompt(text, metadata={"count": count}),
            st.text("abcxyz", min_size=1, max_size=12),
            st.integers(1, 5),
        ),
        st.builds(
            lambda text, size: a_prompt(
                text, "parts", metadata={"size": size}, stop_strings=["?"] * (size % 2)
            ),
            st.text("abcxyz", min_size=1, max_size=70),
            st.integers(0, 30),
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=20, deadline=None)
@given(
    prompts=prompts_of,
    max_turns=st.one_of(st.none(), st.integers(1, 4)),
    max_seq_len=st.integers(5, 60),
)
async def test_lock_step_and_independent_samples_give_identical_results(
    prompts, max_turns, max_seq_len
):
    limits = {"max_turns": max_turns or 8, "max_seq_len": max_seq_len}

    independent = await played("async", prompts, **limits)
    lockstep = await played("batched", prompts, **limits)

    assert plain(independent) == plain(lockstep)


async def test_lock_step_asks_once_a_turn_and_steps_each_environment_once():
    world = Scripted(lambda log, metadata: {"terminated": len(log) > 3, "observation": "."})
    other = Scripted(lambda log, metadata: {"terminated": True})

    class Batches(ScriptedGenerator):
        sizes: list[int]

        async def generate_batch(self, prompts, samplings):
            self.sizes.append(len(prompts))
            return [says("x") for _ in prompts]

    generator = Batches([])
    generator.sizes = []
    assert isinstance(generator, GeneratesBatches)

    await run_native_rollout(
        [a_prompt("a", "world"), a_prompt("b", "other")],
        generator,
        {"world": world, "other": other},
        codec=Characters(),
        config=NativeConfig(scheduler="batched"),
        num_generations=3,
    )

    assert generator.sizes == [6, 3]
    assert [len(logs) for logs, _ in world.steps] == [3, 3]
    assert [len(logs) for logs, _ in other.steps] == [3]


async def test_one_bad_answer_in_a_batch_fails_its_own_sample_alone():
    class Batches(ScriptedGenerator):
        async def generate_batch(self, prompts, samplings):
            return [
                GenerationError("row 1 is odd") if prompt[0] == ord("b") else says("x")
                for prompt in prompts
            ]

    rollout = await run_native_rollout(
        [a_prompt("a"), a_prompt("b"), a_prompt("c")],
        Batches([]),
        {"count": Scripted(lambda log, metadata: {"terminated": True, "reward": 1.0})},
        codec=Characters(),
        config=NativeConfig(scheduler="batched", failure_policy="mask"),
    )

    [failure] = [f for group in rollout.groups for f in group.failures]
    assert (failure.row, failure.error, failure.attempts) == (1, "GenerationError", 2)
    assert rollout.metrics["total_reward/mean"] == 1.0


async def test_samples_stay_with_their_generator_and_tokens_are_counted_by_it():
    first, second = (
        ScriptedGenerator(lambda p, s: says("xx")),
        ScriptedGenerator(lambda p, s: says("y")),
    )
    world = Scripted(lambda log, metadata: {"terminated": len(log) > 3})

    rollout = await run_native_rollout(
        [a_prompt("a"), a_prompt("b")],
        [first, second],
        {"count": world},
        codec=Characters(),
        num_generations=2,
    )

    assert {call.prompt_ids[0] for call in first.calls} == {ord("a"), ord("b")}
    assert len(first.calls) == len(second.calls) == 4
    assert rollout.metrics["per_worker_token_counts/0"] == 8
    assert rollout.metrics["per_worker_token_counts/1"] == 4


@pytest.mark.parametrize("scheduler", ["async", "batched"])
async def test_greedy_takes_the_likeliest_token_whatever_the_profile_says(scheduler):
    generator = ScriptedGenerator(lambda p, s: says("x"))

    await run_native_rollout(
        [a_prompt("a")],
        generator,
        {"count": Scripted(lambda log, metadata: {"terminated": True})},
        codec=Characters(),
        config=NativeConfig(
            scheduler=scheduler, greedy=True, sampling=SamplingParams(temperature=0.7, top_k=4)
        ),
    )

    sampling = generator.calls[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, None)
