"""A policy server on a real socket that answers nobody without its key."""

import contextlib
import os

import pytest
from aiohttp import web

from gymrl.gym.listener import Listener, PortRange

KEY = "sk-of-the-policy-server"
WRONG_KEY = "sk-of-somebody-else"
VARIABLE = "GYMRL_TEST_POLICY_KEY"


class KeyedPolicy:
    """Answers ``9``, with tokens, to who sends the key; tells others which key they sent."""

    key = KEY
    wrong_key = WRONG_KEY

    def __init__(self, models=("policy",)):
        self.models = models
        self.headers = []
        self.bodies = []
        self.paths = []
        app = web.Application(middlewares=[self._note_path])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/responses", self._responses)
        self._listener = Listener(app, PortRange())

    @property
    def base_url(self):
        return f"{self._listener.url}/v1"

    async def __aenter__(self):
        await self._listener.start()
        return self

    async def __aexit__(self, *_):
        await self._listener.stop()

    @web.middleware
    async def _note_path(self, request, handler):
        self.paths.append(request.path)
        return await handler(request)

    def _refusal(self, request):
        sent = request.headers.get("Authorization", "")
        self.headers.append(sent)
        if sent == f"Bearer {KEY}":
            return None
        return web.json_response({"error": {"message": f"not a key of mine: {sent}"}}, status=401)

    async def _models(self, request):
        data = [{"id": name, "max_model_len": 64} for name in self.models]
        return self._refusal(request) or web.json_response({"object": "list", "data": data})

    async def _responses(self, request):
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        self.bodies.append(await request.json())
        content = [{"type": "output_text", "text": "9", "annotations": []}]
        message = {
            "type": "message",
            "role": "assistant",
            "content": content,
            "prompt_token_ids": [1, 2],
            "generation_token_ids": [3],
            "generation_log_probs": [-0.5],
        }
        return web.json_response({"id": "r", "output": [message]})


@pytest.fixture
async def keyed_policies():
    """Two of them, that take turns."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(KeyedPolicy()) for _ in range(2)]


@pytest.fixture
def variable():
    """The name of the environment variable that holds the key, as a file's last line would."""
    os.environ[VARIABLE] = f"{KEY}\n"
    yield VARIABLE
    os.environ.pop(VARIABLE, None)


@pytest.fixture
def wrong_variable(variable):
    os.environ[variable] = WRONG_KEY
    return variable
