import itertools
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from gymrl.actors import spawn
from gymrl.config import GenerationConfig, GymConfig
from gymrl.generation.chat import ChatFormat
from gymrl.generation.ledger import LedgerBook
from gymrl.generation.policy import Policy
from gymrl.generation.server import GenerationServer
from gymrl.generation.transformers import TransformersGenerator
from gymrl.gym.service import GymService
from gymrl.testing import build_tiny_model, build_tiny_tokenizer
from gymrl.types import Row

torch.set_num_threads(1)


class RecordingGenerator:
    """Passes calls on and remembers what they were given and gave."""

    def __init__(self, generator) -> None:
        self.generator = generator
        self.calls: list[tuple[list[int], list[int], list[float]]] = []

    @property
    def max_model_len(self) -> int:
        return self.generator.max_model_len

    async def generate(self, prompt_ids, sampling, *, on_token=None):
        made = await self.generator.generate(prompt_ids, sampling, on_token=on_token)
        self.calls.append((list(prompt_ids), made.token_ids, made.logprobs))
        return made

    async def close(self) -> None:
        await self.generator.close()


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    return ChatFormat(build_tiny_tokenizer())


@pytest.fixture
def serve(chat):
    @asynccontextmanager
    async def serving(generator, *, port=0, own_chat=None, **book):
        server = GenerationServer(
            Policy(generator, own_chat or chat), port=port, ledgers=LedgerBook(**book)
        )
        base_url = await server.start()
        try:
            yield base_url
        finally:
            await server.close()
            await generator.close()

    return serving


@pytest.fixture
def serve_tiny(tiny_directory, serve):
    @asynccontextmanager
    async def serving(**book):
        config = GenerationConfig(model=str(tiny_directory), max_batch_size=1)
        generator, tokenizer = TransformersGenerator.load(config)
        recording = RecordingGenerator(generator)
        own = ChatFormat(tokenizer, end_ids=tuple(generator.end_ids))
        async with serve(recording, own_chat=own, **book) as base_url:
            yield base_url, recording

    return serving


def agent(entrypoint: str) -> dict:
    """One agent instance, called ``agent``."""
    module, _, name = entrypoint.partition(":")
    block = {"entrypoint": f"{module}:{name}"}
    return {"agent": {"responses_api_agents": {"black_box": block}}}


CHAT_AGENT = agent("tests.integration.ledger.black_box:ChatAgent")


@pytest.fixture
def make_row():
    numbers = itertools.count()

    def make(route="agent", **fields) -> Row:
        index = next(numbers)
        rollout_id = f"run-{index}"
        body = {
            "responses_create_params": {"input": "hi"},
            "_rowidx": index,
            "_ng_rollout_id": rollout_id,
            **fields,
        }
        return Row(
            index=index,
            task_index=index,
            rollout_index=0,
            route=route,
            rollout_id=rollout_id,
            body=json.dumps(body).encode(),
        )

    return make


@pytest.fixture
def gym():
    @asynccontextmanager
    async def running(base_urls, servers=CHAT_AGENT, **config):
        settings = GymConfig(servers=servers, **{"token_source": "ledger", **config})
        async with spawn(GymService, in_process=True, config=settings) as service:
            await service.call("spin_up", list(base_urls), "policy")
            yield service
            await service.call("shutdown")

    return running


@pytest.fixture
def roll_out():
    async def run(service, *rows) -> list:
        results = [result async for result in service.stream("run_rollouts", list(rows))]
        return [result.outcome for result in sorted(results, key=lambda result: result.index)]

    return run
