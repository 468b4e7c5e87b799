"""``gymrl serve``: a model behind the OpenAI API, alone, until interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import typer

from gymrl.actors import spawn
from gymrl.cli.serving import HEALTH_EVERY_S, run_until_interrupted
from gymrl.generation.service import GenerationService

if TYPE_CHECKING:
    from gymrl.config import GenerationConfig


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
            await anyio.sleep(HEALTH_EVERY_S)
            await service.call("health_check")


def serve_command(config: GenerationConfig) -> int:
    """Run the command.

    Returns:
        0 after Ctrl-C or SIGTERM: that is how it is meant to end.
    """
    return run_until_interrupted(lambda: serve(config), f"loading {config.model}")
