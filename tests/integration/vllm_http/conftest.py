from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gymrl.config import VllmConfig
from gymrl.generation.vllm_http import RemoteVllmGenerator
from tests.integration.vllm_http.fake_vllm import FakeVllm


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[list[FakeVllm]]:
    fakes = [FakeVllm(), FakeVllm()]
    for fake in fakes:
        await fake.start()
    yield fakes
    for fake in fakes:
        await fake.close()


@pytest.fixture
def connect():
    opened: list[RemoteVllmGenerator] = []

    async def connect(*urls: str, max_model_len=None, **settings) -> RemoteVllmGenerator:
        config = VllmConfig(base_urls=urls, **{"probe_interval_s": 0.05, **settings})
        generator = await RemoteVllmGenerator.connect(config, (2,), max_model_len=max_model_len)
        opened.append(generator)
        return opened[-1]

    connect.opened = opened
    return connect


@pytest_asyncio.fixture(autouse=True)
async def _close(connect):
    yield
    for generator in connect.opened:
        await generator.close()
