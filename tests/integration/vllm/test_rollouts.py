"""Rollouts through a real Gym worker and a real vLLM engine: the tokens trained on are its own."""

import pytest

from gymrl.benchmark import load_benchmark
from gymrl.config import GymConfig, RolloutConfig, SamplingParams
from gymrl.generation.fidelity import MAX_TOLERANCE, MEAN_TOLERANCE
from gymrl.rollout.engine import RolloutEngine
from tests.integration.vllm.engines import engine_config


@pytest.mark.timeout(180)
async def test_every_trainable_token_has_the_log_probability_that_transformers_gives(models, first):
    benchmark = load_benchmark("chain_sum", num_tasks=3, seed=0)
    sampling = SamplingParams(temperature=0.8, max_tokens=24)
    config = RolloutConfig(
        generation=engine_config(models.first, defer_loading=True),
        gym=GymConfig(servers=benchmark.servers, tokenizer=models.first),
        sampling=sampling,
        seed=7,
    )
    async with RolloutEngine(config) as engine:
        groups = await engine.run(list(benchmark.rows), num_generations=4)

    errors = []
    for group in groups:
        assert len(group.trajectories) == 4
        for sample in group.trajectories:
            for turn in sample.turns:
                ids = sample.token_ids.tolist()
                prompt, sampled = (
                    ids[: turn.generation_start],
                    ids[turn.generation_start : turn.end],
                )
                recorded = sample.logprobs[turn.generation_start : turn.end].tolist()
                expected = first.logprobs(prompt, sampled, sampling)
                errors += [abs(a - b) for a, b in zip(recorded, expected, strict=True)]
    assert len(errors) > 100
    assert sum(errors) / len(errors) < MEAN_TOLERANCE
    assert max(errors) < MAX_TOLERANCE
