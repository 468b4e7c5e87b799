"""``gymrl serve``: a model behind the OpenAI API, alone, until interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import typer

from gymrl.actors import spawn
from gymrl.cli.plan import check_batch_size
from gymrl.cli.serving import HEALTH_EVERY_S, run_until_interrupted
from gymrl.config import GenerationConfig, read_mapping
from gymrl.generation.server import listening_socket
from gymrl.generation.service import GenerationService

if TYPE_CHECKING:
    from pathlib import Path


def generation_config(path: Path | None, **given: Any) -> GenerationConfig | None:
    """What to serve; None where nothing names a model.

    Args:
        path: A file of a :class:`~gymrl.config.GenerationConfig`, or of a configuration that has one
            under ``generation``.
        given: Settings of the command line; they win, and None leaves the file's.

    Raises:
        ConfigError: The file can't be read, or a setting is wrong.
    """
    values = {} if path is None else read_mapping(path)
    if isinstance(values.get("generation"), dict):
        values = values["generation"]
    values = {**values, **{name: value for name, value in given.items() if value is not None}}
    if path is None and "model" not in values:
        return None
    check_batch_size(given.get("max_batch_size"), values.get("backend"))
    return GenerationConfig.from_dict(values)


async def serve(config: GenerationConfig) -> None:
    """Load the model, serve it, print its URL on standard output; runs until cancelled.

    Raises:
        ConfigError: The model cannot be found.
        GenerationError: The generator broke while serving.
        ServerStartError: The address can't be listened on.
    """
    # Before the model is loaded, which may take minutes.
    listening_socket(config.host, config.port).close()
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
