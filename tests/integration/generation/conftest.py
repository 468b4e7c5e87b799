import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import torch

from gymrl.config import GenerationConfig
from gymrl.errors import GenerationTransportError
from gymrl.generation.base import Generator
from gymrl.generation.chat import ChatFormat
from gymrl.generation.policy import Policy
from gymrl.generation.server import GenerationServer
from gymrl.generation.transformers import TransformersGenerator
from gymrl.testing import ScriptedGenerator, build_tiny_model, build_tiny_tokenizer

torch.set_num_threads(1)


class BreaksAfterAToken(ScriptedGenerator):
    """Fails in the middle of an answer."""

    async def generate(self, prompt_ids, sampling, *, on_token=None):
        on_token(5, -0.5)
        raise GenerationTransportError("it broke off")


class Client:
    """Posts JSON to a server and gives back status and JSON."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self.session = session
        self.base_url = base_url
        self.root = base_url.removesuffix("/v1")

    async def post(self, path: str, body: Any, *, root: bool = False) -> tuple[int, Any]:
        url = (self.root if root else self.base_url) + path
        # From a file object: aiohttp warns about large bodies that are sent as bytes.
        data = io.BytesIO(body if isinstance(body, bytes) else msgspec.json.encode(body))
        async with self.session.post(url, data=data) as answer:
            return answer.status, await answer.json()

    async def ok(self, path: str, **body: Any) -> Any:
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer


Serve = Callable[..., Any]


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer():
    return build_tiny_tokenizer()


@pytest.fixture
def broken_off() -> ScriptedGenerator:
    return BreaksAfterAToken([])


@pytest.fixture
def serve(tokenizer) -> Serve:
    @asynccontextmanager
    async def serving(
        generator: Generator, *, chat: ChatFormat | None = None, limit: int = 1 << 20, **policy: Any
    ) -> AsyncIterator[Client]:
        server = GenerationServer(
            Policy(generator, chat or ChatFormat(tokenizer), **policy), max_body_bytes=limit
        )
        base_url = await server.start()
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with aiohttp.ClientSession(connector=connector) as session:
                yield Client(session, base_url)
        finally:
            await server.close()
            await generator.close()

    return serving


@pytest.fixture
def serve_tiny(tiny_directory, serve) -> Serve:
    @asynccontextmanager
    async def serving(**settings: Any) -> AsyncIterator[tuple[Client, TransformersGenerator]]:
        config = GenerationConfig(model=str(tiny_directory), **settings)
        generator, tokenizer = TransformersGenerator.load(config)
        chat = ChatFormat.from_config(tokenizer, config, tuple(generator.end_ids))
        async with serve(generator, chat=chat, on_rewrite=config.on_rewrite) as client:
            yield client, generator

    return serving
