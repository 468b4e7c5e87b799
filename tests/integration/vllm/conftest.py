"""Real vLLM on tiny models; an engine per test module, in this process."""

import importlib
import os
import time
from pathlib import Path

import anyio.to_thread
import pytest
import pytest_asyncio
import torch

from gymrl.errors import ConfigError
from gymrl.generation.vllm_process import engine_environment, is_cpu_build
from gymrl.testing import build_tiny_model
from tests.integration.vllm.engines import Models, Reference, engine_config
from tests.integration.vllm.servers import KEY, VARIABLE, Servers, get

THIRD_PARTY_WARNINGS = (
    # vLLM looks at every attribute of torch.distributed, a deprecated one included.
    "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
    # vLLM leaves the context of its start-up handshake to the garbage collector.
    "ignore:Unclosed context <zmq:ResourceWarning",
    # The engine is forked from a process that has threads (Python 3.12 and later say so).
    "ignore:This process .* is multi-threaded:DeprecationWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/integration/vllm/" not in item.nodeid:
            continue
        item.add_marker("vllm")
        for warning in THIRD_PARTY_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))


def why_vllm_cannot_run() -> str | None:
    try:
        on_cpu = is_cpu_build()
    except ConfigError as error:
        return str(error)
    if not on_cpu and not Path("/dev/nvidia0").exists():
        return "the vLLM that is installed runs on GPUs, and there is none here"
    os.environ.update(engine_environment(engine_config("any"), on_cpu=on_cpu, environ=os.environ))
    try:
        importlib.import_module("vllm")
    except (ImportError, OSError) as error:
        return f"vLLM can't be imported: {error}"
    return None


@pytest.fixture(scope="session", autouse=True)
def _vllm_can_run():
    reason = why_vllm_cannot_run()
    if reason is not None and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    return Models(
        str(build_tiny_model(root / "first", seed=0)),
        str(build_tiny_model(root / "second", seed=1)),
    )


@pytest.fixture(scope="session")
def first(models) -> Reference:
    return Reference(models.first)


@pytest.fixture(scope="session")
def second(models) -> Reference:
    return Reference(models.second)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def generator(models, _vllm_can_run):
    from gymrl.generation.vllm import VllmGenerator

    generator, _ = await anyio.to_thread.run_sync(VllmGenerator.load, engine_config(models.first))
    try:
        yield generator
    finally:
        await generator.close()


@pytest.fixture(scope="session")
def servers(models, _vllm_can_run):
    """Two, with the route for tokens and without; the second can be told to refuse weights.

    They want the key that the environment variable holds meanwhile, and take weights of a trainer.
    """
    every = f'--api-key {KEY} --weight-transfer-config {{"backend":"gymrl_gloo"}}'
    extension = "--worker-extension-cls tests.integration.vllm.refusing"
    arguments = (
        f"{every} {extension}.TransferExtension --enable-scale-out",
        f"{every} {extension}.RefusingExtension",
    )
    servers = Servers(models.first, arguments)
    os.environ[VARIABLE] = KEY
    try:
        for place in range(2):
            servers.start(place)
        give_up = time.monotonic() + 120
        while not all(get(port, "/health") == b"" for port in servers.ports):
            assert time.monotonic() < give_up, "the servers did not start"
            time.sleep(0.2)
        yield servers
    finally:
        del os.environ[VARIABLE]
        servers.end()
