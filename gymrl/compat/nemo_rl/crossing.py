"""From the caller's event loop, or none, into the loop that a :class:`NemoGym` keeps in a thread.

Callers of NeMo RL start their environment from plain code and roll out from one event loop after
another. Processes and connections belong to one loop, so that loop is kept apart and stays.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from anyio.from_thread import BlockingPortal

T = TypeVar("T")


async def call_across(
    portal: BlockingPortal, function: Callable[..., Coroutine[Any, Any, T]], *args: Any
) -> T:
    """Await ``function(*args)`` in the portal's loop, from another loop.

    When this is cancelled, the call there is cancelled, and has ended by the time this ends.
    """
    scope: list[anyio.CancelScope] = []
    cancelled = False

    async def run() -> T:
        with anyio.CancelScope() as own:
            scope.append(own)
            if cancelled:
                own.cancel()
            return await function(*args)
        raise asyncio.CancelledError

    async def cancel() -> None:
        for own in scope:
            own.cancel()

    running = asyncio.wrap_future(portal.start_task_soon(run))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancelled = True
        with anyio.CancelScope(shield=True):
            await asyncio.wrap_future(portal.start_task_soon(cancel))
            await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at, so that it is not reported as lost
        raise


async def stream_across(
    portal: BlockingPortal, open_stream: Callable[[], AsyncGenerator[T, None]]
) -> AsyncGenerator[T, None]:
    """The items of a stream that lives in the portal's loop.

    Leaving early closes the stream there and waits for that.
    """

    async def opened() -> AsyncGenerator[T, None]:
        return open_stream()

    stream = await call_across(portal, opened)
    ended: Any = object()

    async def following() -> T:
        item: T = await anext(stream, ended)
        return item

    try:
        while (item := await call_across(portal, following)) is not ended:
            yield item
    finally:
        with anyio.CancelScope(shield=True):
            await call_across(portal, stream.aclose)
