import contextlib
import json
import socket
import urllib.request

import anyio
import psutil
import pytest
import yaml
from aiohttp import web
from anyio.from_thread import start_blocking_portal

import gymrl
from gymrl.addresses import bound_socket
from gymrl.errors import ConfigError, GymRequestError
from gymrl.gym.client import HttpPool
from gymrl.gym.listener import Listener, PortRange
from gymrl.testing.model_server import ModelCall, ScriptedModelServer

SUMS = {"num_tasks": 2}


def policy(model, **further):
    base_url = model if isinstance(model, str) else model.base_url
    return SUMS | {"policy_base_url": base_url, "policy_model_name": "policy"} | further


def solver(planned):
    answers = {row["entry"]["question"]: row["entry"]["answer"] for row in planned.rows}

    def call(body):
        return ModelCall(text=f"It is {answers[body['input'][0]['content']]}.")

    return call


@pytest.fixture
def child_processes():
    """Those that a test has; other tests may have a browser, say."""
    before = psutil.Process().children(recursive=True)
    return lambda: [p for p in psutil.Process().children(recursive=True) if p not in before]


@contextlib.contextmanager
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@contextlib.contextmanager
def free_port():
    """A port where nobody listens, and that nobody is given meanwhile; one may ask for it."""
    with bound_socket("127.0.0.1", 0) as bound:
        yield bound.getsockname()[1]


class Endpoint:
    """A policy's endpoint that records who asks, and answers as it is told."""

    def __init__(self, status=200, body='{"data": []}', headers=None):
        self.keys = []
        self.answer = {"status": status, "text": body, "headers": headers}
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._any)
        self._listener = Listener(app, PortRange())

    @property
    def base_url(self):
        return f"{self._listener.url}/v1"

    async def _any(self, request):
        self.keys.append(request.headers.get("Authorization"))
        if request.method == "GET" and self.answer["status"] != 401:
            return web.json_response({"data": []})
        return web.Response(**self.answer)

    async def __aenter__(self):
        await self._listener.start()
        return self

    async def __aexit__(self, *_):
        await self._listener.stop()


async def test_a_shipped_benchmark_is_planned_served_and_run(child_processes):
    planned = gymrl.plan_benchmark("chain_sum", overrides=SUMS)
    async with ScriptedModelServer(solver(planned)) as model:
        async with gymrl.serve_benchmark("chain_sum", overrides=policy(model)) as registry_server:
            runner = gymrl.TaskRunner(planned.rows, registry_server)
            for task_id in planned.task_ids():
                result = await runner.run_task(task_id, num_repeats=2)
                assert result.rewards == [1.0, 1.0]
            assert child_processes()
    assert child_processes() == []
    assert [body["model"] for body in model.bodies] == ["policy"] * 4
    assert model.bodies[0]["max_output_tokens"] == 24


def test_a_plain_with_serves_from_code_without_a_loop(child_processes):
    planned = gymrl.plan_benchmark("chain_sum", overrides=SUMS)
    wrong = ScriptedModelServer([ModelCall(text="I do not know.")])
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(wrong) as model:
        with gymrl.serve_benchmark("chain_sum", overrides=policy(model)) as registry_server:
            runner = gymrl.TaskRunner(planned.rows, registry_server)
            result = anyio.run(runner.run_task, planned.task_ids()[0])
    assert result.rewards == [0.0]
    assert result.results[0]["extracted_answer"] is None
    assert child_processes() == []


async def test_the_key_reaches_the_endpoint_and_nobody_else():
    body = '{"error": {"message": "no such model"}}'
    async with Endpoint(404, body) as endpoint:
        planned = gymrl.plan_benchmark("chain_sum", overrides=SUMS)
        overrides = policy(endpoint, policy_api_key="sk-very-secret")
        async with gymrl.serve_benchmark("chain_sum", overrides=overrides) as registry_server:
            published = await anyio.to_thread.run_sync(
                lambda: (
                    urllib.request.urlopen(f"{registry_server.url}/global_config_dict_yaml")
                    .read()
                    .decode()
                )
            )
            runner = gymrl.TaskRunner(planned.rows, registry_server)
            with pytest.raises(GymRequestError, match="no such model"):
                await runner.run_task(planned.task_ids()[0])

    assert set(endpoint.keys) == {"Bearer sk-very-secret"}
    assert "chain_sum_simple_agent" in json.loads(published)
    assert "very-secret" not in published


async def test_an_agent_that_speaks_chat_completions_reaches_the_endpoint_too():
    async with Endpoint(200, '{"choices": []}') as endpoint:
        overrides = policy(endpoint, policy_api_key="sk-very-secret")
        served = gymrl.serve_benchmark("tool_arithmetic", overrides=overrides)
        async with served as registry_server, HttpPool() as pool:
            answer = await pool.get(f"{registry_server.url}/global_config_dict_yaml")
            [base_url] = yaml.safe_load(json.loads(answer.body))["policy_base_url"]
            assert base_url != endpoint.base_url
            answer = await pool.post(f"{base_url}/chat/completions", b'{"messages": []}', {})
    assert (answer.status, answer.body) == (200, b'{"choices": []}')
    assert set(endpoint.keys) == {"Bearer sk-very-secret"}


async def test_the_registry_listens_where_it_was_told():
    async with ScriptedModelServer([ModelCall(text="1")]) as model:
        with free_port() as port:
            overrides = policy(model)
            served = gymrl.serve_benchmark("chain_sum", overrides=overrides, registry_port=port)
            async with served as registry_server:
                assert registry_server == gymrl.BaseServerConfig("127.0.0.1", port)


async def test_a_registry_port_in_use_is_refused_and_nothing_is_left(child_processes):
    async with ScriptedModelServer([ModelCall(text="1")]) as model:
        with taken_port() as port:
            served = gymrl.serve_benchmark("chain_sum", overrides=policy(model), registry_port=port)
            with pytest.raises(ConfigError, match=f"registry_port={port}: the port is in use"):
                async with served:
                    pass
    assert child_processes() == []


async def test_a_model_endpoint_that_does_not_answer_is_refused_after_its_deadline(child_processes):
    with free_port() as port:
        url = f"http://127.0.0.1:{port}/v1"
        overrides = policy(url, model_endpoint_readiness_timeout_seconds=2)
        with pytest.raises(ConfigError, match=r"not ready within 2 s .*/models gave: .*Connect"):
            async with gymrl.serve_benchmark("chain_sum", overrides=overrides):
                pass
    assert child_processes() == []


async def test_a_key_that_the_endpoint_refuses_is_said_at_once():
    async with Endpoint(401, "bad key") as endpoint:
        with pytest.raises(ConfigError, match="refuses the key: HTTP 401: bad key"):
            async with gymrl.serve_benchmark("chain_sum", overrides=policy(endpoint)):
                pass


async def test_a_server_that_does_not_start_is_named(child_processes, tinymath):
    overrides = policy("http://127.0.0.1:1/v1")
    async with Endpoint() as endpoint:
        served = gymrl.serve_benchmark(
            "tinymath",
            overrides=overrides | {"policy_base_url": endpoint.base_url},
            roots=[tinymath.root],
        )
        with pytest.raises(ConfigError, match="instance 'tinymath': entrypoint tinymath_server"):
            async with served:
                pass
    assert child_processes() == []


async def test_an_error_in_the_block_comes_out_as_it_is_and_the_servers_end(child_processes):
    async with ScriptedModelServer([ModelCall(text="1")]) as model:
        with pytest.raises(ZeroDivisionError):
            async with gymrl.serve_benchmark("chain_sum", overrides=policy(model)):
                raise ZeroDivisionError
    assert child_processes() == []


async def test_two_benchmarks_are_served_by_one_process():
    sums = gymrl.plan_benchmark("chain_sum", overrides=SUMS)
    tools = gymrl.plan_benchmark("tool_arithmetic", overrides=SUMS)
    async with ScriptedModelServer([ModelCall(text="0")]) as model:
        overrides = policy(model)
        async with (
            gymrl.serve_benchmark("chain_sum", overrides=overrides) as one,
            gymrl.serve_benchmark("tool_arithmetic", overrides=overrides) as two,
        ):
            first = await gymrl.TaskRunner(sums.rows, one).run_task(sums.task_ids()[0])
            second = await gymrl.TaskRunner(tools.rows, two).run_task(tools.task_ids()[0])
    assert first.task_id.startswith("chain_sum")
    assert second.task_id.startswith("tool_arithmetic")
    assert second.rewards == [0.0]
