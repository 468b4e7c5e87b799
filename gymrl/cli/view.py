"""``gymrl view``: a page over a file of rollouts, until interrupted."""

from __future__ import annotations

import os
import webbrowser
from typing import TYPE_CHECKING

import anyio

from gymrl.cli.consoles import output_console
from gymrl.cli.rollout_files import file_of
from gymrl.cli.serving import run_until_interrupted
from gymrl.generation.models import SHIPPED, resolve_model
from gymrl.viewer import new_token, open_viewer

if TYPE_CHECKING:
    from pathlib import Path

    from gymrl.viewer import ViewerOptions

TOKEN_VARIABLE = "GYMRL_VIEW_TOKEN"


def token_of(required: bool) -> str | None:
    """The token that a browser must bring: the environment's, a new one where one is required."""
    return os.environ.get(TOKEN_VARIABLE) or (new_token() if required else None)


def tokenizer_of(name: str | None) -> str | None:
    """What the viewer loads for a name: the directory of a shipped model, any other name as it is.

    Raises:
        ConfigError: A shipped model can't be fetched.
    """
    return resolve_model(name) if name in SHIPPED else name


async def view(path: Path, options: ViewerOptions, *, browser: bool) -> None:
    """Show the file, print the address on standard output; runs until cancelled.

    Raises:
        ConfigError: As :func:`gymrl.viewer.open_viewer`.
    """
    async with open_viewer(path, options) as viewer:
        # One line, whole: it is to be clicked or copied.
        console = output_console()
        console.print(viewer.url, markup=False, highlight=False, soft_wrap=True)
        console.file.flush()
        if browser:
            await anyio.to_thread.run_sync(webbrowser.open, viewer.url)
        await anyio.sleep_forever()


def view_command(path: Path, options: ViewerOptions, *, browser: bool) -> int:
    """Run the command.

    Returns:
        0 after Ctrl-C or SIGTERM: that is how it is meant to end.
    """
    path = file_of(path)
    return run_until_interrupted(
        lambda: view(path, options, browser=browser), f"showing {path}; Ctrl-C ends it"
    )
