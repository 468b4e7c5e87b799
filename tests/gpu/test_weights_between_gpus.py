"""Weights that go from a trainer's GPU to a real engine's, under running calls.

The trainer is a process of its own, on the first GPU. By CUDA IPC the engine is on that one too, by
NCCL on the second.
"""

import contextlib

import anyio.to_thread
import pytest

from gymrl.config import VllmConfig
from gymrl.errors import WeightUpdateError
from gymrl.generation.vllm import VllmGenerator
from gymrl.generation.weight_transfer import BACKENDS
from gymrl.generation.weights import DirectoryWeights
from tests.integration.vllm.engines import PROMPT, engine_config
from tests.integration.vllm.switching import LONG, check_spans, under_load
from tests.integration.vllm.trainer import Order, Trainer, unchecked

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio, pytest.mark.timeout(300)]

FIRST, SECOND = Order(model=0), Order(model=1)
GPU_OF_THE_ENGINE = {"ipc": 0, "nccl": 1}


@contextlib.asynccontextmanager
async def engine(model: str, transfer: str):
    vllm = VllmConfig(
        kv_cache_bytes=64 << 20,
        enforce_eager=True,
        devices=(GPU_OF_THE_ENGINE[transfer],),
        update_timeout_s=60,
        engine_args={
            "weight_transfer_config": {"backend": BACKENDS[transfer]},
            "gpu_memory_utilization": 0.1,
        },
    )
    config = engine_config(model, vllm=vllm, device="cuda")
    generator, _ = await anyio.to_thread.run_sync(VllmGenerator.load, config)
    try:
        yield generator
    finally:
        await generator.close()


@pytest.fixture(params=["ipc", "nccl"])
def transfer(request, num_gpus) -> str:
    if num_gpus <= GPU_OF_THE_ENGINE[request.param]:
        pytest.skip(f"{request.param} needs {GPU_OF_THE_ENGINE[request.param] + 1} GPUs")
    return request.param


async def test_every_token_is_of_the_weights_that_its_span_names(transfer, models, first, second):
    # The trainer starts first: the engine changes which GPUs processes after it see.
    with Trainer(models, transfer=transfer) as trainer:
        async with engine(models.first, transfer) as generator:

            async def there_and_back(tokens) -> None:
                await trainer.send(generator, SECOND, "1")
                await tokens(5)
                await trainer.send(generator, FIRST, "2")

            results = await under_load(generator, there_and_back, num_calls=4)
    seen = check_spans(results, {"0": first, "1": second, "2": first})
    assert seen == {"0", "1", "2"}


async def test_weights_that_fail_in_the_model_are_undone(transfer, models, first):
    cut = Order(model=1, cut="model.layers.1.self_attn.k_proj.weight")
    with Trainer(models, transfer=transfer) as trainer:
        async with engine(models.first, transfer) as generator:
            await generator.update_weights(DirectoryWeights(path=models.first), "good")
            with pytest.raises(WeightUpdateError, match="'good' goes on serving"):
                await generator.update_weights(unchecked(await trainer.begin(cut)), "cut")
            result = await generator.generate(PROMPT, LONG)
    assert check_spans([(PROMPT, result)], {"good": first}) == {"good"}
