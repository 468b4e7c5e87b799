"""Materialized tasks in the engine, over an environment server on a real socket."""

import pytest
import yaml
from aiohttp import web

from gymrl.config import GymConfig, RolloutConfig
from gymrl.errors import RowValueError
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.publication import split_address
from gymrl.rollout.engine import RolloutEngine
from gymrl.testing.gym_server import gym_answer


class EnvironmentServer:
    """Takes the taskset ``sums``; is its own registry."""

    def __init__(self, answer):
        self._answer = answer
        self.bodies = []
        app = web.Application()
        app.router.add_get("/", self._alive)
        app.router.add_get("/readyz", self._alive)
        app.router.add_get("/global_config_dict_yaml", self._config)
        app.router.add_post("/run", self._run)
        self._listener = Listener(app, PortRange())

    async def _alive(self, _):
        return web.json_response({"status": "ok"})

    async def _config(self, _):
        host, port = split_address(self._listener.url)
        block = {"entrypoint": "app.py", "host": host, "port": port}
        config = {
            "sums_environment": {"environment_servers": {"single_agent_turn": block}},
            "environment_server_routes": {"sums": "sums_environment"},
        }
        return web.json_response(yaml.safe_dump(config))

    async def _run(self, request):
        body = await request.json()
        self.bodies.append(body)
        identity = {"episode_id": body["episode_id"], "task_id": body["task"]["task_id"]}
        return web.json_response({**identity, **self._answer(body)})

    @property
    def engine(self):
        gym = GymConfig(registry_url=self._listener.url)
        return RolloutEngine(
            RolloutConfig(gym=gym, in_process=True, failure_policy="mask", retry_delay_s=0.01)
        )

    async def __aenter__(self):
        await self._listener.start()
        return self

    async def __aexit__(self, *_):
        await self._listener.stop()


def task(name, taskset="sums"):
    params = {"input": f"what is {name}?"}
    return {
        "task_id": {"taskset": taskset, "task_id": name},
        "task_input": {"task_id": name, "responses_create_params": params},
    }


async def test_episodes_are_trajectories_like_any_others():
    def solved(body):
        reward = 1.0 if body["task"]["task_id"]["task_id"] == "1+1" else 0.25
        return {"result": gym_answer([([1, 2], [3]), ([1, 2, 3, 4], [5])], reward=reward)}

    async with EnvironmentServer(solved) as server, server.engine as engine:
        assert engine.routes == ("taskset:sums",)
        groups = await engine.run([task("1+1"), task("2+2")], num_generations=2)
    for group, reward in zip(groups, (1.0, 0.25), strict=True):
        for trajectory in group.trajectories:
            assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5]
            assert trajectory.agent == "sums_environment"
            assert trajectory.reward.total == reward
    ids = [body["episode_id"]["rollout_id"] for body in server.bodies]
    assert len(set(ids)) == 4
    asked = server.bodies[0]["task"]["task_input"]
    assert set(asked) == {"task_id", "responses_create_params"}
    assert asked["responses_create_params"]["temperature"] == 1.0


async def test_an_episode_that_failed_is_tried_again_and_then_a_failure_and_no_reward():
    failure = {"failure_reason": "no sandbox", "terminal": True, "stage": "seed"}
    async with (
        EnvironmentServer(lambda _: {"failure": failure}) as server,
        server.engine as engine,
    ):
        [group] = await engine.run([task("1+1")])
    [failed] = group.failures
    assert "no sandbox" in failed.message
    assert failed.agent == "sums_environment"
    ids = [body["episode_id"]["rollout_id"] for body in server.bodies]
    assert len(ids) == len(set(ids)) == failed.attempts


async def test_a_taskset_that_nobody_takes_is_refused_before_any_row():
    async with EnvironmentServer(None) as server, server.engine as engine:
        with pytest.raises(RowValueError, match=r"nothing here is called 'taskset:products'"):
            await engine.run([task("1+1", taskset="products")])
    assert server.bodies == []
