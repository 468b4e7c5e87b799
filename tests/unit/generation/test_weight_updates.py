import math

import anyio
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gymrl.concurrency import gather_bounded
from gymrl.config import SamplingParams
from gymrl.errors import ConfigError, WeightUpdateError
from gymrl.generation.base import WeightSpan
from gymrl.generation.model_loading import without_progress_bars
from gymrl.generation.transformers import TransformersGenerator
from gymrl.generation.weights import (
    DirectoryWeights,
    TensorWeights,
    TransferWeights,
    UpdatableGenerator,
    WeightTensor,
)
from gymrl.testing import build_tiny_model

PROMPT = [1, 40, 50, 60, 2, 70]
SHORT = SamplingParams(max_tokens=40, seed=3)


def load(directory):
    with without_progress_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    return {name: build_tiny_model(root / name, seed=i) for i, name in enumerate(["old", "new"])}


@pytest.fixture(scope="module")
def plain(directories):
    return {name: load(directory) for name, directory in directories.items()}


@pytest.fixture
async def generator(directories):
    generator = TransformersGenerator(load(directories["old"]), end_ids=[], max_batch_size=4)
    yield generator
    await generator.close()


def gaps(model, prompt, result, start=0, end=None) -> list[float]:
    ids = torch.tensor([[*prompt, *result.token_ids]])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits, -1)
    own = [
        logprobs[0, len(prompt) - 1 + i, token_id].item()
        for i, token_id in enumerate(result.token_ids)
    ]
    found = [abs(a - b) for a, b in zip(own, result.logprobs, strict=True)]
    return found[start:end]


async def in_flight(generator, update, count=6, max_tokens=300):
    """Results of calls that were sampling when `update` ran."""
    results = []
    many_tokens = anyio.Event()
    seen = 0

    def on_token(token_id, logprob) -> None:
        nonlocal seen
        seen += 1
        if seen == 40:
            many_tokens.set()

    async def call(number) -> None:
        prompt = PROMPT * (1 + number % 3)
        sampling = SamplingParams(max_tokens=max_tokens, seed=number)
        result = await generator.generate(prompt, sampling, on_token=on_token)
        results.append((prompt, result))

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(call, number)
        await many_tokens.wait()
        await update()
    return results


async def test_it_can_be_updated(generator):
    assert isinstance(generator, UpdatableGenerator)
    assert generator.weight_version == "0"


async def test_every_token_comes_from_the_weights_that_its_span_names(
    generator, directories, plain
):
    async def update() -> None:
        await generator.update_weights(DirectoryWeights(path=str(directories["new"])), "1")

    results = await in_flight(generator, update)
    assert generator.weight_version == "1"
    switched = 0
    for prompt, result in results:
        spans = result.weight_versions
        assert (spans[0].start, spans[-1].end) == (0, 300)
        switched += len(spans) == 2
        for version, start, end in spans:
            own, other = ("old", "new") if version == "0" else ("new", "old")
            assert max(gaps(plain[own], prompt, result, start, end)) < 1e-3
            if end - start > 4:
                assert max(gaps(plain[other], prompt, result, start, end)) > 0.1
    assert switched >= 1


async def test_tensors_of_a_trainers_model_are_taken(generator, plain):
    source = TensorWeights.of(plain["new"].state_dict())
    await generator.update_weights(source, "7")
    result = await generator.generate(PROMPT, SHORT)
    assert max(gaps(plain["new"], PROMPT, result)) < 1e-3
    assert result.weight_versions == [WeightSpan("7", 0, 40)]


async def test_wait_lets_calls_end_on_the_old_weights(generator, plain):
    source = TensorWeights.of(plain["new"].state_dict())
    results = await in_flight(
        generator,
        lambda: generator.update_weights(source, "1", pause="wait"),
        count=4,
        max_tokens=80,
    )
    for prompt, result in results:
        assert result.weight_versions == [WeightSpan("0", 0, 80)]
        assert max(gaps(plain["old"], prompt, result)) < 1e-3
    assert (await generator.generate(PROMPT, SHORT)).weight_versions[0].version == "1"


async def test_abort_ends_calls_with_what_they_have_and_serves_the_rest(generator, plain):
    source = TensorWeights.of(plain["new"].state_dict())
    results = await in_flight(
        generator, lambda: generator.update_weights(source, "1", pause="abort"), count=6
    )
    aborted = [result for _, result in results if result.finish_reason == "abort"]
    whole = [result for _, result in results if result.finish_reason == "length"]
    assert (len(aborted), len(whole)) == (4, 2)
    assert all(0 < len(result.token_ids) < 300 for result in aborted)
    assert all(result.weight_versions == [WeightSpan("1", 0, 300)] for result in whole)


async def test_updates_take_turns(generator, plain):
    source = TensorWeights.of(plain["new"].state_dict())
    await gather_bounded(lambda v: generator.update_weights(source, str(v)), range(1, 6))
    assert generator.weight_version in {"1", "2", "3", "4", "5"}


@pytest.mark.parametrize("fault", ["missing", "unknown", "another shape", "a type"])
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve_on(
    generator, plain, fault
):
    before = await generator.generate(PROMPT, SHORT)
    tensors = dict(TensorWeights.of(plain["new"].state_dict()).tensors)
    name = "model.norm.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "unknown":
        tensors["more"] = tensors[name]
    elif fault == "another shape":
        tensors[name] = WeightTensor(dtype="float32", data=np.zeros(3, dtype=np.float32))
    else:
        tensors[name] = WeightTensor(dtype="int32", data=np.zeros(64, dtype=np.int32))
    with pytest.raises(WeightUpdateError, match=fault) as caught:
        await generator.update_weights(TensorWeights(tensors=tensors), "1")
    assert caught.value.serving == "0"
    assert generator.weight_version == "0"
    assert await generator.generate(PROMPT, SHORT) == before


async def test_a_checkpoint_that_is_cut_short_is_refused(generator, directories, tmp_path):
    whole = (directories["new"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "config.json").write_bytes((directories["new"] / "config.json").read_bytes())
    with pytest.raises(WeightUpdateError, match="version '0' goes on serving"):
        await generator.update_weights(DirectoryWeights(path=str(tmp_path)), "1")


async def test_a_checkpoint_that_lacks_a_tensor_is_refused(generator, directories, tmp_path):
    tensors = load_file(directories["new"] / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((directories["new"] / "config.json").read_bytes())
    with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight"):
        await generator.update_weights(DirectoryWeights(path=str(tmp_path)), "1")


@pytest.mark.parametrize("path", ["/no/such/place"])
async def test_a_directory_that_is_not_there_is_refused(generator, path):
    with pytest.raises(WeightUpdateError, match="does not exist"):
        await generator.update_weights(DirectoryWeights(path=path), "1")


async def test_a_transfer_is_for_engines_of_vllm(generator):
    weights = TransferWeights(backend="gymrl_gloo", init_info={}, update_info={})
    with pytest.raises(WeightUpdateError, match="only a vLLM engine takes weights by transfer"):
        await generator.update_weights(weights, "1")


def test_a_transfer_tells_what_it_brings_where_its_backend_says_so():
    def transfer(**update_info) -> TransferWeights:
        return TransferWeights(backend="ipc", init_info={}, update_info=update_info)

    named = transfer(names=["w"], shapes=[[2, 3]], dtype_names=["bfloat16"])
    assert named.offered() == {"w": ((2, 3), "bfloat16")}
    assert transfer(anything=1).offered() is None
    with pytest.raises(WeightUpdateError, match="1 names, 0 shapes and 1 types"):
        transfer(names=["w"], shapes=[], dtype_names=["bfloat16"]).offered()


async def test_an_unknown_pause_is_refused(generator, plain):
    with pytest.raises(ConfigError, match="keep, wait or abort"):
        await generator.update_weights(TensorWeights(tensors={}), "1", pause="later")


@pytest.mark.parametrize("version", ["", "default"])
async def test_a_version_that_can_not_be_told_from_others_is_refused(generator, plain, version):
    """vLLM calls weights without a name `default`: their tokens were said to be of version 0."""
    with pytest.raises(ConfigError, match="name the weights by a step's number") as caught:
        await generator.update_weights(TensorWeights(tensors={}), version)
    assert caught.value.setting == "version"


async def test_cancelling_an_update_that_waits_leaves_the_old_weights(generator, plain):
    source = TensorWeights.of(plain["new"].state_dict())

    async def cancelled() -> None:
        with anyio.move_on_after(0.01):
            await generator.update_weights(source, "1", pause="wait")

    results = await in_flight(generator, cancelled, count=6)
    assert generator.weight_version == "0"
    assert {result.weight_versions[0].version for _, result in results} == {"0"}


async def test_a_closed_generator_takes_no_weights(generator, plain):
    await generator.close()
    with pytest.raises(WeightUpdateError, match="nothing serves") as caught:
        await generator.update_weights(TensorWeights.of(plain["new"].state_dict()), "1")
    assert caught.value.serving is None


async def test_tied_weights_may_be_given_once(tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=90,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        other = transformers.LlamaForCausalLM(config).eval()
    generator = TransformersGenerator(model, end_ids=[])
    tensors = other.state_dict()
    del tensors["lm_head.weight"]
    await generator.update_weights(TensorWeights.of(tensors), "1")
    result = await generator.generate([5, 6], SamplingParams(max_tokens=5))
    await generator.close()
    assert max(gaps(other, [5, 6], result)) < 1e-4
    assert not math.isnan(sum(result.logprobs))
