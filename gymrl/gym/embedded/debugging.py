"""A debugger in an environment: left, it ends the program; in a worker, it has no terminal."""

from __future__ import annotations

import os
import signal

from gymrl.actors.lifeline import MARK

# What `quit` raises in pdb, and in pytest's pdb.
_QUITS = frozenset({"bdb.BdbQuit", "_pytest.outcomes.Exit"})


def left_debugger(error: BaseException) -> str | None:
    """What to say of an error that a debugger raised as it was left; None of any other.

    In the user's own process the program is interrupted, as by Ctrl-C: otherwise the row would be
    attempted again, and the breakpoint stop again. A worker reads its input from nowhere, so there a
    debugger leaves at once.
    """
    if f"{type(error).__module__}.{type(error).__qualname__}" not in _QUITS:
        return None
    if MARK in os.environ:
        return (
            f"{error!r}: a breakpoint in a worker process has no terminal; run in one process "
            "(in_process=True, --in-process)"
        )
    signal.raise_signal(signal.SIGINT)
    return f"{error!r}: the debugger was left"
