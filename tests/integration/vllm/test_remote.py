"""Real vLLM servers by URL: two of them, one is killed, and comes back."""

import contextlib
import re

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import pytest
import pytest_asyncio

import gymrl
from gymrl.concurrency import gather_bounded
from gymrl.config import SamplingParams, VllmConfig
from gymrl.errors import (
    ConfigError,
    ContextOverflowError,
    GenerationError,
    GenerationRequestError,
    GenerationTransportError,
    WeightUpdateError,
)
from gymrl.generation.base import Generator
from gymrl.generation.fidelity import MAX_TOLERANCE, MEAN_TOLERANCE
from gymrl.generation.service import GenerationService
from gymrl.generation.vllm_http import RemoteVllmGenerator
from gymrl.generation.weights import DirectoryWeights
from tests.integration.vllm.engines import PROMPT, engine_config, until
from tests.integration.vllm.servers import VARIABLE, free_ports, get

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

END_IDS = (2,)


def by_url(*urls, **settings) -> VllmConfig:
    return VllmConfig(base_urls=urls, api_key_env=VARIABLE, **settings)


@pytest_asyncio.fixture(loop_scope="module")
async def generator(servers):
    config = by_url(*servers.urls, probe_interval_s=0.3)
    generator = await RemoteVllmGenerator.connect(config, END_IDS)
    yield generator
    await generator.close()


@pytest.mark.parametrize("variable", [None, "HOME"], ids=["no key", "another key"])
async def test_servers_that_want_a_key_are_told_at_once(servers, variable):
    config = VllmConfig(base_urls=servers.urls, api_key_env=variable)
    with pytest.raises(ConfigError, match=r"HTTP 401.*vllm\.api_key_env"):
        await RemoteVllmGenerator.connect(config, END_IDS)


@pytest.mark.parametrize("place", [0, 1], ids=["generate", "completions"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_tokens_and_log_probabilities_are_exact_on_either_route(
    servers, first, place, is_streamed
):
    config = by_url(servers.urls[place])
    generator = await RemoteVllmGenerator.connect(config, END_IDS)
    try:
        assert isinstance(generator, Generator)
        assert generator.max_model_len == 512
        sampling = SamplingParams(max_tokens=48, temperature=0.7, top_p=0.95, ignore_eos=True)
        prompts = [[*PROMPT, *range(10, 10 + n)] for n in range(6)]
        told: list[tuple[int, float]] = []

        async def ask(prompt: list[int]):
            if not is_streamed:
                return await generator.generate(prompt, sampling)
            own: list[tuple[int, float]] = []
            result = await generator.generate(
                prompt, sampling, on_token=lambda *token: own.append(token)
            )
            assert own == list(zip(result.token_ids, result.logprobs, strict=True))
            told.extend(own)
            return result

        results = await gather_bounded(ask, prompts)
    finally:
        await generator.close()

    errors = [
        error
        for prompt, result in zip(prompts, results, strict=True)
        for error in first.errors(prompt, result, sampling)
    ]
    assert len(errors) == 6 * 48
    assert sum(errors) / len(errors) < MEAN_TOLERANCE
    assert max(errors) < MAX_TOLERANCE
    assert bool(told) == is_streamed
    spans = {tuple(result.weight_versions) for result in results}
    named = msgspec.json.decode(get(servers.ports[0], "/weight_info"))["weight_version"]
    assert spans == ({((named, 0, 48),)} if place == 0 else {()})


async def test_a_seed_gives_the_same_tokens_on_both_routes(generator):
    sampling = SamplingParams(max_tokens=24, seed=5, ignore_eos=True)
    once = await generator.generate(PROMPT, sampling)
    again = await generator.generate(PROMPT, sampling)  # the other server's turn
    assert once.token_ids == again.token_ids


async def test_calls_are_shared_out_by_what_is_in_flight(generator, servers):
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    seen = []

    async def ask(_):
        await generator.generate(
            PROMPT, sampling, on_token=lambda *_: seen.append(dict(generator.in_flight))
        )

    await gather_bounded(ask, range(8))
    assert max(sum(counts.values()) for counts in seen) == 8
    assert all(max(counts.values()) <= 4 for counts in seen)
    assert set(generator.in_flight.values()) == {0}


async def test_requests_that_no_server_can_serve_are_refused(generator):
    with pytest.raises(ContextOverflowError):
        await generator.generate([5] * 512, SamplingParams())
    with pytest.raises(GenerationRequestError, match="HTTP 400"):
        await generator.generate([10_000_000], SamplingParams())
    with pytest.raises(GenerationRequestError, match="no token"):
        await generator.generate([], SamplingParams())
    assert generator.out == {}


async def test_servers_whose_log_probabilities_are_of_another_kind_are_refused(servers):
    config = by_url(*servers.urls)
    with pytest.raises(ConfigError, match="--logprobs-mode raw_logprobs"):
        await RemoteVllmGenerator.connect(config, END_IDS, "raw")


async def test_servers_that_run_elsewhere_take_no_weights_unless_that_is_allowed(generator, models):
    with pytest.raises(WeightUpdateError, match=r"set vllm\.update_servers: true"):
        await generator.update_weights(DirectoryWeights(path=models.second), "1")


async def test_a_killed_server_fails_what_it_was_sampling_and_gets_no_calls_until_it_is_back(
    generator, servers
):
    dead = servers.urls[0].removesuffix("/v1")
    failed, finished = [], []
    started = 0

    async def ask(_):
        nonlocal started

        def count(*_):
            nonlocal started
            started += 1

        try:
            sampling = SamplingParams(max_tokens=480, ignore_eos=True)
            # Again and again: a server may be done with its calls before it is killed.
            while not failed:
                finished.append(await generator.generate(PROMPT, sampling, on_token=count))
        except GenerationTransportError as error:
            failed.append(error)

    async with anyio.create_task_group() as group:
        for index in range(6):
            group.start_soon(ask, index)
        await until(lambda: started > 60)
        servers.kill(0)

    # Half of them were on it; they had tokens, so they fail, and only they.
    assert {error.url for error in failed} == {dead}
    assert len(failed) <= 3 <= len(finished)
    assert {len(result.token_ids) for result in finished} == {480}
    assert list(generator.out) == [dead]
    assert generator.is_running

    short = SamplingParams(max_tokens=4, ignore_eos=True)
    results = await gather_bounded(lambda _: generator.generate(PROMPT, short), range(6))
    assert [len(result.token_ids) for result in results] == [4] * 6
    assert dead in generator.out

    servers.start(0)
    await until(lambda: not generator.out, 100)
    once = await generator.generate(PROMPT, short)
    again = await generator.generate(PROMPT, short)
    # One of two calls in a row goes to the server that came back: it says its weights' version.
    assert [bool(result.weight_versions) for result in (once, again)].count(True) == 1


async def test_a_server_that_is_down_when_we_connect_is_left_out_and_its_calls_go_elsewhere(
    servers,
):
    absent = f"http://127.0.0.1:{free_ports(1)[0]}"
    config = by_url(absent, servers.urls[1], probe_interval_s=0.3)
    generator = await RemoteVllmGenerator.connect(config, END_IDS)
    try:
        assert list(generator.out) == [absent]
        result = await generator.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(result.token_ids) == 3
    finally:
        await generator.close()


async def test_a_service_stands_before_servers_that_run_elsewhere(servers, models):
    """Agents get token ids and the splice from gymrl; vLLM is only asked for tokens."""
    config = engine_config(models.first, vllm=by_url(*servers.urls))
    async with gymrl.spawn(GenerationService, in_process=True, config=config) as service:
        endpoint = await service.call("start")
        assert endpoint.max_model_len == 512
        async with aiohttp.ClientSession() as session:
            async with session.post(
                f"{endpoint.base_url}/responses",
                json={"model": "policy", "input": "hello world", "max_output_tokens": 5},
            ) as response:
                answer = await response.json()
    item = answer["output"][-1]
    assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0


def load(port: int) -> int:
    """Calls that a server is busy with."""
    return msgspec.json.decode(get(port, "/load"))["server_load"]


def finished(port: int) -> int:
    """Requests that a server brought to an end of their own; those it gave up are not among them."""
    counts = re.findall(rb"\nvllm:request_success_total\{.*\} (.+)", get(port, "/metrics"))
    return sum(int(float(count)) for count in counts)


async def test_cancelling_a_call_frees_the_server(generator, servers):
    """The server sees that the connection is gone, and aborts."""
    long = SamplingParams(max_tokens=500, ignore_eos=True)
    asked = 0

    async def all_of(read) -> list[int]:
        return [await anyio.to_thread.run_sync(read, port) for port in servers.ports]

    async def ask() -> None:
        nonlocal asked
        while True:
            asked += 1
            await generator.generate(PROMPT, long)

    before = sum(await all_of(finished))
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(ask)
            while 0 in await all_of(load):
                pass
            group.cancel_scope.cancel()
        assert set(generator.in_flight.values()) == {0}
        while await all_of(load) != [0, 0]:
            pass
        # One more on each server; what went on would end before it.
        await gather_bounded(lambda _: generator.generate(PROMPT, long), range(2))
        await anyio.sleep(0.5)
        assert sum(await all_of(finished)) - before - 2 < asked


async def test_closing_ends_calls_with_abort_and_what_they_have(generator):
    started = anyio.Event()
    results = []

    async def ask(max_tokens):
        # Again and again: a server may be done with a call before its first token is here.
        with contextlib.suppress(GenerationError):
            while True:
                sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
                results.append(
                    await generator.generate(PROMPT, sampling, on_token=lambda *_: started.set())
                )

    async with anyio.create_task_group() as group:
        for max_tokens in (480, 430, 310):
            group.start_soon(ask, max_tokens)
        await started.wait()
        await generator.close()
    aborted = [result for result in results if result.finish_reason == "abort"]
    assert 0 < max(len(result.token_ids) for result in aborted) < 480
    with pytest.raises(Exception, match="closed"):
        await generator.generate(PROMPT, SamplingParams())
