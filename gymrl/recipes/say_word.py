"""A task that a model of half a million parameters learns from nothing in a few minutes.

"say the word cat": the reward is 1 if the first word of the reply is the one asked for, 0.2 if it
comes later, else 0. The partial credit gives a model that babbles something to climb. This module
has the environment, the tasks, and the untrained model with its word-level tokenizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymrl.benchmark.base import simple_agent_servers
from gymrl.gym.embedded.resources import ResourcesServer, Verdict
from gymrl.recipes.tiny_model import word_tokenizer, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from gymrl.gym.embedded.reply import Reply

WORDS = ("red", "blue", "green", "cat", "dog", "sun", "moon", "tree")
"""The words that may be asked for."""

ROUTE = "say_word"
PARTIAL_CREDIT = 0.2

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
    """Write an untrained model that knows the words; see :func:`~.tiny_model.write_tiny_model`.

    Args:
        directory: Appears whole; one that exists is left as it is.
        seed: Of the weights.
        layers: Each has 0.26 million parameters.

    Returns:
        The directory.
    """
    words = ("user", "assistant", "system", "say", "the", "word", ":", ".", *WORDS)
    return write_tiny_model(directory, word_tokenizer(words, _TEMPLATE), seed=seed, layers=layers)
