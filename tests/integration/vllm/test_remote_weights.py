"""New weights for real vLLM servers by URL: all of them take them, or none does."""

import shutil
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import pytest_asyncio

import gymrl
from gymrl.concurrency import gather_bounded
from gymrl.config import GenerationConfig, SamplingParams, VllmConfig
from gymrl.errors import WeightUpdateError
from gymrl.generation.fidelity import MAX_TOLERANCE
from gymrl.generation.service import GenerationService
from gymrl.generation.vllm_http import RemoteVllmGenerator
from gymrl.generation.weights import DirectoryWeights, TensorWeights
from tests.integration.vllm.engines import PROMPT, until
from tests.integration.vllm.servers import MARK, VARIABLE, get, post
from tests.integration.vllm.switching import check_spans, under_load

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

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
        await generator.update_weights(DirectoryWeights(path=models.first), "a")

        async def there_and_back(tokens) -> None:
            await generator.update_weights(DirectoryWeights(path=models.second), "b")
            await tokens(5)
            await generator.update_weights(TensorWeights.of(first.model.state_dict()), "c")

        results = await under_load(generator, there_and_back, num_calls=4)
        seen = check_spans(results, {"a": first, "b": second, "c": first})
        assert seen == {"a", "b", "c"}

        async def cancelled(tokens) -> None:
            with anyio.move_on_after(0.05) as scope:
                await generator.update_weights(
                    DirectoryWeights(path=models.second), "no", pause="wait"
                )
            assert scope.cancelled_caught

        results = await under_load(generator, cancelled, num_calls=3)
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
    await until(lambda: get(servers.ports[0], "/health") is None)
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
