"""The engine's process: its death, its parent's death, and engines in workers side by side."""

import os
import signal
import subprocess
import sys

import aiohttp
import anyio
import anyio.to_thread
import psutil
import pytest
import pytest_asyncio

import gymrl
from gymrl.concurrency import gather_bounded
from gymrl.config import SamplingParams
from gymrl.errors import ConfigError, GenerationError, GeneratorDiedError, WeightUpdateError
from gymrl.generation.service import GenerationService
from gymrl.generation.weights import DirectoryWeights, TensorWeights
from tests.integration.vllm.engines import PROMPT, ask_for_ever, engine_config

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


def engine_of(process: int) -> psutil.Process:
    """The one child that is a vLLM engine: it has its title, or is a plain fork of its parent.

    Titles are not to be relied on: a process whose environment has grown has no room for one.
    """
    parent = psutil.Process(process)
    (engine,) = [
        child
        for child in parent.children()
        if "Engine" in child.name() or child.cmdline() == parent.cmdline()
    ]
    return engine


async def test_calls_of_an_engine_that_dies_fail_with_a_type_and_others_go_on(models):
    from gymrl.generation.vllm import VllmGenerator

    doomed, _ = await anyio.to_thread.run_sync(VllmGenerator.load, engine_config(models.first))
    engine = engine_of(os.getpid())
    other, _ = await anyio.to_thread.run_sync(VllmGenerator.load, engine_config(models.first))
    try:
        long = SamplingParams(max_tokens=500, ignore_eos=True)
        started = anyio.Event()
        failures = []

        async def ask(_):
            with pytest.raises(GeneratorDiedError, match="ended") as caught:
                await ask_for_ever(doomed, long, lambda *_: started.set())
            failures.append(caught.value)

        survived = []

        async def ask_other():
            survived.append(await other.generate(PROMPT, long))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(ask_other)
                for index in range(3):
                    group.start_soon(ask, index)
                await started.wait()
                engine.kill()
        assert [failure.model for failure in failures] == [models.first] * 3
        assert len(survived[0].token_ids) == 500
        assert not doomed.is_running
        with pytest.raises(GeneratorDiedError):
            await doomed.generate(PROMPT, long)
        with pytest.raises(WeightUpdateError) as caught:
            await doomed.update_weights(DirectoryWeights(path=models.second), "1")
        assert caught.value.serving is None
    finally:
        await doomed.close()
        await other.close()


ORPHAN = """
import sys, time
from gymrl.generation.vllm import VllmGenerator
from tests.integration.vllm.engines import engine_config
if __name__ == "__main__":
    generator, _ = VllmGenerator.load(engine_config(sys.argv[1]))
    print("loaded", flush=True)
    time.sleep(50)
"""


def engine_after_its_parent(model: str) -> psutil.Process:
    """The engine of a process that loaded it and was then killed; it has had time to end."""
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, model],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.getcwd()},
    )
    with parent:
        # vLLM's own words may stand before it on the line.
        assert any("loaded" in line for line in iter(parent.stdout.readline, ""))
        engine = engine_of(parent.pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        psutil.wait_procs([engine], timeout=60)
        return engine


async def test_an_engine_ends_when_its_process_is_killed(models):
    """vllm-project/vllm#55510: the engine lived on, with another parent."""
    engine = await anyio.to_thread.run_sync(engine_after_its_parent, models.first)
    assert not engine.is_running()


async def ask_over_http(base_url: str, sampling: dict) -> dict:
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "hello world"}],
        "logprobs": True,
        "return_token_ids": True,
        **sampling,
    }
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{base_url}/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(models):
    """Two workers with an engine each; the second one's was only just begun to be loaded."""
    config = engine_config(models.first)
    deferred = engine_config(models.first, defer_loading=True)
    async with (
        gymrl.spawn(GenerationService, config=config) as one,
        gymrl.spawn(GenerationService, config=deferred) as two,
    ):
        yield one, two


async def test_the_url_is_given_out_before_the_model_is_there(workers):
    _, deferred = workers
    endpoint = await deferred.call("start")
    assert endpoint.max_model_len == 512
    root = endpoint.base_url.removesuffix("/v1")
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{root}/health") as response:
            assert response.status == 503
            assert "still being loaded" in await response.text()
        async with session.post(
            f"{endpoint.base_url}/chat/completions",
            json={"model": "policy", "messages": [{"role": "user", "content": "hello"}]},
        ) as response:
            assert response.status == 503
        await deferred.call("health_check")
        await deferred.call("wait_ready")
        async with session.get(f"{root}/health") as response:
            assert response.status == 200
    answer = await ask_over_http(endpoint.base_url, {"max_tokens": 4})
    assert answer["choices"][0]["token_ids"]
    connections = engine_of(deferred.pid).net_connections("tcp")
    listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    # Or the port would outlive the worker.
    assert int(root.rpartition(":")[2]) not in listening


async def test_workers_side_by_side_serve_the_same_model_until_one_gets_new_weights(
    workers, second
):
    one, two = workers
    endpoints = await gather_bounded(lambda worker: worker.call("start"), [one, two])
    await two.call("wait_ready")
    sampling = {"max_tokens": 24, "seed": 3, "temperature": 1.0}
    answers = await gather_bounded(
        lambda endpoint: ask_over_http(endpoint.base_url, sampling), endpoints
    )
    before = [answer["choices"][0]["token_ids"] for answer in answers]
    assert before[0] == before[1]

    # As tensors, through the handle.
    weights = TensorWeights.of(second.model.state_dict())
    await one.call("update_weights", source=weights, version="9")
    assert await one.call("weight_version") == "9"
    answers = await gather_bounded(
        lambda endpoint: ask_over_http(endpoint.base_url, sampling), endpoints
    )
    after = [answer["choices"][0]["token_ids"] for answer in answers]
    assert after[1] == before[1]
    assert after[0] != before[0]


async def test_a_worker_whose_engine_died_is_not_healthy(workers):
    _, doomed = workers
    await doomed.call("wait_ready")
    engine_of(doomed.pid).kill()

    async def watch() -> None:
        while True:
            await doomed.call("health_check")
            await anyio.sleep(0.05)

    with anyio.fail_after(30), pytest.raises(GenerationError, match="has ended"):
        await watch()
    endpoint = await doomed.call("start")
    async with aiohttp.ClientSession() as session:
        async with session.get(endpoint.base_url.replace("/v1", "/health")) as response:
            assert response.status == 503


async def test_a_model_that_vllm_cannot_run_is_refused_with_its_name(tmp_path):
    from gymrl.generation.vllm import VllmGenerator

    with pytest.raises(ConfigError, match="no such directory"):
        VllmGenerator.load(engine_config(str(tmp_path / "absent")))


async def test_settings_that_vllm_refuses_are_named(models):
    from gymrl.config import VllmConfig
    from gymrl.generation.vllm import VllmGenerator

    bad = VllmConfig(engine_args={"no_such_setting": 1})
    with pytest.raises(ConfigError, match="no_such_setting"):
        VllmGenerator.load(engine_config(models.first, vllm=bad))
    with pytest.raises((ConfigError, GenerationError), match="max_model_len"):
        VllmGenerator.load(engine_config(models.first, max_model_len=100_000))
