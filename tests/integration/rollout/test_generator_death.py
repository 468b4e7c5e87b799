"""The generator's process dies; agents know its address."""

import os
import signal

import anyio
import pytest

from gymrl.benchmark import load_benchmark
from gymrl.config import GenerationConfig, GymConfig, RolloutConfig, SamplingParams
from gymrl.errors import (
    ActorDiedError,
    RolloutStreamError,
    UnsupportedOptionError,
    WeightUpdateError,
)
from gymrl.generation.weights import DirectoryWeights, TransferWeights
from gymrl.rollout.engine import RolloutEngine
from gymrl.rollout.fleet import Fleet
from gymrl.testing.models import build_tiny_model
from tests.integration.rollout.workers import FakeWorker, PortedGeneration


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_config(model):
    def make(**settings):
        return RolloutConfig(
            generation=GenerationConfig(model=model, max_batch_size=2, num_threads=1),
            gym=GymConfig(servers=load_benchmark("chain_sum", num_tasks=1).servers),
            sampling=SamplingParams(temperature=0.8, max_tokens=64),
            seed=7,
            **settings,
        )

    return make


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_generator_that_is_killed_comes_back_at_its_address(make_config):
    rows = list(load_benchmark("chain_sum", num_tasks=12, seed=0).rows)
    async with RolloutEngine(make_config()) as engine:
        generator = engine.fleet.instances[-1]
        address = generator.endpoint.base_url
        stream = engine.stream(rows, num_generations=2)
        groups = [await anext(stream)]
        os.kill(generator.pid, signal.SIGKILL)
        with anyio.fail_after(120):
            groups += [group async for group in stream]
            await engine.health_check()
        assert generator.endpoint.base_url == address
        assert generator.deaths == 1
        assert engine.progress.redispatches >= 1
    assert sorted(group.index for group in groups) == list(range(12))
    assert all(len(group.trajectories) == 2 for group in groups)


@pytest.fixture
def make_fakes(make_engine):
    """An engine over fake workers and a fake generator."""

    def make(**settings):
        settings.setdefault("generation", GenerationConfig(model="tiny"))
        opened = make_engine(**settings)
        fleet = Fleet(opened.config, gym=FakeWorker, generation=PortedGeneration)
        return RolloutEngine(opened.config, fleet=fleet)

    return make


async def test_a_new_generator_is_asked_for_the_port_of_the_old_one(make_fakes, row):
    async with make_fakes() as engine:
        generator = engine.fleet.instances[-1]
        assert generator.endpoint.model == "port 0, weights 0"
        died = anyio.Event()
        generator.when_dead(died.set)
        generator.kill()
        with anyio.fail_after(30):
            await died.wait()
            await generator.current()
        assert generator.endpoint.model == "port 4321, weights 0"
        assert generator.endpoint.base_url == "http://127.0.0.1:4321/v1"
        assert len(await engine.run([row()])) == 1


async def test_rows_wait_for_a_generator_that_is_being_started_again(make_fakes, row):
    async with make_fakes(num_workers=2) as engine:
        died = anyio.Event()
        engine.fleet.instances[-1].when_dead(died.set)
        engine.fleet.instances[-1].kill()
        with anyio.fail_after(30):
            await died.wait()
            assert len(await engine.run([row(), row()])) == 2
        assert engine.progress.redispatches == 0


async def test_without_restarts_the_generators_death_ends_the_run(make_fakes, row):
    async with make_fakes(worker_restarts=0) as engine:
        stream = engine.stream([row(), row(delay=60)])
        await anext(stream)
        os.kill(engine.fleet.instances[-1].pid, signal.SIGKILL)
        with pytest.raises(RolloutStreamError, match="instance 'the generator' failed") as caught:
            with anyio.fail_after(30):
                await anext(stream)
        assert isinstance(caught.value.__cause__, ActorDiedError)
        assert caught.value.instance == "the generator"
        with pytest.raises(RolloutStreamError, match="the generator"):
            await engine.run([row()])
        with pytest.raises(RolloutStreamError, match="the generator"):
            await engine.health_check()


STEP_7 = DirectoryWeights(path="step_7")


async def test_a_generator_comes_back_with_the_weights_that_it_was_given_last(make_fakes):
    async with make_fakes() as engine:
        generator = engine.fleet.instances[-1]
        await engine.update_weights(STEP_7, "7")
        assert await generator.call("weight_version") == "7"
        with pytest.raises(WeightUpdateError, match="not these"):
            await engine.update_weights(STEP_7, "bad")
        died = anyio.Event()
        generator.when_dead(died.set)
        generator.kill()
        with anyio.fail_after(30):
            await died.wait()
            assert await generator.call("weight_version") == "7"
        assert generator.endpoint.model == "port 4321, weights 7"


async def test_an_engine_says_where_a_trainers_weights_can_go(make_fakes):
    async with make_fakes() as engine:
        assert await engine.weight_takers() == ["http://one:8000", "http://two:8000"]


async def test_weights_that_arrive_while_the_generator_is_away_are_taken(make_fakes):
    async with make_fakes() as engine:
        generator = engine.fleet.instances[-1]
        generator.kill()
        with anyio.fail_after(30):
            await engine.update_weights(STEP_7, "7")
            assert await generator.call("weight_version") == "7"


SENT = TransferWeights(backend="gymrl_gloo", init_info={}, update_info={})


async def test_weights_that_a_trainer_sent_are_not_asked_for_again_after_a_death(make_fakes):
    """It sends once: the new generator takes what vLLM servers by URL still have."""
    async with make_fakes() as engine:
        generator = engine.fleet.instances[-1]
        await engine.update_weights(SENT, "7")
        died = anyio.Event()
        generator.when_dead(died.set)
        generator.kill()
        with anyio.fail_after(30):
            await died.wait()
            assert await generator.call("weight_version") == "7 of before"
            with pytest.raises(ActorDiedError):
                await engine.update_weights(SENT, "deadly")
            assert await generator.call("weight_version") == "7 of before"
            await engine.update_weights(SENT, "8")
            assert await generator.call("weight_version") == "8"


async def test_a_generator_whose_weights_died_with_it_is_not_started_again_and_again(make_fakes):
    async with make_fakes(worker_restarts=5) as engine:
        generator = engine.fleet.instances[-1]
        await engine.update_weights(SENT, "in the engine alone")
        died = anyio.Event()
        generator.when_dead(died.set)
        generator.kill()
        with anyio.fail_after(30):
            await died.wait()
            with pytest.raises(RolloutStreamError, match="they died with it"):
                await generator.call("weight_version")
        assert generator.deaths == 1


async def test_weights_that_kill_every_generator_end_in_an_error(make_fakes):
    async with make_fakes(worker_restarts=1) as engine:
        with anyio.fail_after(30):
            with pytest.raises(RolloutStreamError, match="instance 'the generator' failed"):
                await engine.update_weights(STEP_7, "deadly")


async def test_the_weights_of_somebody_elses_server_are_not_ours(make_engine):
    async with make_engine() as engine:
        with pytest.raises(UnsupportedOptionError, match=r"gym\.base_urls"):
            await engine.update_weights(STEP_7, "7")
