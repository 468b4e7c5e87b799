"""A tiny transformers model plays real environments: what is trained on is what was sampled."""

import math

import msgspec
import pytest
import torch

from gymrl.config import GenerationConfig, SamplingParams
from gymrl.environments.builtin import number_guessing, reasoning_gym
from gymrl.environments.builtin.number_guessing import NumberGuessingEnvironment
from gymrl.environments.builtin.reasoning_gym import ReasoningGymEnvironment
from gymrl.generation import TransformersGenerator
from gymrl.rollout.native import NativeConfig, NativePrompt, run_native_rollout
from gymrl.rollout.native_text import ChatText, RawText
from gymrl.tensors import to_batch
from gymrl.testing import build_tiny_model


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    torch.set_num_threads(1)
    return build_tiny_model(tmp_path_factory.mktemp("model"), max_model_len=512)


@pytest.fixture
async def loaded(model_directory):
    # One sequence at a time: tokens are a function of the prompt and the seed, bit for bit.
    config = GenerationConfig(model=str(model_directory), max_batch_size=1, num_threads=1)
    generator, tokenizer = TransformersGenerator.load(config)
    yield generator, tokenizer
    await generator.close()


def prompts():
    tasks = [("guess", number_guessing.make_task(seed, max_guesses=3)) for seed in range(2)]
    tasks += [("sums", task) for task in reasoning_gym.make_tasks("chain_sum", 2, 5)]
    return [
        NativePrompt(
            task_name=name,
            messages=task.messages,
            metadata=task.metadata,
            stop_strings=task.stop_strings,
        )
        for name, task in tasks
    ]


async def play(loaded, scheduler="async", seed=11, codec=ChatText.from_tokenizer, **settings):
    generator, tokenizer = loaded
    return await run_native_rollout(
        prompts(),
        generator,
        {"guess": NumberGuessingEnvironment(), "sums": ReasoningGymEnvironment()},
        codec=codec(tokenizer),
        config=NativeConfig(
            scheduler=scheduler,
            seed=seed,
            max_seq_len=300,
            sampling=SamplingParams(max_tokens=12),
            **settings,
        ),
        num_generations=2,
    )


def sampled(rollout):
    return [
        (trajectory.token_ids.tolist(), trajectory.logprobs.tolist(), trajectory.reward.total)
        for group in rollout.groups
        for trajectory in group.trajectories
    ]


async def test_equal_seeds_sample_equal_tokens_under_both_schedulers(loaded):
    first = await play(loaded)
    again = await play(loaded)
    lockstep = await play(loaded, "batched")
    other = await play(loaded, seed=12)

    assert sampled(first) == sampled(again) == sampled(lockstep)
    assert sampled(first) != sampled(other)
    assert first.metrics == lockstep.metrics


async def test_the_attempts_of_a_group_differ(loaded):
    rollout = await play(loaded)

    for group in rollout.groups:
        one, two = group.trajectories
        assert one.token_ids.tolist() != two.token_ids.tolist()


@pytest.mark.parametrize("codec", [ChatText.from_tokenizer, RawText])
async def test_a_plain_forward_pass_gives_the_recorded_log_probabilities(loaded, codec):
    rollout = await play(loaded, codec=codec, max_turns=3)
    model = loaded[0].model

    checked = 0
    for group in rollout.groups:
        for trajectory in group.trajectories:
            ids = torch.tensor(trajectory.token_ids[None].astype("int64"))
            with torch.no_grad():
                logprobs = model(ids).logits[0].float().log_softmax(-1)
            for position in trajectory.token_mask().nonzero()[0]:
                token = int(trajectory.token_ids[position])
                expected = float(logprobs[position - 1, token])
                assert math.isclose(trajectory.logprobs[position], expected, abs_tol=1e-3), (
                    trajectory.agent,
                    position,
                )
                checked += 1
    assert checked > 50


async def test_a_rollout_becomes_a_batch_of_tensors(loaded):
    rollout = await play(loaded, max_turns=2)

    batch = to_batch(rollout.groups, pad_token_id=0)

    assert len(batch) == 8
    assert batch.token_mask.any(dim=1).all()
    generated = sum(t.num_generated for group in rollout.groups for t in group.trajectories)
    assert int(batch.token_mask.sum()) == generated
    assert [ref["name"] for ref in batch.final_batch["agent_ref"]] == ["guess"] * 4 + ["sums"] * 4


async def test_greedy_attempts_of_a_prompt_are_all_alike(loaded):
    rollout = await play(loaded, greedy=True, seed=None, max_turns=2)

    for group in rollout.groups:
        one, two = (msgspec.structs.replace(t, result=b"") for t in group.trajectories)
        assert one.token_ids.tolist() == two.token_ids.tolist()
