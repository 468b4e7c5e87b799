"""The decode loop's padding, positions and cache merging fit every kind of attention model."""

import pytest
import torch
import transformers

from gymrl.concurrency import gather_bounded
from gymrl.config import SamplingParams
from gymrl.errors import ConfigError
from gymrl.generation.fidelity import RecordedSequence, check_fidelity
from gymrl.generation.transformers import TransformersGenerator

SHAPE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE = {**SHAPE, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def build(config) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


ATTENTION = {
    "grouped queries": lambda: transformers.Qwen3Config(**WIDE),
    "sliding window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=8),
    "mixed windows": lambda: transformers.Gemma3TextConfig(
        **WIDE, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "experts": lambda: transformers.Qwen3MoeConfig(**WIDE, **EXPERTS),
    "learned positions": lambda: transformers.GPT2Config(
        vocab_size=200,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=512,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


@pytest.mark.parametrize("kind", ATTENTION)
async def test_a_batch_of_any_attention_model_agrees_with_a_plain_forward_pass(kind):
    model = build(ATTENTION[kind]())
    generator = TransformersGenerator(model, end_ids=[], max_batch_size=4)
    sampling = SamplingParams(max_tokens=24)
    prompts = [[5 + i] * (3 + 6 * i) for i in range(7)]
    results = await gather_bounded(lambda ids: generator.generate(ids, sampling), prompts)
    await generator.close()
    sequences = [
        RecordedSequence.of_call(prompt, result.token_ids, result.logprobs, sampling)
        for prompt, result in zip(prompts, results, strict=True)
    ]
    report = check_fidelity(model, sequences, max_tokens=100)
    assert report.num_tokens == 7 * 24
    assert report.agrees(), report


RECURRENT = {
    "state space": lambda: transformers.MambaConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "linear attention": lambda: transformers.Qwen3NextConfig(
        **WIDE, **EXPERTS, shared_expert_intermediate_size=32
    ),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_model_with_a_recurrent_state_is_refused(kind):
    """Left padding would silently run through its state."""
    with pytest.raises(ConfigError, match="keeps a recurrent state"):
        TransformersGenerator(build(RECURRENT[kind]()))
