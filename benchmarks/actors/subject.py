"""The actor that is measured."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import numpy as np
import numpy.typing as npt

from gymrl.actors import Actor

TOKENS = 2048
TEXT = "six kilobytes of text".ljust(6000, ".")


class Message(msgspec.Struct):
    """One message of a row, as arrays."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    text: str


class ListMessage(msgspec.Struct):
    """One message of a row, as lists."""

    token_ids: list[int]
    logprobs: list[float]
    text: str


class Bench(Actor):
    """Methods that do next to nothing."""

    async def noop(self) -> None:
        """Do nothing."""

    async def add(self, a: str, b: int) -> list[int]:
        """Return little."""
        return [b]

    async def rows(self, count: int) -> AsyncIterator[list[Message]]:
        """Rows of two messages."""
        ids = np.arange(TOKENS, dtype=np.int32)
        logprobs = np.linspace(-5, 0, TOKENS, dtype=np.float32)
        row = [Message(ids, logprobs, TEXT), Message(ids, logprobs, TEXT)]
        for _ in range(count):
            yield row

    async def list_rows(self, count: int) -> AsyncIterator[list[ListMessage]]:
        """The same with lists."""
        ids = list(range(100_000, 100_000 + TOKENS))
        logprobs = [-0.001 * i for i in range(TOKENS)]
        row = [ListMessage(ids, logprobs, TEXT), ListMessage(ids, logprobs, TEXT)]
        for _ in range(count):
            yield row

    async def take(self, array: npt.NDArray[np.uint8]) -> int:
        """Take a large array."""
        return int(array[-1])

    async def give(self, size: int) -> npt.NDArray[np.uint8]:
        """Give a large array."""
        return self._array_of(size)

    def _array_of(self, size: int) -> npt.NDArray[np.uint8]:
        if getattr(self, "_array", None) is None or self._array.nbytes != size:
            self._array = np.ones(size, np.uint8)
        return self._array
