"""Ctrl-C and SIGTERM: the first ends the run in order and in time, the second at once.

Whichever way this process ends, its workers notice and end too, in their own time. When time is up
here, they are killed with everything they started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from types import FrameType

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ORDERLY_EXIT_S = 2.3
"""Seconds that an orderly end may take after the first signal; then the process exits anyway."""


class Interrupted(Exception):
    """The run was ended by a signal.

    Attributes:
        exit_code: 128 + the signal's number, as a shell expects.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def exit_now(code: int) -> NoReturn:
    """Kill every child, with its process group where it leads one, and exit without clean-up."""
    for child in _children():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(child) == child:
                os.killpg(child, signal.SIGKILL)
            else:
                os.kill(child, signal.SIGKILL)
    os._exit(code)


def _children() -> list[int]:
    """Process ids of this process's children; none where the kernel does not tell."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


class _Watch:
    """Signal handlers around one event loop."""

    def __init__(
        self,
        scope: anyio.CancelScope,
        on_interrupt: Callable[[str], None],
        late_code: int | None,
    ) -> None:
        self.caught: int | None = None
        self._scope = scope
        self._late_code = late_code
        self._on_interrupt = on_interrupt
        self._loop = asyncio.get_running_loop()

    def handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.caught is not None:
            exit_now(128 + number)
        self.caught = number
        late_code = 128 + number if self._late_code is None else self._late_code
        timer = threading.Timer(ORDERLY_EXIT_S, exit_now, (late_code,))
        timer.daemon = True
        timer.start()
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._on_interrupt(signal.Signals(self.caught or 0).name)
        self._scope.cancel()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals in the block; the handlers before come back after it."""
        before = {number: signal.signal(number, self.handle) for number in SIGNALS}
        try:
            yield
        finally:
            if self.caught is None:
                for number, handler in before.items():
                    signal.signal(number, handler)


def run(
    function: Callable[[], Awaitable[T]],
    on_interrupt: Callable[[str], None],
    *,
    late_code: int | None = None,
) -> T:
    """Run `function` in an event loop of its own until it returns or a signal ends it.

    Args:
        function: What to run; it is cancelled by the first SIGINT, SIGTERM or SIGHUP and has
            :data:`ORDERLY_EXIT_S` seconds to close what it opened. After that, or at a second
            signal, the process exits without another word.
        on_interrupt: Told the signal's name, in the loop, before the cancellation.
        late_code: Of an exit because closing took too long; None: 128 + the signal's number.

    Raises:
        Interrupted: A signal ended it, and everything was closed in time.
    """

    async def supervised() -> T:
        with anyio.CancelScope() as scope:
            watch = _Watch(scope, on_interrupt, late_code)
            with watch.installed():
                return await function()
        raise Interrupted(watch.caught or signal.SIGINT)

    return anyio.run(supervised, backend_options={"use_uvloop": True})
