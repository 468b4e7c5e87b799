"""The engine over the real Gym worker, a real environment and a real (tiny) model."""

import os

import psutil
import pytest

from gymrl.benchmark import load_benchmark
from gymrl.config import GenerationConfig, GymConfig, RolloutConfig, SamplingParams
from gymrl.records import RecordWriter, RunRecord, read_groups
from gymrl.rollout.engine import RolloutEngine
from gymrl.rollout.sync import collect
from gymrl.tensors import to_batch
from gymrl.testing.models import build_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def benchmark():
    return load_benchmark("chain_sum", num_tasks=3, seed=0)


@pytest.fixture
def make_config(model, benchmark):
    def make(**settings):
        return RolloutConfig(
            generation=GenerationConfig(model=model, max_batch_size=4, num_threads=1),
            gym=GymConfig(servers=benchmark.servers, tokenizer=model),
            sampling=SamplingParams(temperature=0.8, max_tokens=6),
            seed=7,
            **settings,
        )

    return make


async def check_rollouts(config, benchmark, path):
    async with RolloutEngine(config) as engine:
        await engine.health_check()
        limit = engine.max_model_len
        groups = await engine.run(list(benchmark.rows), num_generations=2)
    assert [group.index for group in groups] == [0, 1, 2]
    for group in groups:
        assert len(group.trajectories) == 2
        for sample in group.trajectories:
            assert 1 <= sample.num_generated <= 6
            assert sample.turns[0].prompt_text
            assert (sample.logprobs[sample.token_mask()] < 0).all()
            assert sample.reward.total in (0.0, 1.0)
    batch = to_batch(groups, pad_token_id=0, max_total_tokens=limit)
    assert len(batch) == 6
    assert int(batch.token_mask.sum()) == sum(
        sample.num_generated for group in groups for sample in group.trajectories
    )
    with RecordWriter(path, RunRecord()) as writer:
        for group in groups:
            writer.write(group)
    read = list(read_groups(path))
    assert to_batch(read, pad_token_id=0).token_ids.tolist() == batch.token_ids.tolist()
    return [sample.token_ids.tolist() for group in groups for sample in group.trajectories]


async def test_rollouts_in_processes_and_in_one_process_are_the_same(
    make_config, benchmark, tmp_path
):
    spread = await check_rollouts(make_config(num_workers=2), benchmark, tmp_path / "a.jsonl")
    alone = await check_rollouts(make_config(in_process=True), benchmark, tmp_path / "b.jsonl")
    assert spread == alone


def test_a_blocking_call_leaves_no_process_behind(make_config, benchmark):
    before = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}
    groups = collect(make_config(), list(benchmark.rows), num_generations=2)
    assert [group.index for group in groups] == [0, 1, 2]
    after = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}
    assert after <= before
