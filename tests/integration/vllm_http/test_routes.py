"""Routes as vLLM 0.32 writes them: base64 of a ``.npy`` file, no row for the last token."""

import base64
import io
import json

import numpy as np
import pytest
from aiohttp import web

from gymrl.config import SamplingParams, VllmConfig
from gymrl.errors import GenerationError
from gymrl.generation.vllm_http import RemoteVllmGenerator
from tests.integration.vllm_http.fake_vllm import FakeVllm, recorded

PROMPT = [1, 80, 81, 2]
SAMPLING = SamplingParams(max_tokens=3, seed=-1)


def npy(routes: np.ndarray) -> str:
    """As ``vllm.utils.serial_utils.numpy2base64`` does it."""
    file = io.BytesIO()
    np.save(file, routes, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


ROUTES = np.arange(6 * 2 * 2, dtype=np.uint8).reshape(6, 2, 2)
"""Of four prompt tokens and three sampled ones, less the last."""


@pytest.fixture
async def generator():
    opened = []

    async def connect(fake: FakeVllm, dtype: str | None = "int8") -> RemoteVllmGenerator:
        config = VllmConfig(base_urls=(fake.url,))
        opened.append(await RemoteVllmGenerator.connect(config, (2,), routes_dtype=dtype))
        return opened[-1]

    yield connect
    for each in opened:
        await each.close()


def answers(name: str, routed_experts: str):
    """The recorded answer with the field that a server started for routes adds to its choice."""

    async def behave(request: web.Request) -> web.Response:
        body = json.loads(recorded(name))
        body["choices"][0]["routed_experts"] = routed_experts
        return web.json_response(body)

    return behave


@pytest.mark.parametrize(
    ("has_token_route", "recording"), [(True, "generate.json"), (False, "completions_ids.json")]
)
async def test_routes_of_either_route_get_a_row_for_the_last_token(
    generator, has_token_route, recording
):
    fake = FakeVllm(has_route_for_tokens=has_token_route)
    await fake.start()
    try:
        policy = await generator(fake)
        count = len(PROMPT) + len(json.loads(recorded(recording))["choices"][0]["token_ids"]) - 1
        given = np.arange(count * 4, dtype=np.uint8).reshape(count, 2, 2)
        fake.behave = answers(recording, npy(given))
        result = await policy.generate(PROMPT, SAMPLING)
    finally:
        await fake.close()

    assert result.routed_experts.dtype == np.int8
    assert result.routed_experts[:-1].tolist() == given.tolist()
    assert (result.routed_experts[-1] == -1).all()
    assert len(result.routed_experts) == len(PROMPT) + len(result.token_ids)


async def test_routes_of_a_stream_come_with_its_last_chunk(servers, generator):
    policy = await generator(servers[0])

    async def behave(request: web.Request) -> web.Response:
        blocks = recorded("generate_stream.txt").decode().strip().split("\n\n")
        places = [i for i, block in enumerate(blocks) if '"finish_reason":"' in block]
        event = json.loads(blocks[places[-1]].removeprefix("data: "))
        event["choices"][0]["routed_experts"] = npy(ROUTES)
        blocks[places[-1]] = "data: " + json.dumps(event)
        return web.Response(text="\n\n".join(blocks) + "\n\n", content_type="text/event-stream")

    servers[0].behave = behave
    result = await policy.generate(PROMPT, SAMPLING, on_token=lambda *_: None)

    assert result.routed_experts[:-1].tolist() == ROUTES.tolist()


async def test_routes_that_nobody_asked_for_are_left_out(servers, generator):
    policy = await generator(servers[0], None)
    servers[0].behave = answers("generate.json", npy(ROUTES))

    assert (await policy.generate(PROMPT, SAMPLING)).routed_experts is None


async def test_a_server_without_the_switch_gives_an_answer_without_routes(servers, generator):
    policy = await generator(servers[0])

    assert (await policy.generate(PROMPT, SAMPLING)).routed_experts is None


async def test_too_few_rows_are_left_out_with_a_warning_and_never_laid_along_other_tokens(
    servers, generator, caplog
):
    policy = await generator(servers[0])
    servers[0].behave = answers("generate.json", npy(ROUTES[:4]))

    result = await policy.generate(PROMPT, SAMPLING)

    assert result.routed_experts is None
    assert "4 rows of routes for 7 tokens (prompt 4 + generation 3)" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!", "not base64"),
        (npy(ROUTES.astype(np.float32)), "integers are needed"),
        (npy(np.full((6, 1, 1), 200, dtype=np.uint8)), "expert id 200 does not fit int8"),
    ],
)
async def test_routes_that_can_not_be_read_fail_the_call(servers, generator, text, message):
    policy = await generator(servers[0])
    servers[0].behave = answers("generate.json", text)

    with pytest.raises(GenerationError, match="routes that can't be read") as caught:
        await policy.generate(PROMPT, SAMPLING)

    assert message in str(caught.value)
