"""The commands that serve until they are interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymrl.cli import interrupt
from gymrl.cli.consoles import configure_logging, error_console

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

HEALTH_EVERY_S = 5.0
"""Seconds between two looks at what is served."""


def run_until_interrupted(serve: Callable[[], Awaitable[None]], opening: str) -> int:
    """Run a command that only a signal ends.

    Args:
        serve: Serves until it is cancelled.
        opening: Said first, on standard error.

    Returns:
        0 after Ctrl-C or SIGTERM: that is how it is meant to end.
    """
    console = error_console()
    configure_logging(console, verbose=False)
    console.print(opening, markup=False, highlight=False)
    try:
        interrupt.run(serve, lambda name: console.print(f"{name}: closing"), late_code=0)
    except interrupt.Interrupted:
        return 0
    return 0
