"""What the next prompt of a long conversation costs, beside rendering it once as any server must.

Processor time of the thread: rendering holds the interpreter, and other work of the machine says
nothing about it.
"""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.comparison import Comparison, take_turns
from gymrl.generation.chat import ChatFormat
from gymrl.generation.prefix import TruePrefix
from gymrl.testing import build_tiny_tokenizer

TARGET = 0.5
NUM_TURNS = 32
_WORDS = [
    "the",
    "a",
    "model",
    "of",
    "language",
    "reward",
    "tokens",
    "sampled",
    "prompt",
    "turn",
    "with",
    "and",
    "number",
    "is",
    "are",
]


def _conversation(num_words: int) -> list[dict[str, Any]]:
    numbers = random.Random(0)
    per_message = max(1, num_words // (2 * NUM_TURNS))
    return [
        {"role": role, "content": " ".join(numbers.choices(_WORDS, k=per_message))}
        for _ in range(NUM_TURNS)
        for role in ("user", "assistant")
    ]


class _Subject:
    """A conversation whose last answer was sampled, and its next prompt."""

    def __init__(self, num_words: int, calls: int) -> None:
        self._calls = calls
        self._chat = ChatFormat(build_tiny_tokenizer())
        self._messages = _conversation(num_words)
        self._place = len(self._messages) - 1
        prompt = self._chat.render(self._messages[: self._place])
        sampled = self._chat.encode(self._messages[self._place]["content"])
        self._prefix = TruePrefix(prompt, [*sampled, min(self._chat.end_ids)])
        self._asked = 0

    def _question(self) -> list[dict[str, Any]]:
        self._asked += 1
        return [*self._messages, {"role": "user", "content": f"and now {self._asked}?"}]

    async def continued(self) -> float:
        """Seconds of one next prompt, as the server makes it."""
        questions = [self._question() for _ in range(self._calls)]
        started = time.thread_time()
        for messages in questions:
            self._chat.continue_from(self._prefix, messages, self._place)
        return (time.thread_time() - started) / self._calls

    async def rendered(self) -> float:
        """Seconds to write the conversation and tokenise it, once and as a whole."""
        questions = [self._question() for _ in range(self._calls)]
        started = time.thread_time()
        for messages in questions:
            text = self._chat.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            self._chat.encode(text)
        return (time.thread_time() - started) / self._calls


async def measure(calls: int, rounds: int, sizes: tuple[int, ...]) -> list[Comparison]:
    """Milliseconds of the next prompt after histories of so many words."""
    found = []
    for num_words in sizes:
        subject = _Subject(num_words, calls)
        turns = await take_turns(subject.continued, {"rendering it once": subject.rendered}, rounds)
        found.append(
            Comparison(
                name=f"the next prompt after {num_words} words",
                unit="ms",
                sides={side: 1000 * s for side, s in turns.medians(own="the splice").items()},
                ratio="the splice by rendering once",
                value=turns.times_longer("rendering it once"),
                target=TARGET,
                at_least=False,
                note=f"{NUM_TURNS} turns before it; processor time",
            )
        )
    return found
