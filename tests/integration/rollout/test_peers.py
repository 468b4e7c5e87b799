"""Verifiers that score the attempts at a prompt against each other, and many rows at once."""

import anyio
import pytest

from gymrl.config import GymConfig, RolloutConfig, ShardConfig
from gymrl.rollout.engine import RolloutEngine
from gymrl.testing.gym_server import FakeGymServer
from tests.integration.actors.watching import until


def cohort_agent(size):
    entrypoint = "tests.integration.rollout.servers:CohortAgent"
    return {"responses_api_agents": {"cohort": {"entrypoint": entrypoint, "cohort": size}}}


@pytest.fixture
def roll_out(row):
    """Rows through agents that answer a prompt's attempts when all are in one process."""

    async def run(routes, size, **settings):
        async with FakeGymServer() as policy:
            servers = dict.fromkeys(("math", "code"), cohort_agent(size))
            gym = GymConfig(servers=servers, base_urls=(f"{policy.url}/v1",), row_timeout_s=50)
            async with RolloutEngine(RolloutConfig(gym=gym, **settings)) as engine:
                with anyio.fail_after(50):
                    return await engine.run([row(route) for route in routes], num_generations=size)

    return run


def ranks(groups):
    return [sorted(sample.reward.total for sample in group.samples) for group in groups]


@pytest.mark.parametrize(
    ("num_workers", "prompts"), [(3, 5), (3, 3), (3, 1), (2, 7), (1, 5)], ids=str
)
async def test_a_group_is_scored_by_one_worker_however_uneven_the_shares(
    roll_out, num_workers, prompts
):
    """NVIDIA-NeMo/RL#3372: a group that was split over workers waited for itself."""
    groups = await roll_out(["math"] * prompts, 4, num_workers=num_workers)
    assert ranks(groups) == [[0.0, 1.0, 2.0, 3.0]] * prompts


async def test_a_shard_without_rows_and_one_with_all_of_them(roll_out):
    shards = {"m": ShardConfig(servers=("math",), replicas=2), "c": ShardConfig(servers=("code",))}
    groups = await roll_out(["math"] * 3, 4, shards=shards)
    assert ranks(groups) == [[0.0, 1.0, 2.0, 3.0]] * 3


async def test_a_group_whose_worker_dies_is_scored_whole_elsewhere(row):
    async with FakeGymServer() as policy:
        # The cohort is larger than the group: nobody answers until the worker is gone.
        servers = {"math": cohort_agent(8)}
        gym = GymConfig(servers=servers, base_urls=(f"{policy.url}/v1",), row_timeout_s=50)
        async with RolloutEngine(RolloutConfig(gym=gym, num_workers=2)) as engine:
            groups = []

            async def consume(rows):
                groups.extend(await engine.run(rows, num_generations=4))

            same = {**row("math"), "_ng_task_index": 5}
            with anyio.fail_after(50):
                async with anyio.create_task_group() as tasks:
                    first, second = engine.fleet.instances
                    tasks.start_soon(consume, [same])
                    await until(lambda: first.in_flight == 1)
                    tasks.start_soon(consume, [same])
                    await until(lambda: second.in_flight == 1)
                    first.kill()
    assert sorted(rank for group in ranks(groups) for rank in group) == [float(n) for n in range(8)]


async def test_512_rows_are_under_way_at_once(row):
    """NVIDIA-NeMo/RL#3590: 100 connections, aiohttp's default, held 412 rows back."""
    async with FakeGymServer(barrier=512) as server:
        gym = GymConfig(registry_url=server.url)
        async with RolloutEngine(RolloutConfig(gym=gym, num_workers=2)) as engine:
            with anyio.fail_after(50):
                groups = await engine.run([row("fake_agent") for _ in range(64)], num_generations=8)
        assert server.most_in_flight == 512
    assert sum(len(group.trajectories) for group in groups) == 512
