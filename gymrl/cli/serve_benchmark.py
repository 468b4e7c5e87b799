"""``gymrl serve --benchmark``: a benchmark's servers, with a model of ours or an endpoint, until interrupted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import typer

from gymrl.actors import spawn
from gymrl.api_keys import read_api_key
from gymrl.benchmark.serving import serve_benchmark
from gymrl.benchmark.tasks import TaskRunner
from gymrl.cli.assignments import set_nested
from gymrl.cli.plan import parse_params
from gymrl.cli.serving import HEALTH_EVERY_S, run_until_interrupted
from gymrl.config import GenerationConfig
from gymrl.generation.service import GenerationService

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class ServeBenchmarkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command that concern a benchmark.

    Attributes:
        benchmark: ``NAME`` or ``NAME/FLAVOR``.
        generation: The model to load; None: `base_urls` are asked.
        base_urls: Endpoints, with ``/v1``.
        model_name: What requests ask for.
        api_key_variable: The environment variable that holds the endpoints' key.
        model_type: As of :func:`~gymrl.benchmark.serving.serve_benchmark`.
        params: ``key=value``; a dotted key is a path into the configuration.
        registry_port: Of the registry; None: a free one.
        gym_python: The interpreter that has NeMo Gym.
        roots: Searched for benchmarks before all others.
        work_dir: For the servers' logs.
    """

    benchmark: str
    generation: GenerationConfig | None = None
    base_urls: tuple[str, ...] = ()
    model_name: str = "policy"
    api_key_variable: str | None = None
    model_type: str = "openai_model"
    params: tuple[str, ...] = ()
    registry_port: int | None = None
    gym_python: str | None = None
    roots: tuple[Path, ...] = ()
    work_dir: Path | None = None


def overrides_of(options: ServeBenchmarkOptions, base_urls: list[str]) -> dict[str, Any]:
    """What the benchmark's configuration is overridden with.

    Raises:
        ConfigError: A parameter is malformed or stands in another's way, or the variable of the
            key is not set, or holds what no HTTP header may.
    """
    overrides: dict[str, Any] = {}
    for key, value in parse_params(options.params).items():
        set_nested(overrides, key, value, "--param")
    overrides["policy_base_url"] = base_urls[0] if len(base_urls) == 1 else base_urls
    overrides["policy_model_name"] = options.model_name
    secret = read_api_key(options.api_key_variable, "--api-key-env")
    if secret is not None:
        overrides["policy_api_key"] = secret
    return overrides


async def serve(options: ServeBenchmarkOptions) -> None:
    """Serve, and print the registry's address on standard output; runs until cancelled.

    Raises:
        ConfigError: As :func:`~gymrl.benchmark.serving.serve_benchmark`.
        ServerDiedError: A server is gone; names it.
    """
    async with contextlib.AsyncExitStack() as stack:
        base_urls = list(options.base_urls)
        if options.generation is not None:
            base_urls = [await stack.enter_async_context(_model(options.generation))]
        served = serve_benchmark(
            options.benchmark,
            options.model_type,
            overrides_of(options, base_urls),
            options.registry_port,
            roots=options.roots,
            gym_python=options.gym_python,
            work_dir=options.work_dir,
        )
        registry_server = await stack.enter_async_context(served)
        typer.echo(
            f"serving {options.benchmark}; its registry is at {registry_server.url}; Ctrl-C ends it"
        )
        runner = TaskRunner([], registry_server)
        while True:
            await anyio.sleep(HEALTH_EVERY_S)
            await runner.health_check()


@contextlib.asynccontextmanager
async def _model(config: GenerationConfig) -> AsyncIterator[str]:
    async with spawn(GenerationService, config=config) as service:
        endpoint = await service.call("start")
        typer.echo(f"serving {config.model} as {endpoint.model!r} at {endpoint.base_url}")
        yield endpoint.base_url


def serve_benchmark_command(options: ServeBenchmarkOptions) -> int:
    """Run the command.

    Returns:
        0 after Ctrl-C or SIGTERM: that is how it is meant to end.
    """
    opening = f"starting the servers of {options.benchmark}"
    return run_until_interrupted(lambda: serve(options), opening)
