import anyio
import pytest
import yaml
from aiohttp import web

from gymrl.benchmark import BaseServerConfig, TaskRunner
from gymrl.concurrency import gather_bounded
from gymrl.errors import (
    ConfigError,
    GymRequestError,
    GymTransportError,
    RewardContractError,
    RolloutFailure,
    RolloutInfraFailure,
    RolloutTimeout,
    RowValueError,
    ServerDiedError,
    ServerError,
)
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.publication import split_address
from gymrl.testing.gym_server import FakeGymServer, Fault, gym_answer


def rows(*task_ids, agent="fake_agent"):
    return [
        {
            "task_id": task_id,
            "agent_ref": {"name": agent},
            "responses_create_params": {"input": task_id},
        }
        for task_id in task_ids
    ]


def runner_of(server, *task_ids, agent="fake_agent", **options):
    registry = BaseServerConfig(*split_address(server.url))
    return TaskRunner(rows(*task_ids, agent=agent), registry, **options)


def rewarded(value, **extras):
    return gym_answer([([1, 2], [3])], reward=value, **extras)


async def test_each_repeat_gives_a_reward_and_its_raw_answer():
    def answer(body):
        return rewarded(0.25 * body["_ng_rollout_index"], note=body["_ng_rollout_id"])

    async with FakeGymServer(answer) as server:
        result = await runner_of(server, "a", "b").run_task("b", num_repeats=3, rollout_id="x.1")

    assert result.task_id == "b"
    assert result.rewards == [0.0, 0.25, 0.5]
    assert [raw["note"] for raw in result.results] == ["x.1-r0", "x.1-r1", "x.1-r2"]
    assert result.results[0]["response"]["output"][0]["prompt_token_ids"] == [1, 2]


async def test_a_single_rollout_has_the_id_as_it_is():
    async with FakeGymServer() as server:
        given = rows("a")
        registry = BaseServerConfig(*split_address(server.url))
        await TaskRunner(given, registry).run_task("a", rollout_id="mine")

        assert server.bodies[0]["_ng_rollout_id"] == "mine"
        assert given == rows("a")


async def test_concurrent_calls_of_one_loop_do_not_mix():
    def answer(body):
        return rewarded(float(body["_ng_task_index"]), task=body["task_id"])

    names = [f"t{i}" for i in range(8)]
    async with FakeGymServer(answer, barrier=16) as server:
        runner = runner_of(server, *names)
        results = await gather_bounded(lambda name: runner.run_task(name, num_repeats=2), names)

    assert server.most_in_flight == 16
    assert [r.rewards for r in results] == [[float(i)] * 2 for i in range(8)]
    assert [r.results[1]["task"] for r in results] == names


async def test_the_repeats_of_a_call_share_a_group_id_for_verifiers_that_compare_them():
    def answer(body):
        return rewarded(1.0, group=body.get("_ng_group_id"))

    async with FakeGymServer(answer) as server:
        runner = runner_of(server, "a")
        first, second, alone = [await runner.run_task("a", repeats) for repeats in (2, 2, 1)]

    groups = [{raw["group"] for raw in result.results} for result in (first, second)]
    assert [len(ids) for ids in groups] == [1, 1]
    assert groups[0] != groups[1]
    assert alone.results[0]["group"] is None


async def test_fresh_rollout_ids_differ():
    seen = set()

    def answer(body):
        seen.add(body["_ng_rollout_id"])
        return rewarded(1.0)

    async with FakeGymServer(answer) as server:
        runner = runner_of(server, "a")
        for _ in range(3):
            await runner.run_task("a", num_repeats=2)

    assert len(seen) == 6


async def test_a_rollout_id_in_use_is_refused_and_free_again_after():
    async with FakeGymServer(barrier=2) as server:
        runner = runner_of(server, "a", "b")
        async with anyio.create_task_group() as group:
            group.start_soon(runner.run_task, "a", 1, "same")
            await server.wait_for_requests(1)
            with pytest.raises(ConfigError, match="'same' is in use by another call"):
                await runner.run_task("b", rollout_id="same")
            await runner.run_task("b", rollout_id="other")
        result = await runner.run_task("a", rollout_id="same")

    assert result.rewards == [1.0]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.HTTP_400, GymRequestError),
        (Fault.HTTP_500, GymTransportError),
        (Fault.SHORT_BODY, GymTransportError),
        (Fault.TRUNCATED_JSON, RolloutFailure),
        (Fault.NAN_REWARD, RewardContractError),
    ],
)
async def test_a_failed_rollout_is_a_typed_error_and_never_a_reward(fault, error):
    async with FakeGymServer({1: fault}) as server:
        runner = runner_of(server, "a", "b")
        with pytest.raises(error, match="task 'b', repeat 0: ") as caught:
            await runner.run_task("b")

    assert caught.value.agent == "fake_agent"


async def test_a_failure_that_the_environment_reports_is_no_reward_of_zero():
    answer = rewarded(0.0, _ng_failure_class="sandbox", _ng_failure_message="out of disk")
    async with FakeGymServer({0: answer}) as server:
        with pytest.raises(RolloutFailure, match="reports 'sandbox': out of disk"):
            await runner_of(server, "a").run_task("a")


async def test_one_failed_repeat_fails_the_task_and_cancels_the_others():
    def answer(body):
        return Fault.HTTP_500 if body["_ng_rollout_index"] == 1 else Fault.SILENT

    async with FakeGymServer(answer, barrier=3) as server:
        with pytest.raises(GymTransportError, match="task 'a', repeat 1"):
            await runner_of(server, "a").run_task("a", num_repeats=3)
        await server.wait_until_idle()

    assert server.disconnects == 2


async def test_a_silent_server_is_a_timeout_that_names_the_setting():
    async with FakeGymServer({0: Fault.SILENT}) as server:
        with pytest.raises(RolloutTimeout, match="row_timeout_s"):
            await runner_of(server, "a", row_timeout_s=0.2).run_task("a")


async def test_a_route_that_the_registry_does_not_know_is_refused():
    async with FakeGymServer() as server:
        with pytest.raises(RowValueError, match="cannot resolve route 'nobody'"):
            await runner_of(server, "a", agent="nobody").run_task("a")


async def test_an_agent_that_is_not_there_is_a_transport_error():
    async with FakeGymServer() as server:
        runner = runner_of(server, "a", agent=FakeGymServer.refused_agent)
        with pytest.raises(GymTransportError) as caught:
            await runner.run_task("a")

    assert caught.value.was_sent is False


async def test_a_registry_that_is_not_there_is_a_transport_error_that_names_it():
    async with FakeGymServer() as server:
        runner = runner_of(server, "a")
        url = server.url
    with pytest.raises((GymTransportError, ServerError), match=url):
        await runner.run_task("a")


async def test_leaving_a_call_early_closes_its_connections():
    async with FakeGymServer({0: Fault.SILENT}) as server:
        runner = runner_of(server, "a")
        async with anyio.create_task_group() as group:
            group.start_soon(runner.run_task, "a", 2, "x")
            await server.wait_for_requests(2)
            group.cancel_scope.cancel()
        await server.wait_until_idle()
        assert server.disconnects == 2

        with anyio.move_on_after(0.1):
            await runner.run_task("a", rollout_id="x")


def test_a_runner_serves_one_loop_after_another():
    async def two_loops_worth(results, runner):
        results.append(await runner.run_task("a"))

    results = []

    async def main():
        async with FakeGymServer() as server:
            runner = runner_of(server, "a")
            await two_loops_worth(results, runner)
            await anyio.to_thread.run_sync(anyio.run, two_loops_worth, results, runner)

    anyio.run(main)

    assert [result.rewards for result in results] == [[1.0], [1.0]]


TASK = {"task_id": {"taskset": "sums", "task_id": "a"}, "task_input": {"question": "1+1"}}


class Registry:
    """A registry, and the one server it knows of, at one address."""

    def __init__(self, run):
        self._run = run
        self.bodies = []
        self.death = None
        self.asked = anyio.Event()
        app = web.Application()
        app.router.add_get("/global_config_dict_yaml", self._config)
        app.router.add_get("/readyz", self._ready)
        app.router.add_post("/run", self._attempt)
        self._listener = Listener(app, PortRange())

    @property
    def config(self):
        return BaseServerConfig(*split_address(self._listener.url))

    async def _config(self, _):
        address = {"host": self.config.host, "port": self.config.port}
        agent = {"type": "responses_api_agents", "name": "fake_agent"}
        front = {"entrypoint": "app.py", "agent_server": agent, **address}
        config = {
            "fake_agent": {"responses_api_agents": {"fake": {"entrypoint": "app.py", **address}}},
            "sums_environment": {"environment_servers": {"single_agent_turn": front}},
            "environment_server_routes": {"sums": "sums_environment"},
        }
        return web.json_response(yaml.safe_dump(config))

    async def _ready(self, _):
        status = 200 if self.death is None else 503
        return web.json_response(self.death or {"status": "ok"}, status=status)

    async def _attempt(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.asked.set()
        return await self._run(body)

    async def __aenter__(self):
        await self._listener.start()
        return self

    async def __aexit__(self, *_):
        await self._listener.stop()


async def test_a_materialized_task_goes_to_the_environment_server_of_its_taskset():
    async def run(body):
        answer = {"reward": 0.5, "note": body["episode_id"]["rollout_id"]}
        return web.json_response(
            {"episode_id": body["episode_id"], "task_id": body["task"]["task_id"], "result": answer}
        )

    async with Registry(run) as server:
        runner = TaskRunner([TASK], server.config)
        result = await runner.run_task("a", num_repeats=2, rollout_id="x")

    assert result.rewards == [0.5, 0.5]
    assert [raw["note"] for raw in result.results] == ["x-r0", "x-r1"]
    assert server.bodies[0]["task"] == TASK
    assert server.bodies[0]["episode_id"] == {"rollout_id": "x-r0", "attempt": 0}


async def test_an_episode_that_failed_is_no_reward():
    async def run(body):
        failure = {"failure_reason": "no sandbox", "terminal": False, "failure_kind": "sandbox"}
        return web.json_response({"episode_id": body["episode_id"], "failure": failure})

    async with Registry(run) as server:
        runner = TaskRunner([TASK], server.config)
        with pytest.raises(
            RolloutInfraFailure, match=r"task 'a', repeat 0: .*'sandbox': no sandbox"
        ):
            await runner.run_task("a")


async def test_a_taskset_without_an_environment_server_is_refused():
    other = {"task_id": {"taskset": "products", "task_id": "b"}, "task_input": {}}
    async with Registry(None) as server:
        with pytest.raises(RowValueError, match=r"takes the taskset 'products'.* tasksets: sums"):
            await TaskRunner([other], server.config).run_task("b")


async def test_a_rollout_id_that_environment_servers_keep_for_attempts_is_refused():
    async with Registry(None) as server:
        with pytest.raises(ConfigError, match="'x-a1': environment servers keep the ending"):
            await TaskRunner([TASK], server.config).run_task("a", rollout_id="x-a1")


async def test_a_death_that_the_registry_reports_ends_the_calls_under_way_by_name():
    async def run(_):
        await anyio.sleep_forever()

    died = {
        "status": "died",
        "instance": "judge",
        "message": "server 'judge' was killed by SIGKILL",
    }
    async with Registry(run) as server:
        runner = TaskRunner(rows("a"), server.config)
        await runner.health_check()

        async def kill():
            await server.asked.wait()
            server.death = died

        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            with (
                anyio.fail_after(30),
                pytest.raises(RolloutInfraFailure, match="'judge'") as caught,
            ):
                await runner.run_task("a", num_repeats=2)
        assert caught.value.instance == "judge"
        with pytest.raises(ServerDiedError, match="'judge' was killed by SIGKILL"):
            await runner.health_check()


async def test_a_lost_connection_is_told_as_the_death_behind_it():
    async def run(_):
        server.death = {"status": "died", "instance": "agent", "message": "server 'agent' is gone"}
        raise ConnectionResetError

    async with Registry(run) as server:
        with pytest.raises(RolloutInfraFailure, match="server 'agent' is gone"):
            await TaskRunner(rows("a"), server.config).run_task("a")


async def test_a_registry_that_is_gone_fails_its_health_check():
    async with Registry(None) as server:
        runner = TaskRunner([TASK], server.config)
    with pytest.raises(ServerError, match="the registry is gone"):
        await runner.health_check()
