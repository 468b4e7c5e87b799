"""Both roads over one scripted Gym: the engine, and NeMo RL's names. They must give the same."""

import contextlib
import json
import random

import anyio.to_thread
import pytest
import torch

from gymrl.compat.nemo_rl import (
    EffortLevelsConfig,
    NemoGym,
    run_async_nemo_gym_rollout,
    run_nemo_gym_rollout_sync,
)
from gymrl.config import GymConfig, RolloutConfig, SamplingParams
from gymrl.rollout.engine import RolloutEngine
from gymrl.scoring import EffortConfig, LengthPenaltyConfig, PenaltyConfig, ScoringConfig
from gymrl.tensors import to_batch
from gymrl.testing import FakeGymServer
from tests.parity import naive
from tests.parity.results import AGENTS, any_result, body_of, broken_result

LIMIT = 24
PAD = 99
GROUP = 3


class Letters:
    """A tokenizer whose tokens are letters."""

    pad_token_id = PAD

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]


class Policy:
    max_model_len = LIMIT


def prompt(agent, text="ask"):
    return {
        "responses_create_params": {"input": [{"role": "user", "content": text}]},
        "agent_ref": {"name": agent},
    }


@contextlib.asynccontextmanager
async def roads(script):
    """The engine, and a NemoGym, before one server."""
    async with FakeGymServer(script, agents=AGENTS) as server:
        host, port = server.url.removeprefix("http://").split(":")
        config = RolloutConfig(
            gym=GymConfig(registry_url=server.url), in_process=True, max_data_attempts=1
        )
        environment = NemoGym(
            {
                "model_name": "policy",
                "base_urls": [],
                "initial_global_config_dict": {"head_server": {"host": host, "port": int(port)}},
                "in_process": True,
            }
        )
        await anyio.to_thread.run_sync(environment._spinup)
        try:
            yield config, environment, server
        finally:
            await anyio.to_thread.run_sync(environment.shutdown)


async def by_engine(config, prompts, scoring=None):
    def encode(text):
        return [ord(letter) for letter in text]

    async with RolloutEngine(config, scoring=scoring, encode=encode) as engine:
        return await engine.run(prompts, num_generations=GROUP)


async def by_face(environment, prompts, **options):
    rows = [prompt for prompt in prompts for _ in range(GROUP)]
    options = {"num_generations": GROUP, "log_full_result_tables": False, **options}
    results = run_async_nemo_gym_rollout(
        Policy(),
        {"extra_env_info": rows, "loss_multiplier": torch.ones(len(rows))},
        Letters(),
        {"nemo_gym": environment},
        {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": None},
        **options,
    )
    return sorted([result async for result in results], key=lambda result: result.task_index)


def as_lists(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return [as_lists(item) for item in value] if isinstance(value, list) else value


def numbers_of(metrics):
    return {
        name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not name.startswith("timing/")
    }


def a_batch(seed, num_prompts=4, **options):
    rng = random.Random(seed)
    bodies = [body_of(rng, any_result(rng, **options)) for _ in range(num_prompts * GROUP)]
    prompts = [prompt(AGENTS[number % 2]) for number in range(num_prompts)]
    return bodies, prompts


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_both_roads_give_what_the_plain_writing_gives(seed):
    bodies, prompts = a_batch(seed)
    expected = [naive.episode(body) for body in bodies]
    async with roads(dict(enumerate(bodies))) as (config, environment, _):
        groups = await by_engine(config, prompts)
        results = await by_face(environment, prompts)
    assert len(groups) == len(results) == len(prompts)
    for number, (group, result) in enumerate(zip(groups, results, strict=True)):
        samples = expected[number * GROUP : (number + 1) * GROUP]
        agents = [AGENTS[number % 2]] * GROUP
        batch = to_batch([group], pad_token_id=PAD, max_total_tokens=LIMIT)
        assert as_lists(result.final_batch) == as_lists(batch.final_batch)
        columns = naive.batch(samples, agents, LIMIT, PAD)
        for name in ("input_ids", "token_ids", "token_mask", "generation_logprobs", "lengths"):
            assert getattr(result.batch, name).tolist() == columns.pop(name), name
        assert as_lists(result.input_ids) == naive.batch(samples, agents, LIMIT, PAD)["input_ids"]
        found = as_lists(result.final_batch)
        messages = [
            [(message["role"], message["token_ids"]) for message in log]
            for log in found["message_log"]
        ]
        assert messages == [[(role, ids) for role, ids, _ in s["log"]] for s in samples]
        assert {name: found[name] for name in columns} == columns
        metrics = naive.metrics(samples, agents, LIMIT)
        assert numbers_of(result.rollout_metrics) == pytest.approx(metrics)
        assert result.rollout_metrics["total_reward/histogram"] == sorted(
            sample["reward"] for sample in samples
        )


async def test_both_roads_score_alike():
    rng = random.Random(8)
    results = [any_result(rng, reward=float(place % GROUP != 0)) for place in range(4 * GROUP)]
    bodies = [body_of(rng, result) for result in results]
    prompts = [prompt(AGENTS[n % 2], "be brief" if n < 2 else "take your time") for n in range(4)]
    block = {"default": {"length_type": "chars", "group_total_length_penalty_coeff": 0.25}}
    penalties = {
        "penalize_empty_final_answer": True,
        "penalize_unwanted_tokens": True,
        "token_ids": {"unwanted": [7, 11]},
    }
    effort = {"low_weight": 0.5, "low_ub": 8, "low_string": "brief"}
    scoring = ScoringConfig(
        effort=EffortConfig(**effort),
        penalties=PenaltyConfig.from_dict(penalties),
        length_penalty=LengthPenaltyConfig.from_dict(block),
    )
    async with roads(dict(enumerate(bodies))) as (config, environment, _):
        groups = await by_engine(config, prompts, scoring)
        found = await by_face(
            environment,
            prompts,
            effort_config=EffortLevelsConfig(**effort),
            reward_penalty_config=penalties,
            length_penalty_config=block,
        )
    for group, result in zip(groups, found, strict=True):
        # The engine's own server names no context, so truncation is by reasons alone there.
        batch = to_batch([group], pad_token_id=PAD, max_total_tokens=LIMIT, with_env_reward=True)
        assert as_lists(result.final_batch) == as_lists(batch.final_batch)
        same = {
            name: value
            for name, value in group.metrics.items()
            if name not in ("truncation_rate", "natural_termination_rate")
        }
        assert {name: result.rollout_metrics[name] for name in same} == same
    spoken = [
        result.final_batch["env_reward"] - result.final_batch["total_reward"] for result in found
    ]
    assert any(difference.any() for difference in spoken)
    assert "unwanted_token_rate" in found[0].rollout_metrics
    assert "mean_length_reward_low" in found[0].rollout_metrics
    assert "mean_length_reward_low" not in found[3].rollout_metrics


async def test_the_whole_batch_as_one_result_is_the_groups_side_by_side():
    bodies, prompts = a_batch(5, reward=1.0)
    block = {"default": {"length_type": "chars", "total_bonus": 0.5}}
    rows = [prompt for prompt in prompts for _ in range(GROUP)]
    async with roads(dict(enumerate(bodies))) as (_, environment, _):
        groups = await by_face(environment, prompts, length_penalty_config=block)

        def whole():
            return run_nemo_gym_rollout_sync(
                Policy(),
                {"extra_env_info": rows},
                Letters(),
                {"nemo_gym": environment},
                {"temperature": 1.0, "top_p": 1.0},
                True,
                num_generations_per_prompt=GROUP,
                length_penalty_config=block,
            )

        result = await anyio.to_thread.run_sync(whole)
    for name in ("total_reward", "env_reward", "length", "truncated", "mask_sample", "agent_ref"):
        side_by_side = [v for group in groups for v in as_lists(group.final_batch[name])]
        assert as_lists(result.final_batch[name]) == side_by_side, name
    # A bonus for the shortest of each prompt, not of the whole batch.
    assert (result.final_batch["total_reward"] > 1).sum() >= len(prompts) - 1
    assert result.task_index is None
    assert result.rollout_metrics["timing/rollout/total"] > 0
    assert result.rollout_metrics["baseline_reward/pct_1"] == 100.0
    tables = {agent: result.rollout_metrics[f"{agent}/full_result"] for agent in AGENTS}
    assert [len(rows) for rows in tables.values()] == [2 * GROUP, 2 * GROUP]
    assert json.loads(tables[AGENTS[0]][0])["reward"] == 1.0


@pytest.mark.parametrize("seed", range(4))
async def test_both_roads_refuse_a_broken_answer_for_the_same_reason(seed):
    rng = random.Random(seed)
    result, error = broken_result(rng)
    bodies, prompts = a_batch(seed, num_prompts=2)
    bodies[4] = body_of(rng, result)
    async with roads(dict(enumerate(bodies))) as (config, environment, _):
        with pytest.raises(RuntimeError, match=r"row 4 \(agent 'code_agent'") as by_the_engine:
            await by_engine(config, prompts)
        with pytest.raises(RuntimeError, match=r"row 4 \(agent 'code_agent'") as by_the_face:
            await by_face(environment, prompts)
    assert error in str(by_the_engine.value)
    assert error in str(by_the_face.value)
    assert type(by_the_engine.value.__cause__) is type(by_the_face.value.__cause__)


def without_ids(bodies):
    """The bodies without what is new in every run."""
    new = {"_ng_rollout_id": None, "_ng_group_id": None}
    return {row: {**body, **new} for row, body in bodies.items()}


async def test_both_roads_send_the_same_bodies_but_for_the_ids_of_a_run():
    bodies, prompts = a_batch(6, num_prompts=2)
    sampling = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=16)
    async with roads(dict(enumerate(bodies))) as (config, environment, server):
        async with RolloutEngine(config) as engine:
            await engine.run(prompts, num_generations=GROUP, sampling=sampling)
        sent = without_ids(server.bodies)
        generation = {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 16}
        rows = [prompt for prompt in prompts for _ in range(GROUP)]
        results = run_async_nemo_gym_rollout(
            Policy(),
            {"extra_env_info": rows},
            Letters(),
            {"nemo_gym": environment},
            generation,
            GROUP,
            False,
        )
        assert len([result async for result in results]) == 2
        again = without_ids(server.bodies)
    assert again == sent
    assert sent[4]["responses_create_params"]["temperature"] == 0.7
    assert (sent[4]["_ng_task_index"], sent[4]["_ng_rollout_index"]) == (1, 1)
