"""The handle of an actor that lives in a child process."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import anyio

from gymrl.actors import messages
from gymrl.actors.activity import ProcessActivity
from gymrl.actors.channel import Channel
from gymrl.actors.codec import RoundTrip
from gymrl.actors.expiry import fell_silent
from gymrl.actors.failures import start_error
from gymrl.actors.linked import LinkedHandle
from gymrl.actors.loading import locate
from gymrl.actors.process import ChildProcess
from gymrl.concurrency import OwnedTasks, wait_for_end
from gymrl.errors import ActorDiedError, ActorError, ActorStartError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.actors.actor import Actor
    from gymrl.actors.options import SpawnOptions

logger = logging.getLogger(__name__)

# How long a closed actor's interpreter may take to end after its close() has run.
_EXIT_S = 2.0
# How long the other half of an end (link, process) may lag behind the first.
_SETTLE_S = 0.5


class ProcessHandle(LinkedHandle):
    """A handle whose actor lives in a child process of its own."""

    def __init__(self, cls: type[Actor], name: str, options: SpawnOptions) -> None:
        super().__init__(cls, name, options)
        self._start_message = locate(cls, name)
        self._process: ChildProcess | None = None
        self._link_error: Exception | None = None
        self._closer: asyncio.Task[None] | None = None
        self._close_error: Exception | None = None
        self._death: tuple[str, str] | None = None
        self._reason = ""
        self._was_killed = False
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid if self._process is not None else 0

    # --- starting --------------------------------------------------------------------------------

    async def open(self, setup: dict[str, Any]) -> None:
        """Start the child, load the class in it and run its set-up.

        Raises:
            ActorStartError: The child did not come up, or import or set-up failed; it carries the
                child's traceback, and the error itself as its cause.
        """
        arguments = self.contract.setup.bind((), setup, RoundTrip())
        process = self._process = ChildProcess(self.name, self._options)
        try:
            self._watchers = [
                self._tasks.start(process.watch(), "process"),
                self._tasks.start(process.output.follow(), "output"),
                self._tasks.start(self._notice_death(process), "end"),
            ]
            hello, outcome = self._expect(messages.Hello), self._expect(messages.Ready)
            channel = await Channel.over(
                process.link, self._options, process.lane, self._on_message, self._on_lost
            )
            self._attach(channel)
            channel.send(messages.Hello(messages.PROTOCOL_VERSION, process.pid))
            await self._within(hello, self._options.handshake_timeout_s, "handshake_timeout_s")
            channel.send(
                self._start_message,
                arguments,
                self.contract.setup.arguments_root,
                self.contract.setup.bytes_in_arguments,
            )
            await self._within(outcome, self._options.start_timeout_s, "start_timeout_s")
            if self._options.heartbeat_timeout_s is not None:
                heartbeat = self._listen(channel, process, self._options.heartbeat_timeout_s)
                self._watchers.append(self._tasks.start(heartbeat, "heartbeat"))
        except BaseException:
            process.kill()
            await self._shut_down()
            raise

    async def _listen(self, channel: Channel, process: ChildProcess, seconds: float) -> None:
        """Kill a child that has fallen silent; its death then fails what is in flight."""
        is_silent = await fell_silent(
            channel,
            seconds,
            self._link_lost,
            self._beat,
            is_computing=ProcessActivity(process.pid).is_computing,
        )
        if is_silent and not self._is_closing:
            self._reason = (
                f" because its event loop showed nothing for heartbeat_timeout_s={seconds:g} s: it "
                "is stopped, or stuck in a call that does not come back"
            )
            logger.error("%s (process %d) is killed%s", self.name, process.pid, self._reason)
            process.kill()

    async def _within(self, future: asyncio.Future[Any], seconds: float, setting: str) -> None:
        done, _ = await asyncio.wait((future,), timeout=seconds)
        if not done:
            lines = self._process.output.last_lines if self._process is not None else ""
            what = "say hello" if setting == "handshake_timeout_s" else "finish its set-up"
            raise ActorStartError(
                f"{self.name} did not {what} within {seconds:g} s (SpawnOptions.{setting})"
                f"{_quoted(lines)}",
                actor=self.name,
                stderr=lines,
            )
        future.result()

    # --- what the link and the process report ----------------------------------------------------

    def _on_message(
        self, head: Any, payload: memoryview, region: memoryview | None, size: int
    ) -> None:
        match head:
            case messages.Hello(version=version):
                self._settle(messages.Hello, self._false_version(version))
            case messages.Ready():
                self._settle(messages.Ready, None)
            case messages.Refused():
                self._settle(
                    messages.Ready, start_error(self._caller.decode_error(payload), self.name)
                )
            case messages.Closed():
                if self._process is not None:
                    self._process.has_closed = True
                if payload:
                    self._close_error = self._caller.decode_error(payload)
                self._settle(messages.Closed, None)
            case _:
                logger.warning("%s sent %s out of turn", self.name, type(head).__name__)

    def _on_lost(self, error: Exception | None) -> None:
        self._link_error = error
        self._link_lost.set()

    async def _notice_death(self, process: ChildProcess) -> None:
        """Wait for the process or the link to end, then fail what is in flight."""
        async with anyio.create_task_group() as group:

            async def first(event: Callable[[], Any]) -> None:
                await event()
                group.cancel_scope.cancel()

            group.start_soon(first, process.wait)
            group.start_soon(first, self._link_lost.wait)
        # The last messages before a death are still read; a link that broke ends its process.
        if await process.wait(_SETTLE_S):
            with anyio.move_on_after(_SETTLE_S):
                await self._link_lost.wait()
        else:
            process.kill()
            await process.wait()
        process.output.drain()
        self._caller.end(self._died)
        for kind in list(self._arrived):
            self._settle(kind, self._died_early() if kind is not messages.Closed else None)
        self._report_death()

    def _died(self) -> ActorDiedError:
        process = self._process
        assert process is not None
        if self._death is None:
            # One text for all errors of this death: there may be thousands.
            lines = process.output.last_lines
            broke = f"; the link broke: {self._link_error}" if self._link_error else ""
            how = f"{process.how_it_ended}{self._reason}{broke}{_quoted(lines)}"
            self._death = (f"{self.name} (process {process.pid}) {how}", lines)
        text, lines = self._death
        return ActorDiedError(
            text,
            actor=self.name,
            exit_code=process.exit_code,
            signal=process.signal,
            stderr=lines,
        )

    def _died_early(self) -> Exception:
        died = self._died()
        error = ActorStartError(
            f"{self.name} did not start: {died}", actor=self.name, stderr=died.stderr
        )
        error.__cause__ = died
        return error

    # --- the end ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the child and all it started; what is in flight fails within moments."""
        self._was_killed = True
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Close the actor, end its process and wait; see :meth:`ActorHandle.close`."""
        if self._process is None:
            return
        if self._closer is None:
            self._begin_close()
            self._closer = OwnedTasks(self.name).start(self._close(), "close")
        await wait_for_end(self._closer)
        failure, self._close_error = self._close_error, None
        if failure is not None:
            raise failure

    async def _close(self) -> None:
        process, channel = self._process, self._channel
        assert process is not None
        name = self.name
        try:
            if channel is not None and not channel.is_lost and not process.has_ended:
                closed = self._expect(messages.Closed)
                seconds = self._options.close_timeout_s
                channel.send(messages.Close(seconds))
                await asyncio.wait((closed,), timeout=seconds + _SETTLE_S)
                if not closed.done():
                    logger.warning("%s did not close within %g s and is killed", name, seconds)
                elif not await process.wait(_EXIT_S):
                    logger.warning("%s closed but did not exit and is killed", name)
                elif not (process.has_closed or self._was_killed):
                    logger.warning("its close() did not run to its end: %s", self._died())
        except ActorError as error:
            logger.debug("%s was gone before it could close: %s", name, error)
        finally:
            process.kill()
            await self._shut_down()

    async def _shut_down(self) -> None:
        """Wait for the killed process, and give back everything. Does not wait long."""
        process, channel = self._process, self._channel
        assert process is not None
        try:
            with anyio.CancelScope(shield=True):
                await process.wait(_EXIT_S)
                if channel is not None:
                    channel.abort()
                    with anyio.move_on_after(_EXIT_S):
                        await self._link_lost.wait()
                await self._tasks.close()
        finally:
            if channel is None:
                process.link.close()
                process.lane.close()
            process.release()
            self._forget_arrivals()
            self._caller.end(self._closed_error)


def _quoted(lines: str) -> str:
    return f"; its last lines:\n{lines}" if lines else ""
