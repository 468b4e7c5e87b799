"""The caller's side of a link: calls and streams by number, and how each of them ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.actors import messages
from gymrl.actors.codec import RoundTrip, ValueDecoder
from gymrl.actors.failures import MAX_ECHO, ErrorData, bounded, rebuild
from gymrl.actors.streams import ActorStream, StreamState
from gymrl.errors import ActorClosedError, ActorError, EncodeError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.actors.channel import Channel
    from gymrl.actors.contract import ActorContract, MethodContract
    from gymrl.actors.frames import Handler
    from gymrl.actors.options import SpawnOptions

logger = logging.getLogger(__name__)


class Caller:
    """Calls and streams under way over one channel.

    Args:
        name: The actor's name, for errors.
        contract: Its methods.
        options: Windows and deadlines.

    Attributes:
        channel: The link; its handlers must include `handlers`.
        handlers: Who takes which message of the callee.
    """

    def __init__(self, name: str, contract: ActorContract, options: SpawnOptions) -> None:
        self.name = name
        self._contract = contract
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._calls: dict[int, tuple[asyncio.Future[Any], MethodContract]] = {}
        self._streams: dict[int, StreamState] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._round_trip = RoundTrip()
        self._decoder = ValueDecoder()
        self._decode_error = self._decoder.compile(ErrorData)
        self._decoders = {
            method: self._decoder.compile(method.result) for method in contract.methods.values()
        }
        self._end: Callable[[], Exception] | None = None
        self.channel: Channel | None = None
        self.handlers: dict[type, Handler] = {
            messages.Result: self._on_result,
            messages.Item: self._on_item,
            messages.End: self._on_end,
            messages.Failed: self._on_failed,
            messages.Cancelled: self._on_cancelled,
            messages.Pong: self._on_pong,
        }

    @property
    def in_flight(self) -> int:
        """Calls and streams that have not ended."""
        return len(self._calls) + len(self._streams)

    @property
    def ended(self) -> bool:
        """Whether no call can be made any more."""
        return self._end is not None

    def end(
        self,
        make_error: Callable[[], Exception],
        make_stream_error: Callable[[str], Exception] | None = None,
    ) -> None:
        """Fail all that is in flight, and every later call; each gets an error of its own.

        Args:
            make_error: Makes the error of a call.
            make_stream_error: Makes the error of an open stream from its label, when that differs.
        """
        if self._end is None:
            self._end = make_error
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            if not future.done():
                future.set_exception(make_error())
        streams, self._streams = self._streams, {}
        for state in streams.values():
            state.end(make_stream_error(state.label) if make_stream_error else make_error())
        pings, self._pings = self._pings, {}
        for waiter in pings.values():
            waiter.cancel()

    def _open_channel(self) -> Channel:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"{self.name} was opened in another event loop; a handle belongs to one loop"
            )
        if self._end is not None:
            raise self._end()
        if self.channel is None:
            raise ActorClosedError(f"{self.name} is not open", actor=self.name)
        return self.channel

    # --- calls -----------------------------------------------------------------------------------

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Bind, send, and wait for the end of a call; see :meth:`ActorHandle.call`."""
        contract = self._contract.method(method, "call")
        arguments = contract.bind(args, kwargs, self._round_trip)
        channel = self._open_channel()
        if channel.is_full:
            await channel.drain()
            channel = self._open_channel()
        number = next(self._ids)
        future = self._loop.create_future()
        if not channel.is_lost:  # else how it ended will be known in a moment
            channel.send(
                messages.Call(number, contract.name),
                arguments,
                contract.arguments_root,
                contract.bytes_in_arguments,
            )
        self._calls[number] = (future, contract)
        try:
            return await future
        except asyncio.CancelledError:
            if number in self._calls:
                await self._cancel_call(number, contract)
            raise

    async def _cancel_call(self, number: int, contract: MethodContract) -> None:
        """Cancel the callee and wait, bounded, until it says that it has ended."""
        acknowledged = self._loop.create_future()
        self._calls[number] = (acknowledged, contract)
        self._send_quietly(messages.Cancel(number))
        seconds = self._options.cancel_timeout_s
        try:
            with anyio.move_on_after(seconds, shield=True) as scope:
                await asyncio.wait((acknowledged,))
            if scope.cancelled_caught:
                logger.warning(
                    "%s of %s did not end within %g s of its cancellation and is left behind "
                    "(SpawnOptions.cancel_timeout_s); kill() ends it with its process",
                    contract.label,
                    self.name,
                    seconds,
                )
        finally:
            self._calls.pop(number, None)
            if acknowledged.done() and not acknowledged.cancelled():
                acknowledged.exception()  # the caller is cancelled; how the callee ended is moot
            else:
                acknowledged.cancel()

    def _send_quietly(self, head: messages.Message) -> None:
        """Send to a peer that may be gone; its death is reported by the channel."""
        try:
            self._open_channel().send(head)
        except ActorError as error:
            logger.debug("%s to %s was not sent: %s", type(head).__name__, self.name, error)

    # --- streams ---------------------------------------------------------------------------------

    def stream(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorStream:
        """A stream, checked but not started; see :meth:`ActorHandle.stream`."""
        contract = self._contract.method(method, "stream")
        options = self._options
        state = StreamState(
            self,
            f"{contract.label} of {self.name}",
            options.stream_window,
            options.stream_window_bytes,
            options.cancel_timeout_s,
        )
        state.contract = contract
        state.arguments = contract.bind(args, kwargs, self._round_trip)
        return ActorStream(state)

    def open_stream(self, state: StreamState) -> None:
        """Send the opening message of a stream."""
        channel = self._open_channel()
        contract: MethodContract = state.contract
        state.id = next(self._ids)
        if not channel.is_lost:
            channel.send(
                messages.Open(state.id, contract.name, state.window, state.window_bytes),
                state.arguments,
                contract.arguments_root,
                contract.bytes_in_arguments,
            )
        state.arguments = None
        self._streams[state.id] = state

    def grant(self, state: StreamState, items: int) -> None:
        """Give the producer credit."""
        if state.id in self._streams:
            self._send_quietly(messages.Credit(state.id, items))

    def cancel_stream(self, state: StreamState) -> None:
        """Ask the producer to stop."""
        if state.id in self._streams:
            self._send_quietly(messages.Cancel(state.id))

    # --- health ----------------------------------------------------------------------------------

    async def ping(self, seconds: float) -> bool:
        """Whether the callee's event loop answers within so many seconds."""
        channel = self.channel
        if self._end is not None or channel is None or channel.is_lost:
            return False
        token = next(self._ids)
        waiter = self._pings[token] = self._loop.create_future()
        try:
            self._send_quietly(messages.Ping(token))
            await asyncio.wait((waiter,), timeout=seconds)
            return waiter.done() and not waiter.cancelled()
        finally:
            self._pings.pop(token, None)
            waiter.cancel()

    # --- messages of the callee ------------------------------------------------------------------

    @staticmethod
    def _false_result(contract: MethodContract, fault: Exception) -> EncodeError:
        text = bounded(str(fault), MAX_ECHO)
        return EncodeError(f"{contract.result_root} is not what its annotation says: {text}")

    def _on_result(
        self, head: messages.Result, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        entry = self._calls.pop(head.id, None)
        if entry is None:
            return
        future, contract = entry
        if future.done():
            return
        try:
            future.set_result(self._decoder.decode(payload, region, self._decoders[contract]))
        except msgspec.ValidationError as error:
            future.set_exception(self._false_result(contract, error))
        except ProtocolError as error:
            future.set_exception(error)

    def _on_item(
        self, head: messages.Item, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        state = self._streams.get(head.id)
        if state is None or state.cancelled:
            return
        try:
            item = self._decoder.decode(payload, region, self._decoders[state.contract])
        except (msgspec.ValidationError, ProtocolError) as fault:
            self._send_quietly(messages.Cancel(head.id))
            del self._streams[head.id]
            is_typing = isinstance(fault, msgspec.ValidationError)
            state.end(self._false_result(state.contract, fault) if is_typing else fault)
        else:
            state.push(item, size)

    def _on_end(
        self, head: messages.End, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        state = self._streams.pop(head.id, None)
        if state is not None:
            state.end(None)

    def _on_failed(
        self, head: messages.Failed, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        self._fail(head.id, self.decode_error(payload))

    def decode_error(self, payload: memoryview) -> Exception:
        """The exception in a payload."""
        try:
            data: ErrorData = self._decoder.decode(payload, None, self._decode_error)
        except (msgspec.ValidationError, ProtocolError) as error:
            return ProtocolError(f"an error of {self.name} does not decode: {error}")
        return rebuild(data, self.name)

    def _on_cancelled(
        self, head: messages.Cancelled, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        self._fail(
            head.id, ActorClosedError(f"{self.name} is closing and ended the call", actor=self.name)
        )

    def _on_pong(
        self, head: messages.Pong, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        waiter = self._pings.pop(head.token, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _fail(self, number: int, error: Exception) -> None:
        entry = self._calls.pop(number, None)
        if entry is not None:
            if not entry[0].done():
                entry[0].set_exception(error)
            return
        state = self._streams.pop(number, None)
        if state is not None:
            state.end(None if state.cancelled else error)
