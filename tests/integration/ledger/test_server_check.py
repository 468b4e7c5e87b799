from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from gymrl.addresses import bound_socket
from gymrl.config import GenerationConfig
from gymrl.errors import GenerationTransportError
from gymrl.generation.chat import ChatFormat
from gymrl.generation.findings import would_break
from gymrl.generation.server_check import check_server
from gymrl.generation.transformers import TransformersGenerator
from gymrl.gym.listener import Listener, PortRange
from tests.integration.ledger.conftest import RecordingGenerator


async def found(base_url, model=None) -> dict[str, tuple[str, str]]:
    findings = await check_server(base_url, model)
    return {finding.check: (finding.severity, finding.found) for finding in findings}


@pytest.mark.parametrize(
    ("mode", "severity", "said"), [("processed", "ok", "processed"), ("raw", "warn", "raw")]
)
async def test_a_server_of_ours_is_measured(tiny_directory, serve, mode, severity, said):
    config = GenerationConfig(model=str(tiny_directory), logprobs_mode=mode, max_batch_size=8)
    generator, tokenizer = TransformersGenerator.load(config)
    own = ChatFormat(tokenizer, end_ids=tuple(generator.end_ids))
    async with serve(RecordingGenerator(generator), own_chat=own) as base_url:
        checks = await found(base_url)
    assert checks["log-probabilities"][0] == severity
    assert checks["log-probabilities"][1].startswith(said)
    assert checks["models"] == ("ok", "policy")
    assert checks["context"] == ("ok", "2048 tokens")
    assert checks["responses"][0] == checks["chat completions"][0] == "ok"
    assert checks["token ledger"] == ("ok", "kept, up to 256 MiB")
    assert checks["connections"][0] == "ok"


@asynccontextmanager
async def pretending(routes):
    """A server that answers each path with the same JSON."""
    app = web.Application()

    def answering(value):
        async def answer(_: web.Request) -> web.Response:
            return web.Response(body=msgspec.json.encode(value), content_type="application/json")

        return answer

    for path, value in routes.items():
        app.router.add_route("*", path, answering(value))
    listener = Listener(app, PortRange())
    await listener.start()
    try:
        yield f"{listener.url}/v1"
    finally:
        await listener.stop()


MODELS = {"data": [{"id": "theirs"}]}
TEXT_ITEM = {"type": "message", "content": [{"type": "output_text", "text": "yes"}]}
CHOICE = {"message": {"role": "assistant", "content": "yes"}, "logprobs": None}


async def test_a_server_without_token_ids_would_break_a_run():
    routes = {
        "/v1/models": MODELS,
        "/v1/responses": {"output": [TEXT_ITEM]},
        "/v1/chat/completions": {"choices": [CHOICE]},
    }
    async with pretending(routes) as base_url:
        findings = await check_server(base_url)
    by_check = {finding.check: finding for finding in findings}
    assert would_break(findings)
    assert "prompt_token_ids" in by_check["responses"].found
    assert by_check["chat completions"].severity == "break"
    assert by_check["log-probabilities"].severity == "warn"
    assert by_check["token ledger"].severity == "note"
    assert by_check["context"].severity == "note"


async def test_token_ids_without_the_prompts_would_break_gyms_model_server():
    routes = {
        "/v1/models": MODELS,
        "/v1/responses": {"output": []},
        "/v1/chat/completions": {"choices": [{**CHOICE, "token_ids": [1]}]},
    }
    async with pretending(routes) as base_url:
        checks = await found(base_url, "another")
    assert checks["chat completions"][0] == "break"
    assert checks["models"] == ("warn", "'another' is not among those listed (theirs)")
    assert checks["responses"][0] == "warn"


async def test_a_server_that_lists_no_model_would_break_a_run():
    async with pretending({"/v1/models": {"detail": "no"}}) as base_url:
        checks = await found(base_url)
    assert checks["models"][0] == "break"


async def test_a_server_that_samples_for_no_such_model_would_break_a_run():
    async with pretending({"/v1/models": MODELS}) as base_url:
        checks = await found(base_url, "another")
    severity, said = checks["answers"]
    assert severity == "break"
    assert "'another'" in said


async def test_a_server_that_is_not_there_is_an_error_that_names_the_url():
    with bound_socket("127.0.0.1", 0) as silent:
        base_url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(GenerationTransportError, match=f"{base_url}/models"):
            await check_server(base_url)
