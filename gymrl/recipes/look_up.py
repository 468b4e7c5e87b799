"""A task of several turns that a model of half a million parameters learns: ask a tool, then say it.

Each task has a table of its own, from words to words, that only the tool ``lookup`` can read. The
model is asked for the word under another one; it must call the tool with that word, read the
answer, and say it. The reward has two parts: ``looked_up``, 0.2 if the tool was asked for the right
word, and ``answered``, 0.8 if the final message begins with what the table holds. Who guesses
without looking gets 0.1 on average.

Spelling a call at random is hopeless, so the untrained model is first shown conversations that are
mostly wrong: in three of four calls the word is drawn at random, and so is what is said in the end.
It then knows how calls look and does the right thing now and then; the rest is left to the reward.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from gymrl.benchmark.base import simple_agent_servers
from gymrl.gym.embedded.base import RefusedRequest
from gymrl.gym.embedded.resources import ResourcesServer, ToolError, Verdict, tool
from gymrl.recipes.say_word import WORDS
from gymrl.recipes.tiny_model import word_tokenizer, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gymrl.gym.embedded.reply import Reply

ROUTE = "look_up"
MAX_STEPS = 3
"""Model calls of an attempt."""

LOOKED_UP, ANSWERED = 0.2, 0.8

_CALL = ("<tool_call>", '{"name":"lookup","arguments":{"name":"', '"}}', "</tool_call>")
_TEMPLATE = """\
{%- if tools %}<|im_start|>system tools : {% for tool in tools %}{{ tool.function.name + ' ' }}\
{%- endfor %}<|im_end|> {% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + ' ' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call> {"name":"lookup","arguments":{"name":" ' }}
{{- call.function.arguments.name | string | trim + ' "}} </tool_call> ' }}
{%- endfor %}
{{- message.content + '<|im_end|> ' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant ' }}{%- endif %}"""

_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "lookup",
    "description": "The word under a word.",
    "parameters": {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "strict": True,
}

_SHOWN_STEPS = 150
_SHOWN_BATCH = 32
_SHOWN_LEARNING_RATE = 1e-3
_SHOWN_RIGHT = 0.25


class LookUpServer(ResourcesServer):
    """The environment: rows have ``table`` (words by word) and ``word``, the one asked for."""

    async def seed_session(self, row: dict[str, Any]) -> dict[str, str]:
        """The session's table.

        Raises:
            RefusedRequest: The row has no table with the word that it asks for.
        """
        table = row.get("table")
        if not isinstance(table, dict) or row.get("word") not in table:
            raise RefusedRequest("the row's table must be words by word, its word among them")
        return dict(table)

    @tool
    async def lookup(self, state: dict[str, str], name: str) -> str:
        """The word under a word."""
        found = state.get(name.strip())
        if found is None:
            raise ToolError(f"no entry {name[:100]!r}")
        return found

    async def verify(self, row: dict[str, Any], reply: Reply, state: Any) -> Verdict:
        """See the module."""
        word = row["word"]
        asked = [_asked_for(call.arguments) for call in reply.tool_calls]
        said = reply.text.split()
        looked_up = LOOKED_UP if word in asked else 0.0
        answered = ANSWERED if said[:1] == [row["table"][word]] else 0.0
        return Verdict(
            reward=looked_up + answered,
            components={"looked_up": looked_up, "answered": answered},
            extras={"asked": asked, "said": said},
        )


def _asked_for(arguments: str) -> str | None:
    try:
        name = msgspec.json.decode(arguments, type=dict[str, Any]).get("name")
    except msgspec.DecodeError:
        return None
    return name.strip() if isinstance(name, str) else None


def look_up_rows(count: int = 256, *, seed: int = 0) -> list[dict[str, Any]]:
    """Tasks with random tables, as dataset rows.

    Args:
        count: How many.
        seed: Decides them.
    """
    draw = random.Random(f"{ROUTE}:{seed}")
    rows = []
    for index in range(count):
        word = WORDS[index % len(WORDS)]
        rows.append(
            {
                "task_id": f"{ROUTE}-{seed}-{index}",
                "task_source": ROUTE,
                "table": {key: draw.choice(WORDS) for key in WORDS},
                "word": word,
                "responses_create_params": {
                    "input": [{"role": "user", "content": f"what is under {word}"}],
                    "tools": [_TOOL],
                },
            }
        )
    return rows


def look_up_servers() -> dict[str, Any]:
    """The environment and an agent in front of it, in Gym's shape."""
    settings = {"entrypoint": f"{LookUpServer.__module__}:{LookUpServer.__qualname__}"}
    return simple_agent_servers(ROUTE, ROUTE, settings, MAX_STEPS)


def build_look_up_model(directory: str | Path, *, seed: int = 0, layers: int = 2) -> Path:
    """Write a model that was shown conversations, most of them wrong; some seconds.

    Args:
        directory: Appears whole; one that exists is left as it is.
        seed: Of the weights and the words it was shown.
        layers: Each has 0.26 million parameters.

    Returns:
        The directory.
    """
    frame = ("user", "assistant", "system", "tool", "tools", ":", "lookup", "what", "is", "under")
    tokenizer = word_tokenizer((*frame, *_CALL, *WORDS), _TEMPLATE)
    return write_tiny_model(directory, tokenizer, seed=seed, layers=layers, prepare=_show)


def _show(model: Any, tokenizer: Any) -> None:
    """Maximum likelihood of what the assistant says in conversations as the module describes."""
    asked, called, answer, said = range(4)
    frame, other = (_conversation(tokenizer, WORDS[i : i + 4]) for i in (0, 4))
    places = (frame != other).nonzero()[:, 0]  # of the four words
    spoken = _spoken(frame.tolist(), tokenizer)
    words = torch.tensor(tokenizer.convert_tokens_to_ids(list(WORDS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_SHOWN_LEARNING_RATE, weight_decay=0.0)
    model.train()
    for _ in range(_SHOWN_STEPS):
        drawn = torch.randint(len(WORDS), (_SHOWN_BATCH, 4))
        is_right = torch.rand(_SHOWN_BATCH, 2) < _SHOWN_RIGHT
        drawn[:, called] = torch.where(is_right[:, 0], drawn[:, asked], drawn[:, called])
        drawn[:, said] = torch.where(is_right[:, 1], drawn[:, answer], drawn[:, said])
        ids = frame.repeat(_SHOWN_BATCH, 1)
        ids[:, places] = words[drawn]
        logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        loss = -logprobs.gather(-1, ids[:, 1:, None])[:, spoken].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _conversation(tokenizer: Any, words: Sequence[str]) -> torch.Tensor:
    """The tokens of one: asked for, called with, answered, said. All have the same length."""
    asked, called, answer, said = words
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"name": called}}}
    text = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": f"what is under {asked}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": f"{said} "},
        ],
        tools=[{"type": "function", "function": {"name": "lookup"}}],
        tokenize=False,
    )
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False))


def _spoken(ids: list[int], tokenizer: Any) -> list[int]:
    """Places before the tokens that the assistant says, its ends of turn among them."""
    role, end = tokenizer.convert_tokens_to_ids(["assistant", "<|im_end|>"])
    places: list[int] = []
    is_speaking = False
    for place, token in enumerate(ids[:-1]):
        is_speaking = (is_speaking and token != end) or token == role
        if is_speaking:
            places.append(place)
    return places
