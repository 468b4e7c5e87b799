"""Models of a third of a million parameters, whose tokenizer knows some dozens of words."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from gymrl.generation.model_loading import without_progress_bars

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<unk>")


def write_tiny_model(
    directory: str | Path,
    tokenizer: Any,
    *,
    seed: int = 0,
    layers: int = 2,
    prepare: Callable[[Any, Any], None] | None = None,
) -> Path:
    """Write a Llama with random weights, and its tokenizer.

    Args:
        directory: Appears whole, so that ranks may build it side by side; one that exists is left
            as it is.
        tokenizer: Of :func:`word_tokenizer`.
        seed: Of the weights and of what `prepare` draws; torch's global generator is left as it
            was.
        layers: Each has 0.26 million parameters.
        prepare: Is given model and tokenizer before they are written, to teach the model something.

    Returns:
        The directory.
    """
    target = Path(directory)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if prepare is not None:
            prepare(model, tokenizer)
    with tempfile.TemporaryDirectory(dir=target.parent) as parent:
        aside = Path(parent) / "model"
        with without_progress_bars():
            model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        with contextlib.suppress(OSError):  # another rank was first
            aside.rename(target)
    return target


def word_tokenizer(words: Sequence[str], template: str) -> Any:
    """A tokenizer that has a token for each word between blanks, and a chat template.

    Args:
        words: All that it knows, beside the marks of turns and padding.
        template: In jinja; words and marks must have blanks between them.
    """
    vocabulary = {word: i for i, word in enumerate((*_SPECIAL, *words))}
    model = models.WordLevel(vocabulary, unk_token="<unk>")  # a token of a text, not a secret
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer
