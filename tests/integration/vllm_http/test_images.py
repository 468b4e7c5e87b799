"""Images for servers by URL: what is sent, and what is made of the answer."""

import pytest
from aiohttp import web

from gymrl.config import MediaConfig, SamplingParams
from gymrl.errors import GenerationRequestError, MediaError
from gymrl.generation.images import PixelCache, PromptImages
from gymrl.media import inspect_image
from gymrl.testing import build_image
from tests.integration.vllm_http.fake_vllm import FakeVllm

IMAGE = inspect_image(build_image(56, 28), MediaConfig())
PROMPT = [1, 80, 81, 81, 82, 2]
"""With an image of two tokens, 81, between 80 and 82."""

SHOWN = PromptImages([IMAGE], [(1, 5)], (80, 81, 82), PixelCache())


def answering(prompt_token_ids):
    async def answer(request: web.Request) -> web.Response:
        logprobs = {"content": [{"token_id": 7, "logprob": -0.5}]}
        choice = {"token_ids": [7], "finish_reason": "length", "logprobs": logprobs}
        return web.json_response({"choices": [choice], "prompt_token_ids": prompt_token_ids})

    return answer


async def test_a_server_gets_the_placeholder_and_the_file(servers, connect):
    server = servers[0]
    server.behave = answering(PROMPT)
    generator = await connect(server.url)
    made = await generator.generate_with_images(PROMPT, SHOWN, SamplingParams(max_tokens=1))
    assert made.token_ids == [7]

    (body,) = server.requests
    assert body["token_ids"] == [1, 80, 81, 82, 2]
    (part,) = body["content_parts"]
    assert part["uuid"] == IMAGE.digest
    assert part["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    ("engine_ids", "says"),
    [
        ([1, 80, 81, 81, 81, 82, 2], "7 tokens in all instead of 6, .* differs at 4"),
        (None, "0 tok"),
    ],
    ids=["another region", "nothing"],
)
async def test_a_server_that_makes_other_tokens_of_an_image_fails_the_call(
    servers, connect, engine_ids, says
):
    servers[0].behave = answering(engine_ids)
    generator = await connect(servers[0].url)
    with pytest.raises(MediaError, match=says):
        await generator.generate_with_images(PROMPT, SHOWN, SamplingParams(max_tokens=1))


async def test_servers_without_the_route_for_tokens_get_no_images(servers, connect):
    completions = FakeVllm(has_route_for_tokens=False)
    await completions.start()
    try:
        servers[0].behave = answering(PROMPT)
        both = await connect(completions.url, servers[0].url)
        for _ in range(4):
            await both.generate_with_images(PROMPT, SHOWN, SamplingParams(max_tokens=1))
        assert completions.requests == []

        alone = await connect(completions.url)
        with pytest.raises(GenerationRequestError, match="--enable-scale-out"):
            await alone.generate_with_images(PROMPT, SHOWN, SamplingParams(max_tokens=1))
    finally:
        await completions.close()
