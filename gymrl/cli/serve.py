"""``gymrl serve``: a model behind the OpenAI API, alone, until interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import typer

from gymrl.actors import spawn
from gymrl.cli import interrupt
from gymrl.cli.consoles import configure_logging, error_console
from gymrl.generation.service import GenerationService

if TYPE_CHECKING:
    from gymrl.config import GenerationConfig

_HEALTH_EVERY_S = 5.0


async def serve(config: GenerationConfig) -> None:
    """Load the model, serve it, print its URL on standard output; runs until cancelled.

    Raises:
        ConfigError: The model cannot be found.
        GenerationError: The generator broke while serving.
    """
    async with spawn(GenerationService, in_process=True, config=config) as service:
        endpoint = await service.call("start")
        typer.echo(
            f"serving {config.model} as {endpoint.model!r} at {endpoint.base_url} "
            f"(context {endpoint.max_model_len} tokens); Ctrl-C ends it"
        )
        while True:
            await anyio.sleep(_HEALTH_EVERY_S)
            await service.call("health_check")


def serve_command(config: GenerationConfig) -> int:
    """Run the command.

    Returns:
        0 after Ctrl-C or SIGTERM: that is how it is meant to end.
    """
    console = error_console()
    configure_logging(console, verbose=False)
    console.print(f"loading {config.model}", markup=False, highlight=False)
    try:
        interrupt.run(lambda: serve(config), lambda name: console.print(f"{name}: closing"))
    except interrupt.Interrupted:
        return 0
    return 0
