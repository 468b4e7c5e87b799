"""The command line: ``gymrl rollout``, ``eval``, ``doctor``, ``serve``, ``view``, ``benchmarks``.

Thin over the library: options become a configuration, the engine runs it, the records module writes
it. Exit codes: 0, 1 when a row failed or the run broke, 2 when an option, a setting or a row is
wrong, 128 + n when signal n ended it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: Without the program's name; None: the process's own.

    Raises:
        SystemExit: Always, with the exit code.
    """
    from gymrl.cli.app import run_app

    _import_from_working_directory()
    raise SystemExit(run_app(list(sys.argv[1:] if arguments is None else arguments)))


def _import_from_working_directory() -> None:
    """Let entrypoints name modules of the working directory, as ``python -m gymrl`` does.

    At the end of the path, so that no file there stands in for an installed module.
    """
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        if (directory := os.getcwd()) not in sys.path:
            sys.path.append(directory)
