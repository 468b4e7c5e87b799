"""The callee's side of a link: runs the methods that messages ask for."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING

import msgspec

from gymrl.actors import messages
from gymrl.actors.codec import ValueDecoder
from gymrl.actors.failures import MAX_ECHO, bounded, describe, describe_briefly
from gymrl.actors.streams import Window
from gymrl.concurrency import OwnedTasks
from gymrl.errors import ActorError, EncodeError, FrameTooLargeError, ProtocolError

if TYPE_CHECKING:
    from gymrl.actors.actor import Actor
    from gymrl.actors.channel import Channel
    from gymrl.actors.contract import ActorContract, MethodContract
    from gymrl.actors.frames import Handler

logger = logging.getLogger(__name__)


class ActorService:
    """Serves one actor to one channel.

    Every call runs in a task of its own, and ends in exactly one message.

    Args:
        actor: Its set-up has run.
        contract: The methods that may be called.
        channel: Where messages come from and go to.
        name: For logs.

    Attributes:
        handlers: Who takes which message; add them to the channel's.
    """

    def __init__(self, actor: Actor, contract: ActorContract, channel: Channel, name: str) -> None:
        self._actor = actor
        self._contract = contract
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._decoder = ValueDecoder()
        self._decoders = {
            method: self._decoder.compile(method.arguments) for method in contract.methods.values()
        }
        self._running: dict[int, asyncio.Task[None]] = {}
        self._windows: dict[int, Window] = {}
        self._cancelled: set[int] = set()
        self._tasks = OwnedTasks(name)
        self.handlers: dict[type, Handler] = {
            messages.Call: self._on_call,
            messages.Open: self._on_open,
            messages.Credit: self._on_credit,
            messages.Cancel: self._on_cancel,
            messages.Ping: self._on_ping,
        }

    async def stop(self) -> None:
        """Cancel what runs and wait for its end."""
        self._cancelled.update(self._running)
        await self._tasks.close()

    # --- messages --------------------------------------------------------------------------------

    def _on_call(
        self, head: messages.Call, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        self._refuse_doubles(head.id)
        contract = self._contract.methods.get(head.method)
        try:
            arguments = self._arguments(contract, "call", payload, region)
            assert contract is not None
            task = self._tasks.start(self._call(head.id, contract, arguments), contract.name)
        except (AttributeError, EncodeError, ProtocolError, RuntimeError) as error:
            self._fail(head.id, error)
        else:
            self._running[head.id] = task

    def _on_open(
        self, head: messages.Open, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        self._refuse_doubles(head.id)
        contract = self._contract.methods.get(head.method)
        window = Window(head.window, head.window_bytes)
        try:
            arguments = self._arguments(contract, "stream", payload, region)
            assert contract is not None
            stream = self._stream(head.id, contract, arguments, window)
            task = self._tasks.start(stream, contract.name)
        except (AttributeError, EncodeError, ProtocolError, RuntimeError) as error:
            self._fail(head.id, error)
        else:
            self._running[head.id] = task
            self._windows[head.id] = window

    def _refuse_doubles(self, number: int) -> None:
        if number in self._running:
            raise ProtocolError(f"the caller used number {number} for two calls at once")

    def _arguments(
        self,
        contract: MethodContract | None,
        kind: str,
        payload: memoryview,
        region: memoryview | None,
    ) -> msgspec.Struct:
        if contract is None or contract.kind != kind:
            raise AttributeError(f"{self._contract.name} has no such {kind}")
        try:
            arguments: msgspec.Struct = self._decoder.decode(
                payload, region, self._decoders[contract]
            )
        except msgspec.ValidationError as error:
            raise EncodeError(f"{contract.label}(): {bounded(str(error), MAX_ECHO)}") from None
        return arguments

    def _on_credit(
        self, head: messages.Credit, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        window = self._windows.get(head.id)
        if window is not None:
            window.credit(head.items)

    def _on_cancel(
        self, head: messages.Cancel, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        task = self._running.get(head.id)
        if task is not None and head.id not in self._cancelled:
            self._cancelled.add(head.id)
            # Not at once: a task cancelled before its first step would never send its end.
            self._loop.call_soon(task.cancel)

    def _on_ping(
        self, head: messages.Ping, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        self._send(messages.Pong(head.token))

    # --- work ------------------------------------------------------------------------------------

    async def _call(self, number: int, contract: MethodContract, arguments: msgspec.Struct) -> None:
        try:
            result = await contract.invoke(self._actor, arguments)
            if self._channel.is_full:
                await self._channel.drain()
            self._channel.send(
                messages.Result(number),
                result,
                contract.result_root,
                contract.bytes_in_result,
            )
        except BaseException as error:  # noqa: BLE001  # goes to the caller, whatever it is
            self._end_with(number, error)
        finally:
            self._running.pop(number, None)

    async def _stream(
        self, number: int, contract: MethodContract, arguments: msgspec.Struct, window: Window
    ) -> None:
        send = functools.partial(
            self._channel.send,
            messages.Item(number),
            root=contract.result_root,
            with_bytes=contract.bytes_in_result,
        )
        channel = self._channel
        try:
            items = contract.invoke(self._actor, arguments)
            try:
                async for item in items:
                    if not window.is_open:
                        await window.wait()
                    if channel.is_full:
                        await channel.drain()
                    window.take(send(item))
            finally:
                await items.aclose()
            channel.send(messages.End(number))
        except BaseException as error:  # noqa: BLE001  # goes to the caller, whatever it is
            self._end_with(number, error)
        finally:
            self._running.pop(number, None)
            self._windows.pop(number, None)

    def _end_with(self, number: int, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError) and number in self._cancelled:
            self._send(messages.Cancelled(number))
        else:
            self._fail(number, error)
        self._cancelled.discard(number)

    def _fail(self, number: int, error: BaseException) -> None:
        send_error(self._channel, messages.Failed(number), error)

    def _send(self, head: messages.Message) -> None:
        try:
            self._channel.send(head)
        except ActorError as error:
            logger.debug("%s was not sent: %s", type(head).__name__, error)


def send_error(channel: Channel, head: messages.Message, error: BaseException) -> None:
    """Send an error, whole if it fits, else in brief; a link that is gone is no concern."""
    try:
        try:
            channel.send(head, describe(error))
        except (FrameTooLargeError, EncodeError) as fault:
            channel.send(head, describe_briefly(error, f"cut short: {fault}"))
    except ActorError as fault:
        logger.debug("%s was not sent: %s", type(head).__name__, fault)
