"""New weights for a running engine: which token came from which, and what a failed update leaves."""

import os
import shutil
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import safetensors.torch
import torch

from gymrl.config import SamplingParams
from gymrl.errors import BadLogprobsError, ConfigError, WeightUpdateError
from gymrl.generation.fidelity import MAX_TOLERANCE
from gymrl.generation.weights import DirectoryWeights, TensorWeights, WeightTensor
from tests.integration.vllm.engines import PROMPT, Reference
from tests.integration.vllm.switching import LONG, check_spans, under_load, until_cancelled

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


async def test_tokens_after_each_switch_come_from_the_new_weights(generator, models, first, second):
    assert generator.weight_version == "0"

    async def there_and_back(tokens) -> None:
        await generator.update_weights(DirectoryWeights(path=models.second), "1")
        assert generator.weight_version == "1"
        await tokens(5)
        await generator.update_weights(TensorWeights.of(first.model.state_dict()), "2")
        await tokens(5)
        await generator.update_weights(TensorWeights.of(second.model.state_dict()), "3")
        await tokens(5)
        await generator.update_weights(DirectoryWeights(path=models.first), "4")

    results = await under_load(generator, there_and_back, again=True)

    by_version = {"0": first, "1": second, "2": first, "3": second, "4": first}
    assert check_spans(results, by_version) == {"0", "1", "2", "3", "4"}
    assert all(result.finish_reason == "length" for _, result in results)
    assert any(len(result.weight_versions) > 1 for _, result in results)


async def test_wait_lets_calls_end_on_the_old_weights(generator, models, first, second):
    async def update(tokens) -> None:
        await generator.update_weights(DirectoryWeights(path=models.second), "5", pause="wait")

    before = generator.weight_version
    results = await under_load(generator, update, again=True)
    assert check_spans(results, {before: first, "5": second}) == {before, "5"}
    assert all(len(result.weight_versions) == 1 for _, result in results)
    after = await generator.generate(PROMPT, LONG)
    assert check_spans([(PROMPT, after)], {"5": second}) == {"5"}
    await generator.update_weights(DirectoryWeights(path=models.first), "6")


async def test_abort_ends_calls_with_what_they_have(generator, models, first, second):
    async def update(tokens) -> None:
        await generator.update_weights(DirectoryWeights(path=models.second), "7", pause="abort")

    before = generator.weight_version
    for _ in range(20):
        results = await under_load(generator, update)
        assert check_spans(results, {before: first}) == {before}
        before = "8"
        await generator.update_weights(DirectoryWeights(path=models.first), before)
        # One that was over before the update came has all of its tokens.
        aborted = [result for _, result in results if result.finish_reason == "abort"]
        assert all(5 <= len(result.token_ids) < 400 for result in aborted)
        if len(aborted) == len(results):
            break
    else:
        raise AssertionError("calls were over before the update came")


async def test_a_prompt_that_was_cached_is_computed_again_with_the_new_weights(
    generator, models, second, first
):
    prompt = [*PROMPT, *range(5, 105)]
    short = SamplingParams(max_tokens=3, ignore_eos=True)
    await generator.generate(prompt, short)
    await generator.update_weights(DirectoryWeights(path=models.second), "9")
    result = await generator.generate(prompt, short)
    assert max(second.errors(prompt, result, short)) < MAX_TOLERANCE
    await generator.update_weights(DirectoryWeights(path=models.first), "10")


async def test_weights_that_gave_nan_leave_none_of_it_to_those_after_them(generator, first):
    """It stayed in the cache: short prompts gave NaN until something longer had overwritten it."""
    state = first.model.state_dict()
    name = "model.embed_tokens.weight"
    broken = state | {name: torch.full_like(state[name], np.nan)}
    await generator.update_weights(TensorWeights.of(broken), "nan")
    with pytest.raises(BadLogprobsError):
        await generator.generate([5, 6, 7], SamplingParams(max_tokens=4))
    await generator.update_weights(TensorWeights.of(state), "sound")
    result = await generator.generate([5, 6, 7], SamplingParams(max_tokens=4))
    assert check_spans([([5, 6, 7], result)], {"sound": first}) == {"sound"}


def without(state: dict, name: str) -> dict:
    return {key: value for key, value in state.items() if key != name}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: without(state, NORM), f"1 missing: {NORM}"),
        (lambda state: {**state, "model.extra": state[NORM]}, "1 unknown: model.extra"),
        (lambda state: {**state, NORM: state[NORM][:3]}, rf"{NORM} is \[3\] instead of \[64\]"),
        (lambda state: {**state, NORM: state[NORM].int()}, f"of a type .*: {NORM}"),
    ],
    ids=["missing", "unknown", "reshaped", "integers"],
)
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(
    generator, first, second, change, said
):
    before = generator.weight_version
    broken = TensorWeights.of(change(second.model.state_dict()))

    async def update(tokens) -> None:
        with pytest.raises(WeightUpdateError, match=said) as caught:
            await generator.update_weights(broken, "bad")
        assert (caught.value.version, caught.value.serving) == ("bad", before)

    results = await under_load(generator, update, num_calls=2)
    assert check_spans(results, {before: first}) == {before}


async def test_a_file_that_is_cut_short_is_refused(generator, models, tmp_path):
    torn = tmp_path / "torn"
    shutil.copytree(models.second, torn)
    file = torn / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(WeightUpdateError, match="no whole safetensors file"):
        await generator.update_weights(DirectoryWeights(path=str(torn)), "torn")
    assert generator.is_running


async def test_weights_that_only_the_engine_refuses_are_undone(
    generator, models, first, second, tmp_path
):
    # The header is whole, so the check passes; the engine finds a format that it can't read.
    twisted = tmp_path / "twisted"
    shutil.copytree(models.second, twisted)
    (twisted / "model.safetensors.index.json").write_text("{not json")
    before = generator.weight_version

    async def update(tokens) -> None:
        with pytest.raises(WeightUpdateError, match="vLLM could not load them") as caught:
            await generator.update_weights(DirectoryWeights(path=str(twisted)), "twisted")
        assert caught.value.serving == before

    results = await under_load(generator, update, num_calls=3)
    assert check_spans(results, {before: first}) == {before}


async def test_a_load_that_fails_half_way_can_be_undone(generator, models, first, tmp_path):
    # Straight to the engine, past the check: one layer has only a part of its weights.
    half = tmp_path / "half"
    shutil.copytree(models.second, half)
    state = safetensors.torch.load_file(half / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    state[name] = state[name][:5]
    safetensors.torch.save_file(state, half / "model.safetensors")
    engine = generator._engine

    await engine.pause("keep")
    faults = await engine.load_weights(str(half), "half")
    assert faults
    assert await engine.load_weights(models.first, generator.weight_version) == []
    await engine.resume()

    result = await generator.generate(PROMPT, LONG)
    assert max(first.errors(PROMPT, result, LONG)) < MAX_TOLERANCE


async def test_when_neither_new_nor_old_weights_load_nothing_is_served_until_an_update_succeeds(
    generator, models, first, tmp_path
):
    gone, twisted = tmp_path / "gone", tmp_path / "twisted"
    shutil.copytree(models.second, gone)
    shutil.copytree(models.second, twisted)
    (twisted / "model.safetensors.index.json").write_text("{not json")
    await generator.update_weights(DirectoryWeights(path=str(gone)), "gone")
    shutil.rmtree(gone)

    with pytest.raises(WeightUpdateError, match="nothing serves") as caught:
        await generator.update_weights(DirectoryWeights(path=str(twisted)), "twisted")
    assert caught.value.serving is None
    assert not generator.is_running
    with pytest.raises(Exception, match="are unknown after an update failed"):
        await generator.generate(PROMPT, LONG)

    await generator.update_weights(DirectoryWeights(path=models.first), "mended")
    result = await generator.generate(PROMPT, LONG)
    assert check_spans([(PROMPT, result)], {"mended": first}) == {"mended"}


async def test_updates_take_turns(generator, models, first, second):
    async def update(path: str, version: str) -> None:
        await generator.update_weights(DirectoryWeights(path=path), version)

    async def both(tokens) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(update, models.second, "t1")
            await anyio.lowlevel.checkpoint()
            group.start_soon(update, models.first, "t2")

    before = generator.weight_version
    results = await under_load(generator, both, again=True)
    assert generator.weight_version == "t2"
    assert check_spans(results, {before: first, "t1": second, "t2": first}) >= {before, "t2"}


async def test_a_cancelled_wait_leaves_the_old_weights_and_a_running_engine(
    generator, models, first
):
    before = generator.weight_version

    async def restore() -> None:
        await generator.update_weights(DirectoryWeights(path=models.first), before)

    results = await until_cancelled(generator, DirectoryWeights(path=models.second), restore)
    assert check_spans(results, {before: first}) == {before}
    assert generator.weight_version == before


async def test_an_unknown_pause_mode_is_refused(generator, models):
    with pytest.raises(ConfigError, match="use keep, wait or abort"):
        await generator.update_weights(DirectoryWeights(path=models.first), "x", pause="later")


async def test_tensors_of_half_precision_and_from_numpy_are_taken(generator, models):
    first = Reference(models.first)
    state = {name: tensor.bfloat16() for name, tensor in first.model.state_dict().items()}
    await generator.update_weights(TensorWeights.of(state), "bf16")
    rounded = {name: tensor.float().numpy() for name, tensor in state.items()}
    result = await generator.generate(PROMPT, LONG)
    exact = first.logprobs(PROMPT, result.token_ids, LONG)
    first.model.load_state_dict({name: torch.from_numpy(a) for name, a in rounded.items()})
    errors = first.errors(PROMPT, result, LONG)
    gaps = [abs(a - b) for a, b in zip(exact, result.logprobs, strict=True)]
    assert max(errors) < MAX_TOLERANCE < max(gaps)

    await generator.update_weights(TensorWeights.of(rounded), "numpy")
    again = await generator.generate(PROMPT, LONG)
    assert max(first.errors(PROMPT, again, LONG)) < MAX_TOLERANCE
    await generator.update_weights(DirectoryWeights(path=models.first), "back")
    first.model.load_state_dict(type(first)(models.first).model.state_dict())


async def test_only_the_weights_that_serve_are_kept_in_shared_memory(generator, models, first):
    def staged() -> list[str]:
        return [p.name for p in Path("/dev/shm").glob(f"gymrl-weights-{os.getpid()}-*")]

    weights = TensorWeights.of(first.model.state_dict())
    await generator.update_weights(weights, "s1")
    await generator.update_weights(weights, "s2")
    assert len(staged()) == 1
    odd = WeightTensor(dtype="float32", data=np.zeros(3, np.float32))
    with pytest.raises(WeightUpdateError):
        await generator.update_weights(TensorWeights(tensors={"odd": odd}), "s3")
    assert len(staged()) == 1
    await generator.update_weights(DirectoryWeights(path=models.first), "s4")
    assert staged() == []
