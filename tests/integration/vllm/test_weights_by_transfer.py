"""Weights that a trainer sends to a real engine over vLLM's weight-transfer interface, without files.

Here the senders are threads of the process that also forks engines, which no later module may do:
this one must be the last that starts any.
"""

import subprocess
import sys

import anyio
import anyio.to_thread
import msgspec
import pytest
import pytest_asyncio
import torch

from gymrl.config import VllmConfig
from gymrl.errors import WeightUpdateError
from gymrl.generation.fidelity import MAX_TOLERANCE
from gymrl.generation.vllm import VllmGenerator
from gymrl.generation.weight_transfer import WeightSender
from gymrl.generation.weights import GLOO_BACKEND, DirectoryWeights, TransferWeights
from tests.integration.vllm.engines import PROMPT, engine_config
from tests.integration.vllm.switching import LONG, check_spans, under_load

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def generator(models, _vllm_can_run):
    backend = {"weight_transfer_config": {"backend": GLOO_BACKEND}}
    vllm = VllmConfig(kv_cache_bytes=32 << 20, engine_args=backend)
    config = engine_config(models.first, vllm=vllm)
    generator, _ = await anyio.to_thread.run_sync(VllmGenerator.load, config)
    try:
        yield generator
    finally:
        await generator.close()


async def send(generator, sender: WeightSender, state, version: str, **options) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, sender.send, state)
        await generator.update_weights(sender.weights(state), version, **options)


async def test_weights_travel_from_the_trainer_to_the_engine_under_running_calls(
    generator, first, second
):
    sender = WeightSender(timeout_s=30)
    start = generator.weight_version

    async def there_and_back(tokens) -> None:
        await send(generator, sender, second.model.state_dict(), "1")
        await tokens(5)
        await send(generator, sender, first.model.state_dict(), "2")

    results = await under_load(generator, there_and_back, num_calls=4)
    seen = check_spans(results, {start: first, "1": second, "2": first})
    assert seen == {start, "1", "2"}
    assert all(result.finish_reason == "length" for _, result in results)


async def test_half_precision_is_taken_as_it_is(generator, second):
    state = {name: t.to(torch.bfloat16) for name, t in second.model.state_dict().items()}
    await send(generator, WeightSender(timeout_s=30), state, "bf16", pause="wait")
    result = await generator.generate(PROMPT, LONG)
    exact = second.logprobs(PROMPT, result.token_ids, LONG)
    gaps = [abs(a - b) for a, b in zip(exact, result.logprobs, strict=True)]
    assert MAX_TOLERANCE < max(gaps) < 1


def start_trainer(*arguments: str) -> tuple[subprocess.Popen, TransferWeights]:
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.vllm.trainer", *arguments],
        stdout=subprocess.PIPE,
    )
    return trainer, msgspec.json.decode(trainer.stdout.readline(), type=TransferWeights)


async def test_a_trainer_that_dies_in_the_middle_leaves_the_old_weights_serving(
    generator, models, first, second
):
    await generator.update_weights(DirectoryWeights(path=models.first), "whole")
    trainer, weights = await anyio.to_thread.run_sync(start_trainer, models.second, "7")

    async def update(tokens) -> None:
        with pytest.raises(WeightUpdateError, match="'whole' goes on serving") as caught:
            await generator.update_weights(weights, "torn")
        assert caught.value.serving == "whole"

    with trainer:
        results = await under_load(generator, update, num_calls=3)
    assert trainer.returncode == 1
    assert check_spans(results, {"whole": first}) == {"whole"}

    again, weights = await anyio.to_thread.run_sync(start_trainer, models.second)
    with again:
        await generator.update_weights(weights, "sent")
    assert again.returncode == 0
    result = await generator.generate(PROMPT, LONG)
    assert check_spans([(PROMPT, result)], {"sent": second}) == {"sent"}


async def test_a_trainer_that_is_not_there_leaves_the_old_weights_serving(generator, second):
    before = generator.weight_version
    sender = WeightSender(timeout_s=1)
    with pytest.raises(WeightUpdateError, match="goes on serving") as caught:
        await generator.update_weights(sender.weights(second.model.state_dict()), "none")
    assert caught.value.serving == before
    assert len((await generator.generate(PROMPT, LONG)).token_ids) == 400


async def test_a_transfer_that_does_not_fit_is_refused_before_the_trainer_is_asked(
    generator, second
):
    weights = WeightSender().weights({"odd": torch.zeros(3)})
    with pytest.raises(WeightUpdateError, match="1 unknown: odd"):
        await generator.update_weights(weights, "odd")
    nccl = TransferWeights(backend="nccl", init_info={}, update_info={})
    with pytest.raises(WeightUpdateError, match=r"is gymrl_gloo; start it with .*backend: nccl"):
        await generator.update_weights(nccl, "nccl")


class Unchecked(TransferWeights, frozen=True, tag="transfer"):
    """As of a backend that does not tell what it brings."""

    def offered(self) -> None:
        return None


async def test_a_transfer_that_fails_in_the_model_is_undone_from_where_the_weights_came(
    generator, models, first, second
):
    await generator.update_weights(DirectoryWeights(path=models.first), "good")
    state = dict(second.model.state_dict())
    name = "model.layers.1.self_attn.k_proj.weight"
    state[name] = state[name][:5]
    sender = WeightSender(timeout_s=30)
    weights = Unchecked(**msgspec.structs.asdict(sender.weights(state)))
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, sender.send, state)
        with pytest.raises(WeightUpdateError, match="'good' goes on serving"):
            await generator.update_weights(weights, "half")
    result = await generator.generate(PROMPT, LONG)
    assert check_spans([(PROMPT, result)], {"good": first}) == {"good"}


async def test_a_load_that_fails_after_a_transfer_has_nothing_to_go_back_to(
    generator, models, first, second, tmp_path
):
    await send(generator, WeightSender(timeout_s=30), first.model.state_dict(), "sent")
    (tmp_path / "model.safetensors").symlink_to(f"{models.second}/model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{not json")
    with pytest.raises(WeightUpdateError, match="they came by transfer") as caught:
        await generator.update_weights(DirectoryWeights(path=str(tmp_path)), "twisted")
    assert caught.value.serving is None
    assert not generator.is_running

    await send(generator, WeightSender(timeout_s=30), second.model.state_dict(), "mended")
    result = await generator.generate(PROMPT, LONG)
    assert check_spans([(PROMPT, result)], {"mended": second}) == {"mended"}
