"""Routes of the embedded generator, against the router's logits of a plain forward pass."""

import anyio
import pytest
import torch
import transformers

from gymrl.concurrency import gather_bounded
from gymrl.config import SamplingParams
from gymrl.errors import ConfigError
from gymrl.generation.model_loading import without_progress_bars
from gymrl.generation.transformers import TransformersGenerator
from gymrl.generation.weights import DirectoryWeights
from gymrl.testing import build_tiny_model

SHAPE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

MODELS = {
    "qwen3": lambda: transformers.Qwen3MoeConfig(**SHAPE, **QWEN),
    "a dense layer between": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, **QWEN, mlp_only_layers=[1]
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=3, sliding_window=None
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    ),
}


def build(config) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def load(directory):
    with without_progress_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def expected_routes(model, token_ids: list[int], top_k: int) -> list[list[list[int]]]:
    """From the router's logits, which no hook of ours touches."""
    with torch.inference_mode():
        outputs = model(torch.tensor([token_ids]), output_router_logits=True)
    layers = [logits.topk(top_k).indices for logits in outputs.router_logits if logits is not None]
    return torch.stack(layers, dim=1).tolist()


async def sample(model, prompts, sampling, **settings):
    generator = TransformersGenerator(
        model, end_ids=[], return_routed_experts=True, max_batch_size=3, **settings
    )
    try:
        return await gather_bounded(lambda prompt: generator.generate(prompt, sampling), prompts)
    finally:
        await generator.close()


@pytest.mark.parametrize("kind", MODELS)
async def test_each_token_has_the_experts_of_a_plain_forward_pass(kind):
    model = build(MODELS[kind]())
    prompts = [[1, 40, 50, 60, 2, 70], [3, 4], [9] * 11, [3, 4], [7, 8, 9, 10]]

    answers = await sample(model, prompts, SamplingParams(max_tokens=9, seed=5))

    top_k = model.config.num_experts_per_tok
    for prompt, answer in zip(prompts, answers, strict=True):
        routes = answer.routed_experts
        token_ids = [*prompt, *answer.token_ids]
        assert routes.dtype.name == "int8"
        assert routes[:-1].tolist() == expected_routes(model, token_ids, top_k)[:-1]
        assert (routes[-1] == -1).all()


async def test_routes_are_not_returned_unless_they_are_asked_for():
    generator = TransformersGenerator(build(MODELS["qwen3"]()), end_ids=[])
    try:
        answer = await generator.generate([1, 2, 3], SamplingParams(max_tokens=2))
    finally:
        await generator.close()

    assert answer.routed_experts is None


async def test_a_model_without_experts_is_refused_when_it_is_loaded():
    model = build(transformers.LlamaConfig(**SHAPE))

    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        TransformersGenerator(model, return_routed_experts=True)


async def test_a_closed_generator_leaves_no_hook_on_the_model():
    model = build(MODELS["qwen3"]())

    await sample(model, [[1, 2, 3]], SamplingParams(max_tokens=2))

    assert all(not module._forward_pre_hooks for module in model.modules())


async def test_a_forward_pass_of_somebody_else_leaves_nothing_in_the_routes():
    model = build(MODELS["qwen3"]())
    prompt = [1, 40, 50, 60]
    generator = TransformersGenerator(model, end_ids=[], return_routed_experts=True)
    try:
        expected_routes(model, prompt, 2)
        answer = await generator.generate(prompt, SamplingParams(max_tokens=1))
    finally:
        await generator.close()

    assert answer.routed_experts.shape == (5, 3, 2)


async def test_tokens_keep_the_routes_they_were_sampled_with_when_the_weights_change(tmp_path):
    old, new = (
        build_tiny_model(tmp_path / str(seed), architecture="qwen3_moe", seed=seed)
        for seed in (0, 1)
    )
    prompt, is_sampling = [1, 40, 50, 60], anyio.Event()
    generator = TransformersGenerator(load(old), end_ids=[], return_routed_experts=True)

    async def generate():
        return await generator.generate(
            prompt,
            SamplingParams(max_tokens=200, seed=1),
            on_token=lambda *_: is_sampling.set(),
        )

    async def update() -> None:
        await is_sampling.wait()
        await generator.update_weights(DirectoryWeights(path=str(new)), "2")

    try:
        answer, _ = await gather_bounded(lambda job: job(), [generate, update])
    finally:
        await generator.close()

    assert [span.version for span in answer.weight_versions] == ["0", "2"]
    token_ids = [*prompt, *answer.token_ids]
    # The last token that the old weights sampled is computed with the new ones.
    change = len(prompt) + answer.weight_versions[0].end - 1
    routes = answer.routed_experts.tolist()
    assert routes[:change] == expected_routes(load(old), token_ids, 2)[:change]
    assert routes[change:-1] == expected_routes(load(new), token_ids, 2)[change:-1]
