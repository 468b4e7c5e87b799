"""A task that a model of half a million parameters learns from nothing in a few minutes.

"say the word cat": the reward is 1 if the first word of the reply is the one asked for, 0.2 if it
comes later, else 0. The partial credit gives a model that babbles something to climb. This module
has the environment, the tasks, and the untrained model with its word-level tokenizer.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from gymrl.benchmark.base import simple_agent_servers
from gymrl.generation.transformers import without_progress_bars
from gymrl.gym.embedded.resources import ResourcesServer, Verdict

if TYPE_CHECKING:
    from gymrl.gym.embedded.reply import Reply

WORDS = ("red", "blue", "green", "cat", "dog", "sun", "moon", "tree")
"""The words that may be asked for."""

ROUTE = "say_word"
PARTIAL_CREDIT = 0.2

_SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<unk>")
_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + ' ' + message.content + '<|im_end|> ' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant ' }}{%- endif %}"""


class SayWordServer(ResourcesServer):
    """The environment: rows have ``word``, the one to say."""

    async def verify(self, row: dict[str, Any], reply: Reply, state: None) -> Verdict:
        """See the module."""
        said = reply.text.split()
        word = row["word"]
        reward = 1.0 if said[:1] == [word] else PARTIAL_CREDIT if word in said else 0.0
        return Verdict(reward=reward, extras={"said": said})


def say_word_rows() -> list[dict[str, Any]]:
    """One task a word, as dataset rows."""
    return [
        {
            "task_id": f"{ROUTE}-{word}",
            "task_source": ROUTE,
            "word": word,
            "responses_create_params": {
                "input": [{"role": "user", "content": f"say the word {word}"}]
            },
        }
        for word in WORDS
    ]


def say_word_servers() -> dict[str, Any]:
    """The environment and an agent in front of it, in Gym's shape."""
    settings = {"entrypoint": f"{SayWordServer.__module__}:{SayWordServer.__qualname__}"}
    return simple_agent_servers(ROUTE, ROUTE, settings, max_steps=1)


def build_word_model(directory: str | Path, *, seed: int = 0, layers: int = 2) -> Path:
    """Write an untrained Llama with a word-level tokenizer and a ChatML template.

    Args:
        directory: Appears whole, so that ranks may build it side by side; one that exists is left
            as it is.
        seed: Of the weights; torch's global generator is left as it was.
        layers: Each has 0.26 million parameters.

    Returns:
        The directory.
    """
    target = Path(directory)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = _build_tokenizer()
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
    with tempfile.TemporaryDirectory(dir=target.parent) as parent:
        aside = Path(parent) / "model"
        with without_progress_bars():
            model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        with contextlib.suppress(OSError):  # another rank was first
            aside.rename(target)
    return target


def _build_tokenizer() -> Any:
    words = [*_SPECIAL, "user", "assistant", "system", "say", "the", "word", ":", ".", *WORDS]
    model = models.WordLevel(
        {word: i for i, word in enumerate(words)}, unk_token="<unk>"
    )  # a token of a text, not a secret
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = _TEMPLATE
    return fast
