"""The options of ``gymrl serve``. What it needs is loaded when it runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from gymrl.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["transformers", "vllm"]


def serve(  # noqa: PLR0913 - one parameter an option
    model: Annotated[str | None, typer.Option(help="A directory, a hub id, or smollm2.")] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name that requests may ask for (default: policy).")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="0 takes a free one (default).")
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights (default: float32).")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences decoded together (default: 16).")
    ] = None,
    backend: Annotated[
        Backend | None, typer.Option(help="What runs the model (default: transformers).")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Context in tokens (default: the model's own).")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML, TOML or JSON file of a GenerationConfig, or of a RolloutConfig with one; "
            "options win over it."
        ),
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(help="Serve this benchmark's servers, with the model or --base-url behind."),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(help="The benchmark's policy, instead of --model. Repeatable."),
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the policy's key.")
    ] = None,
    model_type: Annotated[
        str,
        typer.Option(help="openai_model (Responses API), or a model server of NeMo Gym's."),
    ] = "openai_model",
    param: Annotated[
        list[str] | None,
        typer.Option(help="Of the benchmark's configuration: key=value, key dotted. Repeatable."),
    ] = None,
    registry_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of the registry (default: a free one).")
    ] = None,
    gym_python: Annotated[
        str | None, typer.Option(help="Interpreter that has NeMo Gym, for servers of its own.")
    ] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option(help="Folder that benchmarks are looked up in first. Repeatable."),
    ] = None,
    work_dir: Annotated[
        Path | None, typer.Option(help="Gets the logs of NeMo Gym's servers.")
    ] = None,
) -> None:
    """Serve until interrupted: a model over the OpenAI API, or with --benchmark a benchmark.

    The model's server returns token ids and log-probabilities. A benchmark's servers, NeMo Gym's own
    among them, are found through the registry whose address is printed.
    """
    from gymrl.cli.serve import generation_config, serve_command

    generation = generation_config(
        config,
        model=model,
        served_model_name=model_name,
        host=host,
        port=port,
        dtype=dtype,
        max_batch_size=batch_size,
        backend=backend,
        max_model_len=max_model_len,
    )
    if benchmark is None:
        given = (base_url, api_key_env, param, registry_port, gym_python, root, work_dir)
        if any(option is not None for option in given):
            raise ConfigError(
                "--base-url, --api-key-env, --param, --registry-port, --gym-python, --root and "
                "--work-dir are a benchmark's: name it (--benchmark)",
                setting="--benchmark",
            )
        if generation is None:
            raise ConfigError(
                "name what to serve: --model, --config or --benchmark", setting="--model"
            )
        raise typer.Exit(serve_command(generation))
    from gymrl.cli.serve_benchmark import ServeBenchmarkOptions, serve_benchmark_command

    if (generation is None) == (not base_url):
        raise ConfigError(
            "a benchmark needs a policy: --model to load one here, or --base-url of one that runs",
            setting="--base-url",
        )
    options = ServeBenchmarkOptions(
        benchmark=benchmark,
        generation=generation,
        base_urls=tuple(base_url or ()),
        model_name=model_name or (generation.served_model_name if generation else "policy"),
        api_key_variable=api_key_env,
        model_type=model_type,
        params=tuple(param or ()),
        registry_port=registry_port,
        gym_python=gym_python,
        roots=tuple(root or ()),
        work_dir=work_dir,
    )
    raise typer.Exit(serve_benchmark_command(options))
