"""New weights for real vLLM servers by URL: all of them take them, or none does."""

import shutil
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
import pytest_asyncio

import gymrl
from gymrl.concurrency import gather_bounded
from gymrl.config import GenerationConfig, SamplingParams, VllmConfig
from gymrl.errors import WeightsLostError, WeightUpdateError
from gymrl.generation.fidelity import MAX_TOLERANCE
from gymrl.generation.service import GenerationService
from gymrl.generation.vllm_http import RemoteVllmGenerator
from gymrl.generation.weights import DirectoryWeights, TensorWeights
from tests.integration.vllm.engines import PROMPT, engine_config, until
from tests.integration.vllm.servers import MARK, VARIABLE, get, post, refuses
from tests.integration.vllm.switching import (
    check_spans,
    under_load,
    until_all_seen,
    until_cancelled,
)
from tests.integration.vllm.trainer import Order, Trainer, unchecked

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

END_IDS = (2,)
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)


async def connected(urls, model: str, variable: str | None = VARIABLE) -> RemoteVllmGenerator:
    config = VllmConfig(
        base_urls=urls, update_servers=True, probe_interval_s=0.3, api_key_env=variable
    )
    return await RemoteVllmGenerator.connect(config, END_IDS, model=model)


@pytest_asyncio.fixture(loop_scope="module")
async def generator(servers, models):
    generator = await connected(servers.urls, models.first)
    yield generator
    await until(lambda: not generator.out, 60)
    await generator.update_weights(DirectoryWeights(path=models.first), "first")
    await generator.close()


async def sampled_by_both(generator, model, version: str) -> None:
    """Each server's tokens come from `model`; the one that names versions names this one."""
    results = [await generator.generate([*PROMPT, n + 5], SHORT) for n in range(4)]
    for n, result in enumerate(results):
        assert max(model.errors([*PROMPT, n + 5], result, SHORT)) < MAX_TOLERANCE
    spans = [tuple(result.weight_versions) for result in results]
    assert sorted(spans) == [(), (), ((version, 0, 12),), ((version, 0, 12),)]


def copy_of(directory: str, target: Path) -> Path:
    shutil.copytree(directory, target)
    return target


async def test_every_server_samples_from_the_new_weights_of_either_source(
    generator, models, first, second
):
    await generator.update_weights(DirectoryWeights(path=models.second), "1")
    assert generator.weight_version == "1"
    await sampled_by_both(generator, second, "1")

    await generator.update_weights(TensorWeights.of(first.model.state_dict()), "2", pause="abort")
    await sampled_by_both(generator, first, "2")


async def test_calls_in_flight_go_on_with_the_new_weights_and_say_from_where(
    servers, models, first, second
):
    generator = await connected(servers.urls[:1], models.first)
    try:

        async def there_and_back(tokens) -> None:
            await generator.update_weights(DirectoryWeights(path=models.second), "b")
            await tokens(5)
            await generator.update_weights(TensorWeights.of(first.model.state_dict()), "c")

        async def attempt():
            await generator.update_weights(DirectoryWeights(path=models.first), "a")
            return await under_load(generator, there_and_back, num_calls=4)

        await until_all_seen(attempt, {"a": first, "b": second, "c": first})

        async def restore() -> None:
            await generator.update_weights(DirectoryWeights(path=models.first), "c")

        results = await until_cancelled(
            generator, DirectoryWeights(path=models.second), restore, num_calls=3
        )
        assert check_spans(results, {"c": first}) == {"c"}
        assert generator.weight_version == "c"
    finally:
        await generator.close()


async def test_one_server_that_can_not_load_takes_the_others_back(
    generator, servers, models, first, tmp_path
):
    await generator.update_weights(DirectoryWeights(path=models.first), "3")
    refused = copy_of(models.second, tmp_path / "refused")
    (refused / MARK).touch()
    with pytest.raises(WeightUpdateError, match="told to refuse them") as caught:
        await generator.update_weights(DirectoryWeights(path=str(refused)), "4")
    assert servers.urls[1].removesuffix("/v1") in str(caught.value)
    assert (caught.value.version, caught.value.serving) == ("4", "3")
    assert generator.out == {}
    await sampled_by_both(generator, first, "3")


async def test_a_checkpoint_that_no_server_can_read_is_undone_on_all(
    generator, models, first, tmp_path
):
    await generator.update_weights(DirectoryWeights(path=models.first), "5")
    twisted = copy_of(models.second, tmp_path / "twisted")
    (twisted / "model.safetensors.index.json").write_text("{not json")
    with pytest.raises(WeightUpdateError, match="could not load them"):
        await generator.update_weights(DirectoryWeights(path=str(twisted)), "6")
    await sampled_by_both(generator, first, "5")


async def test_a_server_that_can_not_go_back_is_left_out_until_it_can(
    generator, servers, models, first, tmp_path
):
    old = copy_of(models.first, tmp_path / "old")
    new = copy_of(models.second, tmp_path / "new")
    await generator.update_weights(DirectoryWeights(path=str(old)), "7")
    for directory in (old, new):
        (directory / MARK).touch()
    with pytest.raises(WeightUpdateError, match="nor go back") as caught:
        await generator.update_weights(DirectoryWeights(path=str(new)), "8")
    assert caught.value.serving == "7"
    stuck = servers.urls[1].removesuffix("/v1")
    assert list(generator.out) == [stuck]
    assert max(first.errors(PROMPT, await generator.generate(PROMPT, SHORT), SHORT)) < MAX_TOLERANCE

    (old / MARK).unlink()
    await until(lambda: not generator.out)
    await sampled_by_both(generator, first, "7")


async def test_weights_that_do_not_fit_reach_no_server(generator, models, first):
    state = dict(first.model.state_dict())
    state["model.norm.weight"] = state["model.norm.weight"][:3]
    with pytest.raises(WeightUpdateError, match=r"model.norm.weight is \[3\] instead of \[64\]"):
        await generator.update_weights(TensorWeights.of(state), "9")
    assert generator.out == {}


async def test_a_server_that_was_killed_comes_back_with_the_weights_of_the_day(
    generator, servers, models, second
):
    await generator.update_weights(DirectoryWeights(path=models.second), "10")
    servers.kill(0)
    await until(lambda: refuses(servers.ports[0]))
    results = await gather_bounded(lambda _: generator.generate(PROMPT, SHORT), range(4))
    assert [result.weight_versions for result in results] == [[]] * 4
    assert list(generator.out) == [servers.urls[0].removesuffix("/v1")]

    servers.start(0)
    await until(lambda: not generator.out, 100)
    await sampled_by_both(generator, second, "10")


async def test_a_server_that_lost_its_weights_unnoticed_is_found_by_its_answer(
    generator, servers, models, second
):
    await generator.update_weights(DirectoryWeights(path=models.second), "11")
    post(servers.ports[0], "/update_weight_version", b'{"new_version": "default"}')
    results = [await generator.generate(PROMPT, SHORT) for _ in range(2)]
    assert [("0", 0, 12)] in [result.weight_versions for result in results]
    await until(lambda: b'"11"' in (get(servers.ports[0], "/weight_info") or b""))
    await until(lambda: not generator.out)
    await sampled_by_both(generator, second, "11")


FIRST, SECOND = Order(model=0), Order(model=1)


@pytest.fixture(scope="module")
def trainer(models):
    with Trainer(models, num_engines=2) as trainer:
        yield trainer


async def test_a_trainer_sends_to_every_server_under_running_calls(
    generator, trainer, first, second
):
    async def there_and_back(tokens) -> None:
        await trainer.send(generator, SECOND, "21")
        await tokens(5)
        await trainer.send(generator, FIRST, "22")

    async def attempt():
        await trainer.send(generator, FIRST, "20")
        return await under_load(generator, there_and_back, num_calls=4)

    results = await until_all_seen(attempt, {"20": first, "21": second, "22": first})
    assert all(len(result.token_ids) == 400 for _, result in results)
    # The other server names no versions.
    assert [bool(result.weight_versions) for _, result in results].count(True) == 2
    await sampled_by_both(generator, first, "22")

    await trainer.send(generator, SECOND, "23", pause="wait")
    await sampled_by_both(generator, second, "23")


async def test_a_service_hands_transfers_on_and_the_sender_hears_for_how_many_servers(
    servers, trainer, models
):
    vllm = VllmConfig(base_urls=servers.urls, update_servers=True, api_key_env=VARIABLE)
    config = engine_config(models.first, vllm=vllm)
    async with gymrl.spawn(GenerationService, in_process=True, config=config) as service:
        weights = await trainer.begin(Order(model=0, with_new_sender=True))
        for_one = msgspec.structs.replace(weights, engines=weights.engines[:1])
        with pytest.raises(WeightUpdateError, match="make it with num_engines=2") as caught:
            await service.call("update_weights", for_one, "one")
        assert caught.value.num_engines == 2
        assert "make it with num_engines=2" in await trainer.outcome()
        takers = [url.removesuffix("/v1") for url in servers.urls]
        assert await service.call("weight_takers") == takers
        weights = await trainer.begin(Order(model=0))
        await service.call("update_weights", weights, "two")
        assert await trainer.outcome() == "sent"
        assert await service.call("weight_version") == "two"

    async with gymrl.spawn(GenerationService, in_process=True, config=config) as successor:
        await successor.call("adopt_weights", "two")
        assert await successor.call("weight_version") == "two"
        with pytest.raises(WeightsLostError, match="it has the weights 'two', not 'three'"):
            await successor.call("adopt_weights", "three")


async def test_servers_whose_generator_died_in_an_update_go_back_to_their_start(
    servers, models, first
):
    for port in servers.ports:
        post(port, "/pause?mode=keep", b"{}")
    generator = await connected(servers.urls, models.first)
    try:
        assert generator.out == {}
        await sampled_by_both(generator, first, "0")
    finally:
        await generator.close()


async def test_a_transfer_that_fails_in_the_models_is_undone_on_every_server(
    generator, trainer, models, first
):
    await generator.update_weights(DirectoryWeights(path=models.first), "24")
    cut = Order(model=1, cut="model.layers.1.self_attn.k_proj.weight", with_new_sender=True)
    weights = unchecked(await trainer.begin(cut))
    with pytest.raises(WeightUpdateError, match="'24' goes on serving"):
        await generator.update_weights(weights, "25")
    assert await trainer.outcome() == "sent"
    assert generator.out == {}
    await sampled_by_both(generator, first, "24")


async def test_a_server_that_is_killed_in_the_middle_of_a_transfer_comes_back_with_the_next(
    generator, servers, trainer, first, second
):
    await trainer.send(generator, Order(model=1, with_new_sender=True), "26")
    killed = servers.urls[0].removesuffix("/v1")

    async def torn() -> None:
        with pytest.raises(WeightUpdateError, match="'26' goes on serving") as caught:
            await generator.update_weights(await trainer.begin(stalls), "27")
        assert killed in str(caught.value)

    stalls = Order(model=0, stalls_after=7)
    async with anyio.create_task_group() as group:
        group.start_soon(torn)
        await until(lambda: is_receiving(servers.ports[0]) and is_receiving(servers.ports[1]))
        servers.kill(0)
        await until(lambda: refuses(servers.ports[0]))
        trainer.go_on()
    assert "did not take the tensors" in await trainer.outcome()
    assert list(generator.out) == [killed]
    result = await generator.generate(PROMPT, SHORT)
    assert max(second.errors(PROMPT, result, SHORT)) < MAX_TOLERANCE

    servers.start(0)
    await until(lambda: "they came from a trainer" in generator.out[killed], 100)
    assert len(await generator.weight_takers()) == 2
    await trainer.send(generator, Order(model=0, with_new_sender=True), "28")
    assert generator.out == {}
    await sampled_by_both(generator, first, "28")


def is_receiving(port: int) -> bool:
    name = 'vllm:rl_weight_update_operations_in_flight{operation="update"'
    said = (get(port, "/metrics") or b"").decode()
    return any(line.startswith(name) and line.endswith(" 1.0") for line in said.splitlines())


async def test_a_trainer_that_dies_in_the_middle_leaves_the_old_weights_on_every_server(
    generator, trainer, first
):
    await trainer.send(generator, Order(model=0, with_new_sender=True), "29")

    async def torn(tokens) -> None:
        weights = await trainer.begin(Order(model=1, dies_after=7))
        with pytest.raises(WeightUpdateError, match="'29' goes on serving") as caught:
            await generator.update_weights(weights, "30")
        assert (caught.value.serving, caught.value.num_engines) == ("29", None)

    results = await under_load(generator, torn, num_calls=2)
    assert trainer.process.wait(60) == 1
    named = [result for result in results if result[1].weight_versions]
    assert check_spans(named, {"29": first}) == {"29"}
    assert generator.out == {}
    await sampled_by_both(generator, first, "29")


async def test_a_server_without_the_routes_for_weights_is_named_with_the_switch(models):
    """A server of gymrl is one: it answers, and has no development routes."""
    config = GenerationConfig(model=models.first, max_model_len=64, num_threads=1)
    async with gymrl.spawn(GenerationService, in_process=True, config=config) as service:
        endpoint = await service.call("start")
        generator = await connected((endpoint.base_url,), models.first, None)
        try:
            with pytest.raises(WeightUpdateError, match="VLLM_SERVER_DEV_MODE=1") as caught:
                await generator.update_weights(DirectoryWeights(path=models.second), "1")
            assert endpoint.base_url.removesuffix("/v1") in str(caught.value)
            assert generator.out == {}
        finally:
            await generator.close()
