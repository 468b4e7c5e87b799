"""What goes wrong between gymrl and vLLM servers, and what it is called."""

import anyio
import pytest
from aiohttp import web

from gymrl.concurrency import gather_bounded
from gymrl.config import SamplingParams
from gymrl.errors import (
    BadLogprobsError,
    ConfigError,
    ContextOverflowError,
    DeadlineExceeded,
    GenerationError,
    GenerationRequestError,
    GenerationTransportError,
)
from gymrl.generation.base import WeightSpan
from gymrl.gym.listener import Listener, PortRange
from tests.integration.vllm_http.fake_vllm import FakeVllm, recorded

PROMPT = [1, 80, 81, 2]
SAMPLING = SamplingParams(max_tokens=3, seed=-1)
TOKENS = [42, 287, 200]
LOGPROBS = [-3.377337694168091, -3.2084767818450928, -2.656907320022583]


async def until(condition, seconds: float = 40) -> None:
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - the other side is a server
            await anyio.sleep(0.01)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_recorded_answers_are_read_exactly(servers, connect, is_streamed):
    generator = await connect(servers[0].url + "/v1/")
    told = []
    on_token = (lambda *token: told.append(token)) if is_streamed else None
    result = await generator.generate(PROMPT, SAMPLING, on_token=on_token)
    assert result.token_ids == TOKENS
    assert result.logprobs == LOGPROBS
    assert result.finish_reason == "length"
    assert result.weight_versions == [WeightSpan("default", 0, 3)]
    assert generator.weight_version == "default"
    assert told == (list(zip(TOKENS, LOGPROBS, strict=True)) if is_streamed else [])


async def test_every_parameter_is_named_so_that_the_servers_defaults_have_no_say(servers, connect):
    generator = await connect(servers[0].url)
    await generator.generate(PROMPT, SamplingParams(seed=-1, top_k=5, stop=("x",)))
    (request,) = servers[0].requests
    assert request["token_ids"] == PROMPT
    assert request["sampling_params"] == {
        "max_tokens": 1024 - 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [2],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs": 0,
        "stop": ["x"],
        "seed": (1 << 63) - 1,
    }


async def test_a_server_without_the_route_for_tokens_is_asked_for_completions(connect):
    fake = FakeVllm(has_route_for_tokens=False)
    await fake.start()
    try:
        generator = await connect(fake.url)
        result = await generator.generate(PROMPT, SAMPLING)
        assert (result.token_ids, result.logprobs) == (TOKENS, LOGPROBS)
        assert result.weight_versions == []
        assert fake.requests[0]["prompt"] == PROMPT
        assert fake.requests[0]["return_token_ids"] is True
    finally:
        await fake.close()


async def refuse(request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "no room"}}, status=503)


async def test_a_refused_call_goes_to_another_server(servers, connect):
    generator = await connect(*(fake.url for fake in servers))
    servers[0].behave = servers[1].behave = refuse
    with pytest.raises(
        GenerationTransportError, match=r"no vLLM server can take the call.*no room"
    ):
        await generator.generate(PROMPT, SAMPLING)
    await until(lambda: not generator.out)

    servers[1].behave = None
    results = await gather_bounded(lambda _: generator.generate(PROMPT, SAMPLING), range(4))
    assert [result.token_ids for result in results] == [TOKENS] * 4


async def test_a_busy_server_stays_in(servers, connect):
    async def busy(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "queue is full"}}, status=429)

    servers[0].behave = busy
    generator = await connect(*(fake.url for fake in servers))
    for _ in range(3):
        assert (await generator.generate(PROMPT, SAMPLING)).token_ids == TOKENS
    assert generator.out == {}
    assert len(servers[1].requests) == 3


async def test_a_call_that_breaks_off_is_not_sampled_again(servers, connect):
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        await response.write(recorded("generate_stream.txt").partition(b"\n\n")[0] + b"\n\n")
        request.transport.abort()
        return response

    for fake in servers:
        fake.behave = break_off
    generator = await connect(*(fake.url for fake in servers))
    told = []
    with pytest.raises(GenerationTransportError) as caught:
        await generator.generate(
            PROMPT, SAMPLING, on_token=lambda token_id, _: told.append(token_id)
        )
    assert told == TOKENS[:1]
    assert caught.value.url in {fake.url for fake in servers}
    assert sum(len(fake.requests) for fake in servers) == 1


async def test_a_stream_that_ends_early_without_a_fault_is_one(servers, connect):
    async def end(request: web.Request) -> web.Response:
        first = recorded("generate_stream.txt").partition(b"\n\n")[0]
        return web.Response(body=first + b"\n\n", content_type="text/event-stream")

    servers[0].behave = end
    generator = await connect(servers[0].url)
    with pytest.raises(GenerationTransportError, match="after 1 tokens, before the generation"):
        await generator.generate(PROMPT, SAMPLING, on_token=lambda *_: None)


async def test_an_error_in_the_middle_of_a_stream_is_raised(servers, connect):
    async def fail(request: web.Request) -> web.Response:
        body = b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}\n\n'
        return web.Response(body=body, content_type="text/event-stream")

    servers[0].behave = fail
    generator = await connect(servers[0].url)
    with pytest.raises(GenerationTransportError, match="EngineCore encountered an issue"):
        await generator.generate(PROMPT, SAMPLING, on_token=lambda *_: None)


async def test_a_failed_call_does_not_take_a_healthy_server_out(servers, connect):
    """NVIDIA-NeMo/RL#2962: HTTP 500 for one bad generation must not end the others."""

    async def fail(request: web.Request) -> web.Response:
        message = "Out of range float values are not JSON compliant: nan"
        return web.json_response({"error": {"message": message}}, status=500)

    servers[0].behave = fail
    generator = await connect(servers[0].url)
    with pytest.raises(GenerationTransportError, match="not JSON compliant") as caught:
        await generator.generate(PROMPT, SAMPLING)
    assert caught.value.status == 500
    servers[0].behave = None
    assert (await generator.generate(PROMPT, SAMPLING)).token_ids == TOKENS


async def test_a_server_whose_engine_died_is_left_out_until_it_is_well(servers, connect):
    async def fail(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "engine is dead"}}, status=500)

    generator = await connect(*(fake.url for fake in servers))
    servers[0].behave, servers[0].healthy = fail, False
    failures = 0
    for _ in range(6):
        try:
            await generator.generate(PROMPT, SAMPLING)
        except GenerationTransportError:
            failures += 1
    assert failures == 1
    assert list(generator.out) == [servers[0].url]
    servers[0].behave, servers[0].healthy = None, True
    await until(lambda: not generator.out)


async def test_a_server_that_stops_and_starts_again_is_taken_back(servers, connect):
    generator = await connect(*(fake.url for fake in servers))
    await servers[0].stop()
    results = await gather_bounded(lambda _: generator.generate(PROMPT, SAMPLING), range(4))
    assert [result.token_ids for result in results] == [TOKENS] * 4
    assert list(generator.out) == [servers[0].url]
    await servers[0].start()
    await until(lambda: not generator.out)


@pytest.mark.parametrize("value", [b"null", b"NaN", b"Infinity"])
async def test_a_log_probability_that_is_no_number_is_an_error(servers, connect, value):
    """NVIDIA-NeMo/RL#4080: never a 0, never an endless loop."""

    async def spoil(request: web.Request) -> web.Response:
        body = recorded("generate.json").replace(b"-3.2084767818450928", value)
        return web.Response(body=body, content_type="application/json")

    servers[0].behave = spoil
    generator = await connect(servers[0].url)
    kind = BadLogprobsError if value == b"null" else GenerationTransportError
    with pytest.raises(kind):
        await generator.generate(PROMPT, SAMPLING)


async def test_fewer_log_probabilities_than_tokens_are_an_error(servers, connect):
    async def spoil(request: web.Request) -> web.Response:
        choice = {
            "token_ids": [5, 6, 7],
            "finish_reason": "stop",
            "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}]},
        }
        return web.json_response({"choices": [choice]})

    servers[0].behave = spoil
    generator = await connect(servers[0].url)
    with pytest.raises(BadLogprobsError, match="2 log-probabilities for 3 tokens"):
        await generator.generate(PROMPT, SAMPLING)


async def test_an_empty_generation_is_an_error(servers, connect):
    """vllm-project/vllm#525: no token, and yet ``length``."""

    async def empty(request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"token_ids": [], "finish_reason": "length"}]})

    servers[0].behave = empty
    generator = await connect(servers[0].url)
    with pytest.raises(GenerationError, match="without a token"):
        await generator.generate(PROMPT, SAMPLING)


async def test_a_request_that_vllm_refuses_is_the_requests_fault(servers, connect):
    async def refuse_it(request: web.Request) -> web.Response:
        return web.json_response(
            {"error": {"message": "token id 9999 is out of vocabulary"}}, status=400
        )

    servers[0].behave = refuse_it
    generator = await connect(servers[0].url)
    with pytest.raises(GenerationRequestError, match="9999 is out of vocabulary"):
        await generator.generate(PROMPT, SAMPLING)
    assert generator.out == {}


async def test_a_shorter_context_than_the_servers_is_kept_and_a_longer_one_refused(
    servers, connect
):
    """`max_model_len` was ignored for servers by URL."""
    own = (await connect(servers[0].url)).max_model_len
    generator = await connect(servers[0].url, max_model_len=5)
    assert generator.max_model_len == 5 < own
    await generator.generate(PROMPT, SAMPLING)
    assert servers[0].requests[-1]["sampling_params"]["max_tokens"] == 1
    with pytest.raises(ContextOverflowError, match="context length is 5 tokens"):
        await generator.generate([*PROMPT, 5], SAMPLING)
    with pytest.raises(ConfigError, match=f"have a context of {own} tokens"):
        await connect(servers[0].url, max_model_len=own + 1)


async def test_a_call_has_a_deadline_that_names_its_setting(servers, connect):
    async def sleep(request: web.Request) -> web.Response:
        await anyio.sleep(30)
        return web.Response()

    servers[0].behave = sleep
    generator = await connect(servers[0].url, request_timeout_s=0.05)
    with pytest.raises(DeadlineExceeded) as caught:
        await generator.generate(PROMPT, SAMPLING)
    assert caught.value.setting == "vllm.request_timeout_s"
    assert set(generator.in_flight.values()) == {0}


async def test_when_no_server_answers_the_error_names_each(servers, connect):
    urls = [fake.url for fake in servers]
    for fake in servers:
        await fake.stop()
    with pytest.raises(GenerationTransportError) as caught:
        await connect(*urls)
    assert all(f"{url} can't be reached" in str(caught.value) for url in urls)


async def test_something_that_is_no_vllm_server_is_said_to_be_none(connect):
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    app = web.Application()
    for path in ("/health", "/v1/models"):
        app.router.add_get(path, page)
    listener = Listener(app, PortRange())
    await listener.start()
    try:
        with pytest.raises(GenerationTransportError, match="is no vLLM server"):
            await connect(listener.url)
    finally:
        await listener.stop()


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ((), "name one server or more"),
        (("http://a", "http://a/v1"), "each once"),
        (("a:8000",), "is no address of a server"),
    ],
)
async def test_urls_are_checked(connect, urls, said):
    with pytest.raises(ConfigError, match=said):
        await connect(*urls)
