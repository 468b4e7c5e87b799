"""Weights that a trainer sends to a real engine over vLLM's weight-transfer interface, without files."""

import anyio
import anyio.to_thread
import msgspec
import pytest
import pytest_asyncio

from gymrl.config import VllmConfig
from gymrl.errors import GeneratorDiedError, WeightUpdateError
from gymrl.generation.fidelity import MAX_TOLERANCE
from gymrl.generation.vllm import VllmGenerator
from gymrl.generation.weights import GLOO_BACKEND, DirectoryWeights, TransferWeights
from tests.integration.vllm.engines import PROMPT, ask_for_ever, engine_config
from tests.integration.vllm.switching import LONG, check_spans, under_load
from tests.integration.vllm.trainer import Order, Trainer, unchecked

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

FIRST, SECOND = Order(model=0), Order(model=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def generator(models, _vllm_can_run):
    backend = {"weight_transfer_config": {"backend": GLOO_BACKEND}}
    vllm = VllmConfig(kv_cache_bytes=32 << 20, update_timeout_s=8, engine_args=backend)
    config = engine_config(models.first, vllm=vllm)
    generator, _ = await anyio.to_thread.run_sync(VllmGenerator.load, config)
    try:
        yield generator
    finally:
        await generator.close()


@pytest.fixture(scope="module")
def trainer(models):
    with Trainer(models) as trainer:
        yield trainer


async def test_weights_travel_from_the_trainer_to_the_engine_under_running_calls(
    generator, trainer, first, second
):
    start = generator.weight_version

    async def there_and_back(tokens) -> None:
        await trainer.send(generator, SECOND, "1")
        await tokens(5)
        await trainer.send(generator, FIRST, "2")

    results = await under_load(generator, there_and_back, num_calls=4, again=True)
    seen = check_spans(results, {start: first, "1": second, "2": first})
    assert seen == {start, "1", "2"}
    assert all(result.finish_reason == "length" for _, result in results)
    assert any(len(result.weight_versions) > 1 for _, result in results)


async def test_half_precision_is_taken_as_it_is(generator, trainer, second):
    await trainer.send(generator, Order(model=1, dtype="bfloat16"), "bf16", pause="wait")
    result = await generator.generate(PROMPT, LONG)
    exact = second.logprobs(PROMPT, result.token_ids, LONG)
    gaps = [abs(a - b) for a, b in zip(exact, result.logprobs, strict=True)]
    assert MAX_TOLERANCE < max(gaps) < 1


async def test_a_trainer_that_dies_in_the_middle_leaves_the_old_weights_serving(
    generator, models, first, second
):
    await generator.update_weights(DirectoryWeights(path=models.first), "whole")

    async def update(tokens) -> None:
        weights = await dying.begin(Order(model=1, dies_after=7))
        with pytest.raises(WeightUpdateError, match="'whole' goes on serving") as caught:
            await generator.update_weights(weights, "torn")
        assert caught.value.serving == "whole"

    with Trainer(models) as dying:
        results = await under_load(generator, update, num_calls=3)
    assert dying.process.returncode == 1
    assert check_spans(results, {"whole": first}) == {"whole"}

    with Trainer(models) as again:
        await again.send(generator, SECOND, "sent")
    assert again.process.returncode == 0
    result = await generator.generate(PROMPT, LONG)
    assert check_spans([(PROMPT, result)], {"sent": second}) == {"sent"}


async def test_a_trainer_that_is_not_there_leaves_the_old_weights_serving(generator, models):
    with Trainer(models) as gone:
        weights = await gone.begin(SECOND)
        gone.process.kill()
    weights.init_info["timeout_s"] = 1
    before = generator.weight_version
    with pytest.raises(WeightUpdateError, match="goes on serving") as caught:
        await generator.update_weights(weights, "none")
    assert caught.value.serving == before
    assert len((await generator.generate(PROMPT, LONG)).token_ids) == 400


async def test_a_transfer_that_does_not_fit_is_refused_before_the_trainer_is_asked(
    generator, models
):
    odd = {"names": ["odd"], "dtype_names": ["float32"], "shapes": [[3]]}
    weights = TransferWeights(backend=GLOO_BACKEND, init_info={}, update_info=odd)
    with pytest.raises(WeightUpdateError, match="1 unknown: odd"):
        await generator.update_weights(weights, "odd")
    nccl = TransferWeights(backend="nccl", init_info={}, update_info={})
    with pytest.raises(WeightUpdateError, match=r"is gymrl_gloo; start it with .*backend: nccl"):
        await generator.update_weights(nccl, "nccl")
    assert await generator.weight_takers() == [models.first]
    for_two = msgspec.structs.replace(weights, engines=({}, {}))
    with pytest.raises(WeightUpdateError, match=r"for 2 engines, and 1 take.*engines=1") as caught:
        await generator.update_weights(for_two, "two")
    assert caught.value.num_engines == 1


async def test_a_trainer_hears_at_once_why_the_engine_refuses_and_sends_again(
    generator, trainer, models, second
):
    order = Order(model=1, cut="model.layers.1.self_attn.k_proj.weight", with_new_sender=True)
    with pytest.raises(WeightUpdateError, match="1 of another shape"):
        await generator.update_weights(await trainer.begin(order), "odd")
    assert "1 of another shape: model.layers.1" in await trainer.outcome()

    await trainer.send(generator, SECOND, "whole")
    result = await generator.generate(PROMPT, LONG)
    assert check_spans([(PROMPT, result)], {"whole": second}) == {"whole"}


async def test_a_trainer_hears_at_once_why_a_worker_refuses(generator, models):
    with Trainer(models, num_workers=2) as trainer:
        with pytest.raises(WeightUpdateError, match="num_workers=1"):
            await generator.update_weights(await trainer.begin(SECOND), "two")
        assert (
            "engine 0 (worker 0) refused: ValueError: the engine has 1 workers, the sender was "
            "made for 2" in await trainer.outcome()
        )


async def test_a_transfer_that_fails_in_the_model_is_undone_from_where_the_weights_came(
    generator, trainer, models, first
):
    await generator.update_weights(DirectoryWeights(path=models.first), "good")
    name = "model.layers.1.self_attn.k_proj.weight"
    weights = await trainer.begin(Order(model=1, cut=name, with_new_sender=True))
    with pytest.raises(WeightUpdateError, match="'good' goes on serving"):
        await generator.update_weights(unchecked(weights), "half")
    assert await trainer.outcome() == "sent"
    result = await generator.generate(PROMPT, LONG)
    assert check_spans([(PROMPT, result)], {"good": first}) == {"good"}


async def test_a_load_that_fails_after_a_transfer_has_nothing_to_go_back_to(
    generator, trainer, models, second, tmp_path
):
    await trainer.send(generator, Order(model=0, with_new_sender=True), "sent")
    (tmp_path / "model.safetensors").symlink_to(f"{models.second}/model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{not json")
    with pytest.raises(WeightUpdateError, match="they came by transfer") as caught:
        await generator.update_weights(DirectoryWeights(path=str(tmp_path)), "twisted")
    assert caught.value.serving is None
    assert not generator.is_running

    await trainer.send(generator, SECOND, "mended")
    result = await generator.generate(PROMPT, LONG)
    assert check_spans([(PROMPT, result)], {"mended": second}) == {"mended"}


async def test_weights_reach_both_workers_of_an_engine(models, second):
    engine_args = {
        "weight_transfer_config": {"backend": GLOO_BACKEND},
        "distributed_executor_backend": "mp",
    }
    vllm = VllmConfig(kv_cache_bytes=32 << 20, tensor_parallel_size=2, engine_args=engine_args)
    config = engine_config(models.first, vllm=vllm)
    generator, _ = await anyio.to_thread.run_sync(VllmGenerator.load, config)
    try:
        with Trainer(models, num_workers=2) as trainer:
            await trainer.send(generator, SECOND, "1")
        result = await generator.generate(PROMPT, LONG)
    finally:
        await generator.close()
    assert check_spans([(PROMPT, result)], {"1": second}) == {"1"}


async def test_an_engine_whose_trainer_stalls_is_ended_and_says_so(generator, models):
    is_sampling = anyio.Event()

    async def ask() -> None:
        with pytest.raises(GeneratorDiedError):
            await ask_for_ever(generator, LONG, lambda *_: is_sampling.set())

    with Trainer(models) as stalling:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await is_sampling.wait()
                weights = await stalling.begin(Order(model=1, stalls_after=7))
                with pytest.raises(
                    WeightUpdateError, match=r"vllm.update_timeout_s.*was ended"
                ) as caught:
                    await generator.update_weights(weights, "stalled")
                assert caught.value.serving is None
        finally:
            stalling.process.kill()
    assert not generator.is_running
    with pytest.raises(GeneratorDiedError, match="start the generator again"):
        await generator.generate(PROMPT, LONG)
