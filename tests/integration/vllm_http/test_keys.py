"""Servers that want a key: it comes from the environment, and is seen nowhere."""

import logging
import os

import pytest
from aiohttp import web

from gymrl.config import GenerationConfig, GymConfig, RolloutConfig, SamplingParams, VllmConfig
from gymrl.errors import ConfigError, GenerationError, GenerationTransportError
from gymrl.generation.vllm_client import VllmClient
from gymrl.gym.listener import Listener, PortRange
from gymrl.records import config_digest

VARIABLE = "GYMRL_TEST_SERVER_KEY"
KEY = "sk-test-0123456789"
PROMPT = [1, 80, 81, 2]
SAMPLING = SamplingParams(max_tokens=3)


@pytest.fixture
def key():
    os.environ[VARIABLE] = f"{KEY}\n"
    yield KEY
    del os.environ[VARIABLE]


async def test_the_key_of_the_environment_opens_every_server(servers, connect, key):
    for server in servers:
        server.key = key
    generator = await connect(*[server.url for server in servers], api_key_env=VARIABLE)
    for _ in range(4):
        assert (await generator.generate(PROMPT, SAMPLING)).token_ids == [42, 287, 200]
    assert generator.out == {}


@pytest.mark.parametrize("value", [None, "", "  \n"])
async def test_a_variable_that_is_not_set_is_told_before_any_call(servers, connect, value):
    servers[0].key = KEY
    if value is not None:
        os.environ[VARIABLE] = value
    try:
        with pytest.raises(ConfigError, match=f"api_key_env='{VARIABLE}': .* not set") as caught:
            await connect(servers[0].url, api_key_env=VARIABLE)
    finally:
        os.environ.pop(VARIABLE, None)
    assert caught.value.setting == "vllm.api_key_env"


async def test_a_key_that_no_header_may_hold_is_refused_without_showing_it(servers, connect):
    os.environ[VARIABLE] = "sk\r\nX-Other: 1"
    try:
        with pytest.raises(ConfigError, match="can't be sent in an HTTP header") as caught:
            await connect(servers[0].url, api_key_env=VARIABLE)
    finally:
        del os.environ[VARIABLE]
    assert "X-Other" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_wants_a_key_is_told_at_once(servers, connect, status):
    servers[1].key = KEY
    servers[1].refusal = status
    with pytest.raises(ConfigError, match=rf"HTTP {status}.*set vllm\.api_key_env") as caught:
        await connect(*[server.url for server in servers])
    assert servers[1].url in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_is_not_taken_is_told_at_once_and_never_shown(
    servers, connect, key, caplog, status
):
    caplog.set_level(logging.DEBUG)
    servers[0].key = "another"
    servers[0].refusal = status
    with pytest.raises(ConfigError, match=rf"{VARIABLE} \(vllm\.api_key_env\)") as caught:
        await connect(servers[0].url, api_key_env=VARIABLE)
    assert "Unauthorized: Bearer (the key)" in str(caught.value)
    assert key not in f"{caught.value}{caught.value.__cause__!r}{caplog.text}"


async def test_a_key_that_is_withdrawn_takes_the_server_out_and_says_why(
    servers, connect, key, caplog
):
    for server in servers:
        server.key = key
    generator = await connect(*[s.url for s in servers], api_key_env=VARIABLE, probe_interval_s=60)
    servers[0].key = "another"
    for _ in range(4):
        assert (await generator.generate(PROMPT, SAMPLING)).token_ids == [42, 287, 200]
    assert list(generator.out) == [servers[0].url]
    assert "HTTP 401" in generator.out[servers[0].url]
    servers[1].key = "another"
    with pytest.raises(GenerationTransportError, match="HTTP 401"):
        await generator.generate(PROMPT, SAMPLING)
    assert key not in f"{generator.out}{caplog.text}"


@pytest.mark.parametrize("pasted", ["sk-test-0123", "two words", "", "1ST"])
def test_a_key_in_place_of_a_variables_name_is_refused_without_showing_it(pasted):
    with pytest.raises(ConfigError, match="name of an environment variable") as caught:
        VllmConfig(api_key_env=pasted)
    assert not pasted or pasted not in str(caught.value)


def test_what_is_recorded_of_a_run_holds_the_variables_name_alone(key):
    vllm = VllmConfig(base_urls=("http://127.0.0.1:1",), api_key_env=VARIABLE)
    config = RolloutConfig(
        generation=GenerationConfig(model="m", backend="vllm", vllm=vllm), gym=GymConfig()
    )
    assert VARIABLE in repr(config)
    assert key not in f"{config!r}{config.to_dict()}{config_digest(config)}"


@pytest.mark.parametrize("padding", range(470, 500, 5))
async def test_not_even_the_beginning_of_a_key_is_shown_where_an_answer_is_cut(key, padding):
    async def refuse(_):
        return web.Response(status=500, body=b"x" * padding + key.encode() + b"y" * 500)

    async def break_off(_):
        return web.Response(
            body=b'data: {"error": {"message": "no such key: %b"}}\n\n' % key.encode()
        )

    app = web.Application()
    app.router.add_get("/health", refuse)
    app.router.add_post("/v1/completions", break_off)
    listener = Listener(app, PortRange())
    await listener.start()
    client = VllmClient(VARIABLE)
    try:
        with pytest.raises(GenerationTransportError) as refused:
            await client.inspect(listener.url)
        with pytest.raises(GenerationError) as broken:
            async for _ in client.choices(listener.url, "/v1/completions", {"stream": True}):
                pass
    finally:
        await client.close()
        await listener.stop()
    assert "sk-t" not in str(refused.value)
    assert "no such key: (the key)" in str(broken.value)
