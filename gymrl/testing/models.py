"""Tiny real models, built offline in a second or two, for tests that want a real forward pass.

The weights are random but seeded, and spread widely enough that the distribution over the next
token is far from flat: a wrong log-probability shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gymrl.extras import optional_imports
from gymrl.generation.model_loading import without_progress_bars

with optional_imports():
    import torch
    import transformers

Architecture = Literal["llama", "qwen3", "qwen3_moe", "mixtral"]

CHATML_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""ChatML with hermes tool calls and reasoning, in the manner of Qwen's."""

_CORPUS = [
    "hello world, what is the capital of France? Paris is the capital.",
    "system user assistant tool",
    "add 1 and 2 to get 3, then multiply 12 by 34.",
    '{"name": "calculator", "arguments": {"expression": "1 + 2"}}',
    "The answer is 42. I can help you with that.",
] * 20


def build_tiny_tokenizer(template: str = CHATML_TEMPLATE) -> Any:
    """A byte-level BPE tokenizer of a few hundred tokens with a chat template.

    ``<tool_call>`` and ``<think>`` and their closing tags are single tokens that survive decoding,
    as in Qwen's vocabulary; the turn markers are special.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return with_template(tokenizer, template)


def with_template(tokenizer: Any, template: str, **special_tokens: Any) -> Any:
    """A tokenizer that was built, as transformers has them, with its chat template.

    Args:
        tokenizer: Of the ``tokenizers`` library; its turns end with ``<|im_end|>``.
        template: The chat template.
        special_tokens: As transformers' ``PreTrainedTokenizerFast`` takes them.
    """
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        **special_tokens,
    )
    fast.chat_template = template
    return fast


def tiny_shape(tokenizer: Any, max_model_len: int) -> dict[str, Any]:
    """The settings that the text models here have in common.

    Args:
        tokenizer: Of the model.
        max_model_len: Context in tokens.
    """
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,  # vLLM's attention on a CPU takes multiples of 32
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.2,
    }


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ARCHITECTURES: dict[Architecture, Callable[..., Any]] = {
    "llama": transformers.LlamaConfig,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": partial(transformers.Qwen3MoeConfig, num_experts=8, **_EXPERTS),
    "mixtral": partial(
        transformers.MixtralConfig, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    ),
}


def build_tiny_model(
    directory: str | Path,
    *,
    architecture: Architecture = "llama",
    seed: int = 0,
    max_model_len: int = 2048,
    template: str = CHATML_TEMPLATE,
) -> Path:
    """Write a tiny random model with its tokenizer, as ``save_pretrained`` does.

    Args:
        directory: Made if missing.
        architecture: All have grouped-query attention; Qwen3 normalises queries and keys.
            ``qwen3_moe`` and ``mixtral`` are mixtures of eight experts, two of them a token.
        seed: Of the weights; torch's global generator is left as it was.
        max_model_len: Context in tokens.
        template: The chat template.

    Returns:
        The directory.
    """
    target = Path(directory)
    tokenizer = build_tiny_tokenizer(template)
    config = _ARCHITECTURES[architecture](**tiny_shape(tokenizer, max_model_len))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with without_progress_bars():
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
