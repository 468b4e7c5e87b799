import aiohttp
import pytest
from safetensors.torch import load_file

from gymrl.actors import spawn
from gymrl.config import GenerationConfig
from gymrl.errors import (
    ActorStartError,
    ConfigError,
    GenerationError,
    ServerStartError,
    WeightUpdateError,
)
from gymrl.generation.service import GenerationEndpoint, GenerationService
from gymrl.generation.weights import DirectoryWeights, TensorWeights
from gymrl.testing import build_tiny_model

IN_PROCESS = pytest.mark.parametrize("in_process", [True, False])


async def ask(endpoint: GenerationEndpoint) -> dict:
    async with aiohttp.ClientSession() as session:
        body = {"input": "hello", "max_output_tokens": 4, "seed": 1, "model": endpoint.model}
        async with session.post(endpoint.base_url + "/responses", json=body) as answer:
            assert answer.status == 200
            return await answer.json()


@IN_PROCESS
async def test_a_service_loads_serves_and_closes(tiny_directory, in_process):
    config = GenerationConfig(
        model=str(tiny_directory), served_model_name="tiny", max_model_len=512
    )
    async with spawn(GenerationService, in_process=in_process, config=config) as service:
        endpoint = await service.call("start")
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        assert endpoint.base_url.endswith("/v1")
        assert (endpoint.model, endpoint.max_model_len) == ("tiny", 512)
        assert await service.call("start") == endpoint
        await service.call("health_check")
        answer = await ask(endpoint)
        assert len(answer["output"][-1]["generation_token_ids"]) == 4
    with pytest.raises(aiohttp.ClientConnectionError):
        await ask(endpoint)


async def test_both_ways_of_running_give_the_same_tokens(tiny_directory):
    sampled = []
    config = GenerationConfig(model=str(tiny_directory), max_batch_size=1)
    for in_process in (True, False):
        async with spawn(GenerationService, in_process=in_process, config=config) as service:
            answer = await ask(await service.call("start"))
            sampled.append(answer["output"][-1]["generation_token_ids"])
    assert sampled[0] == sampled[1]


@IN_PROCESS
async def test_a_model_that_is_not_there_fails_the_set_up_by_name(tmp_path, in_process):
    config = GenerationConfig(model=str(tmp_path / "nowhere"))
    with pytest.raises(ActorStartError, match="no such directory") as caught:
        await spawn(GenerationService, in_process=in_process, config=config)
    assert isinstance(caught.value.__cause__, ConfigError)


async def test_a_deferred_model_that_can_not_be_loaded_is_nobodys_mistake_and_says_why(tmp_path):
    directory = build_tiny_model(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    config = GenerationConfig(model=str(directory), defer_loading=True)
    async with spawn(GenerationService, in_process=True, config=config) as service:
        endpoint = await service.call("start")
        with pytest.raises(ConfigError, match=r"no file named model\.safetensors"):
            await service.call("wait_ready")
        with pytest.raises(GenerationError, match=r"does not serve: the model could not be loaded"):
            await service.call("health_check")
        root = endpoint.base_url.removesuffix("/v1")
        async with aiohttp.ClientSession() as session:
            asked = [
                session.get(root + "/health"),
                session.post(endpoint.base_url + "/responses", json={"input": "hello"}),
            ]
            for asking in asked:
                async with asking as answer:
                    assert answer.status == 503
                    assert "no file named model.safetensors" in await answer.text()


async def test_a_port_that_is_taken_is_named(tiny_directory):
    config = GenerationConfig(model=str(tiny_directory))
    async with spawn(GenerationService, in_process=True, config=config) as first:
        endpoint = await first.call("start")
        port = int(endpoint.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
        taken = GenerationConfig(model=str(tiny_directory), port=port)
        async with spawn(GenerationService, in_process=True, config=taken) as second:
            with pytest.raises(ServerStartError, match=str(port)):
                await second.call("start")


@IN_PROCESS
async def test_new_weights_serve_from_the_next_call_on(tiny_directory, tmp_path, in_process):
    other = build_tiny_model(tmp_path / "other", seed=1)
    tensors = {
        name: tensor.numpy() for name, tensor in load_file(other / "model.safetensors").items()
    }
    config = GenerationConfig(model=str(tiny_directory), max_batch_size=1)
    sampled = []
    async with spawn(GenerationService, in_process=in_process, config=config) as service:
        endpoint = await service.call("start")
        for version, source in [
            ("0", None),
            ("1", DirectoryWeights(path=str(other))),
            ("2", DirectoryWeights(path=str(tiny_directory))),
            ("3", TensorWeights.of(tensors)),
        ]:
            if source is not None:
                await service.call("update_weights", source, version)
            assert await service.call("weight_version") == version
            answer = await ask(endpoint)
            sampled.append(answer["output"][-1]["generation_token_ids"])
        with pytest.raises(WeightUpdateError, match="does not exist"):
            await service.call("update_weights", DirectoryWeights(path="/no/where"), "4")
        assert await service.call("weight_version") == "3"
        assert await service.call("weight_takers") == []
    assert sampled[0] == sampled[2]
    assert sampled[1] == sampled[3]
    assert sampled[0] != sampled[1]
