"""The callee's side of a link: runs the methods that messages ask for."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.actors import messages
from gymrl.actors.codec import ValueDecoder
from gymrl.actors.failures import describe
from gymrl.actors.frames import ABSENT
from gymrl.actors.streams import Window
from gymrl.concurrency import OwnedTasks
from gymrl.errors import ActorClosedError, ActorError, EncodeError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.actors.actor import Actor
    from gymrl.actors.channel import Channel
    from gymrl.actors.contract import ActorContract, MethodContract

logger = logging.getLogger(__name__)


class _Work:
    """One call or stream that runs here."""

    def __init__(self, task: asyncio.Task[None], window: Window | None) -> None:
        self.task = task
        self.window = window
        self.cancelled = False


class ActorService:
    """Serves one actor to one channel.

    Every call runs in a task of its own, and ends in exactly one message.

    Args:
        actor: Its set-up has run.
        contract: The methods that may be called.
        channel: Where messages come from and go to.
        name: For logs.
    """

    def __init__(self, actor: Actor, contract: ActorContract, channel: Channel, name: str) -> None:
        self._actor = actor
        self._contract = contract
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._decoder = ValueDecoder()
        self._work: dict[int, _Work] = {}
        self._tasks = OwnedTasks(name)
        self._receive: dict[type, Callable[[Any, memoryview, memoryview | None], None]] = {
            messages.Call: self._on_call,
            messages.Open: self._on_open,
            messages.Credit: self._on_credit,
            messages.Cancel: self._on_cancel,
            messages.Ping: self._on_ping,
        }

    def on_message(self, head: Any, payload: memoryview, region: memoryview | None) -> bool:
        """Take a message of the caller; returns whether it was one of ours."""
        handler = self._receive.get(type(head))
        if handler is None:
            return False
        handler(head, payload, region)
        return True

    async def stop(self) -> None:
        """Cancel what runs and wait for its end."""
        for work in self._work.values():
            work.cancelled = True
        await self._tasks.close()

    # --- messages --------------------------------------------------------------------------------

    def _on_call(self, head: messages.Call, payload: memoryview, region: memoryview | None) -> None:
        contract = self._contract.methods.get(head.method)
        arguments = self._arguments(head.id, contract, "call", payload, region)
        if arguments is not None and contract is not None:
            self._start(head.id, self._call(head.id, contract, arguments), None, contract)

    def _on_open(self, head: messages.Open, payload: memoryview, region: memoryview | None) -> None:
        contract = self._contract.methods.get(head.method)
        arguments = self._arguments(head.id, contract, "stream", payload, region)
        if arguments is not None and contract is not None:
            window = Window(head.window, head.window_bytes)
            stream = self._stream(head.id, contract, arguments, window)
            self._start(head.id, stream, window, contract)

    def _arguments(
        self,
        number: int,
        contract: MethodContract | None,
        kind: str,
        payload: memoryview,
        region: memoryview | None,
    ) -> msgspec.Struct | None:
        if contract is None or contract.kind != kind:
            self._fail(number, AttributeError(f"{self._contract.name} has no such {kind}"))
            return None
        try:
            arguments: msgspec.Struct = self._decoder.decode(payload, region, contract.arguments)
        except msgspec.ValidationError as error:
            self._fail(number, EncodeError(f"{contract.label}(): {error}"))
            return None
        except ProtocolError as error:
            self._fail(number, error)
            return None
        return arguments

    def _start(
        self, number: int, coroutine: Any, window: Window | None, contract: MethodContract
    ) -> None:
        try:
            task = self._tasks.start(coroutine, contract.name)
        except RuntimeError:
            self._fail(number, ActorClosedError(f"{self._contract.name} is closing"))
            return
        self._work[number] = _Work(task, window)

    def _on_credit(
        self, head: messages.Credit, payload: memoryview, region: memoryview | None
    ) -> None:
        work = self._work.get(head.id)
        if work is not None and work.window is not None:
            work.window.credit(head.items)

    def _on_cancel(
        self, head: messages.Cancel, payload: memoryview, region: memoryview | None
    ) -> None:
        work = self._work.get(head.id)
        if work is not None and not work.cancelled:
            work.cancelled = True
            # Not at once: a task cancelled before its first step would never send its end.
            self._loop.call_soon(work.task.cancel)

    def _on_ping(self, head: messages.Ping, payload: memoryview, region: memoryview | None) -> None:
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
            self._work.pop(number, None)

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
            self._work.pop(number, None)

    def _end_with(self, number: int, error: BaseException) -> None:
        work = self._work.get(number)
        if isinstance(error, asyncio.CancelledError) and work is not None and work.cancelled:
            self._send(messages.Cancelled(number))
        else:
            self._fail(number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        self._send(messages.Failed(number), describe(error))

    def _send(self, head: messages.Message, payload: object = ABSENT) -> None:
        try:
            self._channel.send(head, payload)
        except ActorError as error:
            logger.debug("%s was not sent: %s", type(head).__name__, error)
