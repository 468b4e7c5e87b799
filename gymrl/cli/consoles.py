"""Where text goes: results to standard output, everything else to standard error."""

from __future__ import annotations

import logging
import os
import sys

from rich.console import Console
from rich.logging import RichHandler

_PIPE_WIDTH = 160


def _width(is_terminal: bool) -> int | None:
    """None lets rich ask the terminal; a pipe has no width, so tables get room."""
    if is_terminal or "COLUMNS" in os.environ:
        return None
    return _PIPE_WIDTH


def output_console() -> Console:
    """Standard output, for results."""
    return Console(width=_width(sys.stdout.isatty()))


def error_console() -> Console:
    """Standard error, for progress, logs and errors."""
    return Console(stderr=True, width=_width(sys.stderr.isatty()))


def printable(text: str) -> str:
    """A text of somebody else's on one line: what would move a cursor, colour, or turn text is written out."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def printable_lines(text: str) -> str:
    """As :func:`printable`, over lines and tabulators that stay."""
    if text.isprintable():
        return text
    lines = text.expandtabs().split("\n")
    return "\n".join(map(printable, lines))


class _PlainFormatter(logging.Formatter):
    """Of records that quote servers, environments and models."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def configure_logging(console: Console, *, verbose: bool) -> None:
    """Send log records to `console`: warnings, and gymrl's own information when `verbose`."""
    handler: logging.Handler
    if console.is_terminal:
        # Through the console, so that lines scroll above the live display.
        handler = RichHandler(console=console, show_path=False, markup=False)
        handler.setFormatter(_PlainFormatter("%(name)s: %(message)s"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("gymrl").setLevel(logging.INFO if verbose else logging.WARNING)
