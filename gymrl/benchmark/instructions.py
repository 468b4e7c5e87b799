"""Short texts to write under instructions that a program checks.

Each task asks for a text on a topic and adds instructions of different groups, which therefore never
contradict each other: a length, words to use or to leave out, upper or lower case, a form, an ending.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.benchmark.base import (
    Benchmark,
    generator_seed,
    refuse_unknown_params,
    require_count,
    simple_agent_servers,
    task_id,
)
from gymrl.config import SamplingParams
from gymrl.errors import ConfigError
from gymrl.gym.embedded.instructions import (
    AnyConstraint,
    Avoids,
    Bullets,
    Case,
    EndsWith,
    Includes,
    NoCommas,
    Paragraphs,
    WordCount,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "instruction_following"
DESCRIPTION = "short texts under instructions that a program checks: length, words, case, form"

_TOPICS = [
    "a walk along the river",
    "how bread is baked",
    "the first day at a new school",
    "why bees matter",
    "a market in the morning",
    "learning to ride a bicycle",
    "a lighthouse in a storm",
    "the train that came late",
    "how to plant a tree",
    "a letter from an old friend",
    "cleaning a bicycle chain",
    "the sound of rain on a roof",
]
_WORDS = ["stone", "window", "garden", "silver", "paper", "bridge", "lantern", "cloud", "kettle"]
_ENDINGS = ["That is all.", "And so it goes.", "Thank you for reading."]
_COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}

_Instruction = tuple[str, AnyConstraint]


def _length(draw: random.Random) -> _Instruction:
    least = draw.choice([20, 30, 40])
    if draw.random() < 0.5:
        return f"Use at least {least} words.", WordCount(least=least)
    most = least + draw.choice([20, 40])
    return f"Use between {least} and {most} words.", WordCount(least=least, most=most)


def _word(draw: random.Random) -> _Instruction:
    word, times = draw.choice(_WORDS), draw.choice([1, 2])
    if draw.random() < 0.3:
        return f'Do not use the word "{word}".', Avoids(word)
    amount = "at least twice" if times == 2 else "at least once"
    return f'Use the word "{word}" {amount}.', Includes(word, times)


def _letters(draw: random.Random) -> _Instruction:
    if draw.random() < 0.5:
        return "Write in lower case only.", Case("lower")
    return "Write in upper case only.", Case("upper")


def _form(draw: random.Random) -> _Instruction:
    count = draw.choice([2, 3, 4])
    if draw.random() < 0.5:
        text = f"Write exactly {_COUNTS[count]} paragraphs with an empty line between them."
        return text, Paragraphs(count)
    text = f'Include exactly {_COUNTS[count]} bullet points, each on a line that begins with "- ".'
    return text, Bullets(count)


def _punctuation(_: random.Random) -> _Instruction:
    return "Do not use commas.", NoCommas()


def _ending(draw: random.Random) -> _Instruction:
    ending = draw.choice(_ENDINGS)
    return f'End with these words and nothing after them: "{ending}"', EndsWith(ending)


_GROUPS: tuple[Callable[[random.Random], _Instruction], ...] = (
    _length,
    _word,
    _letters,
    _form,
    _punctuation,
    _ending,
)


def _row(index: int, seed: int, count: int, draw: random.Random) -> dict[str, Any]:
    groups = sorted(draw.sample(range(len(_GROUPS)), count))
    chosen = [_GROUPS[group](draw) for group in groups]
    prompt = " ".join([f"Write about {draw.choice(_TOPICS)}.", *(text for text, _ in chosen)])
    return {
        "task_id": task_id(NAME, seed, index),
        "task_source": NAME,
        "constraints": [msgspec.to_builtins(constraint) for _, constraint in chosen],
        "responses_create_params": {"input": [{"role": "user", "content": prompt}]},
    }


def load_instructions(*, num_tasks: int, seed: int, params: dict[str, Any]) -> Benchmark:
    """Generate tasks.

    Args:
        num_tasks: How many.
        seed: Decides the tasks; a shorter benchmark is the beginning of a longer one.
        params: ``num_instructions`` (1 to 6, default 2): instructions in each task; ``scoring``
            (``all``, the default, or ``share``): what a reply earns that keeps some of them.

    Raises:
        ConfigError: An unknown parameter, or one out of range.
    """
    require_count(num_tasks)
    refuse_unknown_params(NAME, params, ["num_instructions", "scoring"])
    count = params.get("num_instructions", 2)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(_GROUPS):
        raise ConfigError(
            f"num_instructions={count!r}: must be an integer from 1 to {len(_GROUPS)}",
            setting="num_instructions",
        )
    scoring = params.get("scoring", "all")
    if scoring not in ("all", "share"):
        raise ConfigError(f"scoring={scoring!r}: must be all or share", setting="scoring")
    base = generator_seed(NAME, seed)
    resources = {
        "entrypoint": "gymrl.gym.embedded.instructions:InstructionServer",
        "scoring": scoring,
    }
    return Benchmark(
        name=NAME,
        description=DESCRIPTION,
        rows=tuple(_row(i, seed, count, random.Random(base + i)) for i in range(num_tasks)),
        servers=simple_agent_servers(NAME, NAME, resources, max_steps=1),
        sampling=SamplingParams(max_tokens=256),
    )
