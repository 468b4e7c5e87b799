"""Answers that are sent as server-sent events while they are sampled.

Each of the APIs has its own chunks; here is what they have in common: choices that are sampled side by
side, a client that may be gone, and failures that no status can tell any more.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import anyio
import msgspec
from aiohttp import web

from gymrl.generation.http_errors import Told, told

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from gymrl.generation.base import TokenCallback

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ClientGoneError(ConnectionError):
    """Nobody reads the answer any more."""


class Events(Protocol):
    """Where the events of an answer go."""

    @property
    def path(self) -> str:
        """Of the request."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the client was sent anything."""
        ...

    async def send(self, data: bytes) -> None:
        """Write to the client."""
        ...


class EventStream:
    """An answer of server-sent events, opened by the first of them.

    Until then a failure has a status of its own, which is what clients look at before they try again.

    Args:
        request: What is answered.
    """

    def __init__(self, request: web.Request) -> None:
        self.response = web.StreamResponse(headers={"Cache-Control": "no-cache"})
        self.response.content_type = "text/event-stream"
        self._request = request

    @property
    def path(self) -> str:
        """Of the request."""
        return self._request.path

    @property
    def is_open(self) -> bool:
        """Whether the client was sent anything."""
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        """Write to the client.

        Raises:
            ClientGoneError: It is gone.
        """
        try:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(data)
        except ConnectionError as error:
            raise ClientGoneError(str(error)) from error


def putting(stream: MemoryObjectSendStream[T]) -> Callable[[T], None]:
    """What puts items into a stream; those that come when nobody reads it any more are dropped.

    A decoding thread may have tokens on their way when the call is cancelled.
    """

    def put(item: T) -> None:
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            stream.send_nowait(item)

    return put


@dataclass(frozen=True, kw_only=True)
class Chunks(Generic[T]):
    """An answer of one or more choices in chunks.

    Attributes:
        envelope: What every chunk holds.
        num_choices: How many choices are sampled.
        sample: Samples the choice of an index, and tells its tokens as they come.
        opening: What else the first chunk of the choice of an index holds.
        token: The choice in the chunk of a token, of its index, token id and log-probability.
        last: The choice in its last chunk, of its index and sample.
        usage: Of all choices' samples in order; None: it was not asked for.
    """

    envelope: dict[str, Any]
    num_choices: int
    sample: Callable[[int, TokenCallback], Awaitable[T]]
    opening: Callable[[int], dict[str, Any]]
    token: Callable[[int, int, float], dict[str, Any]]
    last: Callable[[int, T], dict[str, Any]]
    usage: Callable[[list[T]], dict[str, Any]] | None


@dataclass(frozen=True)
class _Token:
    index: int
    token_id: int
    logprob: float


@dataclass(frozen=True)
class _Sampled(Generic[T]):
    index: int
    sample: T


async def write_chunks(stream: Events, chunks: Chunks[T]) -> None:
    """Sample every choice and write its chunks; cancelling ends the generations.

    Args:
        stream: Where they go.
        chunks: What is sampled and how it is written.

    Raises:
        ClientGoneError: The client is gone.
        Exception: What went wrong before the first event.
    """
    samples: dict[int, T] = {}

    async def tell(error: Told) -> None:
        await _write(stream, {"error": error.fields})

    if not await write_or_tell(stream, lambda: _write_choices(stream, chunks, samples), tell):
        return
    if chunks.usage is not None:
        usage = chunks.usage([samples[index] for index in range(chunks.num_choices)])
        await _write(stream, {**chunks.envelope, "choices": [], "usage": usage})
    await stream.send(b"data: [DONE]\n\n")


async def write_or_tell(
    stream: Events,
    write: Callable[[], Awaitable[None]],
    tell: Callable[[Told], Awaitable[None]],
) -> bool:
    """Write events; an error after the first is one of its own, as there is no status left to tell it with.

    Args:
        stream: Where they go.
        write: Writes the events.
        tell: Writes the event of an error.

    Returns:
        Whether all was written.

    Raises:
        ClientGoneError: The client is gone.
        Exception: What went wrong before the first event.
    """
    failed: list[Exception] = []
    is_gone = False
    try:
        await write()
    except* ClientGoneError:
        is_gone = True
    except* Exception as errors:  # noqa: BLE001 - raised or told below
        failed.extend(errors.exceptions)
    if is_gone:
        raise ClientGoneError("the client of a stream is gone")
    if not failed:
        return True
    if not stream.is_open:
        raise failed[0]
    logger.error("a streamed generation failed", exc_info=failed[0])
    await tell(told(failed[0], stream.path))
    return False


async def _write_choices(stream: Events, chunks: Chunks[T], samples: dict[int, T]) -> None:
    sending: MemoryObjectSendStream[_Token | _Sampled[T]]
    receive: MemoryObjectReceiveStream[_Token | _Sampled[T]]
    sending, receive = anyio.create_memory_object_stream(math.inf)

    put = putting(sending)

    async def sample(index: int) -> None:
        sampled = await chunks.sample(
            index,
            lambda token_id, logprob: put(_Token(index, token_id, logprob)),
        )
        put(_Sampled(index, sampled))

    async with sending, receive, anyio.create_task_group() as group:
        for index in range(chunks.num_choices):
            group.start_soon(sample, index)
        event = await receive.receive()
        for index in range(chunks.num_choices):
            await _write(stream, {**chunks.envelope, **chunks.opening(index)})
        while True:
            if isinstance(event, _Sampled):
                samples[event.index] = event.sample
                choice = chunks.last(event.index, event.sample)
            else:
                choice = chunks.token(event.index, event.token_id, event.logprob)
            await _write(stream, {**chunks.envelope, "choices": [choice]})
            if len(samples) == chunks.num_choices:
                return
            event = await receive.receive()


async def _write(stream: Events, event: dict[str, Any]) -> None:
    await stream.send(b"data: " + msgspec.json.encode(event) + b"\n\n")
