"""The worker's main: say hello, load the actor's class, set it up, serve it, close it."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import uvloop

from gymrl.actors import messages
from gymrl.actors.actor import Actor, contract_of
from gymrl.actors.channel import Channel
from gymrl.actors.codec import ValueDecoder
from gymrl.actors.lifeline import GRACE_S
from gymrl.actors.loading import load
from gymrl.actors.options import SpawnOptions
from gymrl.actors.service import ActorService, send_error
from gymrl.errors import ActorError, ProtocolVersionError

if TYPE_CHECKING:
    from gymrl.actors.lifeline import Lifeline

logger = logging.getLogger(__name__)

# New objects that the collector waits for (Python's own: 700).
_COLLECT_AFTER = 10_000


class Worker:
    """One worker process: a link, and the actor it serves."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[tuple[messages.Start, Actor, Any]] = loop.create_future()
        self._ending: asyncio.Future[float] = loop.create_future()
        self._decoder = ValueDecoder()
        self._service: ActorService | None = None
        self._channel: Channel | None = None
        self._lost: asyncio.Future[None] = loop.create_future()

    async def run(self, link: socket.socket, lane: socket.socket, options: SpawnOptions) -> None:
        """Serve until told to close, or until the driver is gone."""
        channel = await Channel.over(link, options, lane, self._on_message, self._on_lost)
        self._channel = channel
        channel.send(messages.Hello(messages.PROTOCOL_VERSION, os.getpid()))
        await asyncio.wait((self._started, self._ending), return_when=asyncio.FIRST_COMPLETED)
        if not self._started.done():
            return
        start, actor, arguments = self._started.result()
        if not await self._set_up(start, actor, arguments):
            return
        channel.send(messages.Ready())
        seconds = await self._ending
        await self._close(actor, seconds)

    def end(self, seconds: float) -> None:
        """Begin to end, with this many seconds for the actor's ``close``."""
        if not self._ending.done():
            self._ending.set_result(seconds)

    async def leave(self) -> None:
        """Send what waits and close the link, within a second."""
        if self._channel is not None:
            self._channel.close()
            await asyncio.wait((self._lost,), timeout=1.0)

    def _on_lost(self, error: Exception | None) -> None:
        if error is not None:
            logger.error("the link to the driver broke: %s", error)
        self.end(GRACE_S / 2)
        if not self._lost.done():
            self._lost.set_result(None)

    def _on_message(
        self, head: Any, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        match head:
            case messages.Hello(version=version):
                if version != messages.PROTOCOL_VERSION:
                    logger.error("the driver speaks protocol version %d", version)
                    self.end(0)
            case messages.Start():
                self._load(head, payload, region)
            case messages.Close(timeout_s=seconds):
                self.end(seconds)
            case messages.Ping(token=token):
                self._send(messages.Pong(token))
            case _:
                logger.error("message %s came out of turn", type(head).__name__)

    def _send(self, head: messages.Message) -> None:
        try:
            if self._channel is not None:
                self._channel.send(head)
        except ActorError as error:
            logger.debug("%s was not sent: %s", type(head).__name__, error)

    def _send_error(self, head: messages.Message, error: BaseException) -> None:
        if self._channel is not None:
            send_error(self._channel, head, error)

    def _load(self, head: messages.Start, payload: memoryview, region: memoryview | None) -> None:
        try:
            actor_class = load(head)
            contract = contract_of(actor_class)
            compiled = self._decoder.compile(contract.setup.arguments)
            arguments = self._decoder.decode(payload, region, compiled)
            actor = actor_class()
            _calm_collector()
        except BaseException as error:  # noqa: BLE001  # an import may raise anything; it goes to the driver
            self._send_error(messages.Refused(), error)
            self.end(0)
            return
        if not self._started.done():
            self._started.set_result((head, actor, arguments))

    async def _set_up(self, start: messages.Start, actor: Actor, arguments: msgspec.Struct) -> bool:
        contract = contract_of(type(actor))
        try:
            await contract.setup.invoke(actor, arguments)
        except BaseException as error:  # noqa: BLE001  # goes to the driver, whatever it is
            self._send_error(messages.Refused(), error)
            return False
        assert self._channel is not None
        self._service = ActorService(actor, contract, self._channel, start.name)
        self._channel.handlers.update(self._service.handlers)
        return True

    async def _close(self, actor: Actor, seconds: float) -> None:
        failure: BaseException | None = None
        with anyio.move_on_after(seconds) as scope:
            try:
                if self._service is not None:
                    await self._service.stop()
                await actor.close()
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001  # goes to the driver, whatever it is
                failure = error
        if scope.cancelled_caught:
            failure = TimeoutError(f"close() did not end within {seconds:g} s")
        if failure is None:
            self._send(messages.Closed())
        else:
            self._send_error(messages.Closed(), failure)


def _calm_collector() -> None:
    """Let the cyclic collector look less often, and never at what imports have made.

    A worker with a thousand calls under way allocates without making cycles; at Python's own
    thresholds a fifth of its time went into walking modules and live calls again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 20)


async def _serve(plan: dict[str, Any], lifeline: Lifeline) -> None:
    options = msgspec.convert(plan["options"], SpawnOptions)
    worker = Worker()
    loop = asyncio.get_running_loop()
    lifeline.when_gone(lambda: loop.call_soon_threadsafe(worker.end, GRACE_S / 2))
    link = socket.socket(fileno=plan["link"])
    lane = socket.socket(fileno=plan["lane"])
    try:
        await worker.run(link, lane, options)
    finally:
        await worker.leave()


def main(plan: dict[str, Any], lifeline: Lifeline) -> None:
    """Be the worker until the end; called by the lifeline script.

    Args:
        plan: Descriptors, limits and name, as the driver wrote them.
        lifeline: Already watching over the driver.
    """
    faulthandler.enable()
    logging.basicConfig(
        level=plan["log_level"], stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    if plan["version"] != messages.PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"the driver speaks protocol version {plan['version']}, this gymrl "
            f"{messages.PROTOCOL_VERSION}",
            local=messages.PROTOCOL_VERSION,
            remote=plan["version"],
        )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(plan, lifeline))
    finally:
        lifeline.finish()
