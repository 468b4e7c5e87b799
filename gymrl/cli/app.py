"""The commands and their options. What a command needs is loaded when it runs."""

import logging
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from gymrl._version import __version__
from gymrl.errors import ConfigError, GymrlError, RowError, UnsupportedOptionError

EXIT_FAILED = 1
EXIT_USAGE = 2

app = typer.Typer(
    name="gymrl",
    help="Rollouts of language models in NeMo Gym environments, without Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run_app(arguments: list[str]) -> int:
    """Run one command line; errors of gymrl become a message on standard error.

    Returns:
        The exit code.
    """
    _prepare_environment()
    verbose = "--verbose" in arguments
    try:
        app(args=arguments, prog_name="gymrl", standalone_mode=True)
    except SystemExit as exit_request:
        code = exit_request.code
        return code if isinstance(code, int) else int(code is not None)
    except (ConfigError, RowError, UnsupportedOptionError) as error:
        return _fail(error, EXIT_USAGE, verbose)
    except GymrlError as error:
        return _fail(error, EXIT_FAILED, verbose)
    except KeyboardInterrupt:
        return 130
    return 0


def _prepare_environment() -> None:
    """Settings of libraries, before they are loaded here and in the workers, which inherit them.

    What the user has set stays. Progress bars of libraries would draw over ours. OpenMP threads
    that spin while they wait take whole cores from the other processes of a run: on two shared
    cores that makes decoding ten times slower.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _fail(error: GymrlError, code: int, verbose: bool) -> int:
    if verbose:
        logging.getLogger("gymrl.cli").error("the command failed", exc_info=error)
    kind = "" if code == EXIT_USAGE else f"{type(error).__name__}: "
    typer.echo(f"gymrl: {kind}{error}", err=True)
    return code


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"gymrl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Rollouts of language models in NeMo Gym environments, without Ray."""


@app.command()
def benchmarks() -> None:
    """List the shipped benchmarks."""
    from gymrl.benchmark import list_benchmarks

    infos = list_benchmarks()
    width = max(len(info.name) for info in infos)
    for info in infos:
        typer.echo(f"{info.name:<{width}}  {info.description}")


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Backend = Literal["transformers", "vllm"]
FailurePolicy = Literal["raise", "mask", "drop_group"]
Verbose = Annotated[bool, typer.Option("--verbose", help="Log more, to standard error.")]


@app.command()
def rollout(  # noqa: PLR0913 - one parameter an option
    target: Annotated[
        str,
        typer.Argument(
            metavar="BENCHMARK_OR_JSONL",
            help="A shipped benchmark (see `gymrl benchmarks`), or a JSONL file of rows.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Model to load here: a directory, a hub id, or smollm2."),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy server that returns token ids, instead of --model. Repeatable; "
            "servers take turns."
        ),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name that requests ask the policy server for.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Tokenizer that decodes the turns' text (default: the model's)."),
    ] = None,
    servers: Annotated[
        Path | None, typer.Option(help="YAML file of Gym servers to start, for a JSONL of rows.")
    ] = None,
    registry: Annotated[
        str | None, typer.Option(help="URL of the registry of Gym servers that already run.")
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts (default: 8 of a benchmark, all rows of a file)."),
    ] = None,
    num_generations: Annotated[int, typer.Option(min=1, help="Attempts at each prompt.")] = 1,
    max_output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Sampled tokens of a model call, at most.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; 1 is off.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Decides tasks and sampling (default: 0).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Gym worker processes (default: 1).")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Everything in this process, for debugging.")
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Sequences the loaded model decodes together. 1 makes tokens independent of load.",
        ),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the loaded weights.")] = None,
    backend: Annotated[
        Backend | None, typer.Option(help="What runs the loaded model (default: transformers).")
    ] = None,
    param: Annotated[
        list[str] | None, typer.Option(help="Parameter of the benchmark: key=value. Repeatable.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML, TOML or JSON file of a RolloutConfig; options win over it."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSONL file for the rollouts.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace --output where it exists.")
    ] = False,
    failure_policy: Annotated[
        FailurePolicy | None,
        typer.Option(
            help="A failed row: mask keeps and counts it, drop_group leaves its group out, raise "
            "ends the run (default: mask)."
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Roll out a model on tasks, and write every rollout with its tokens and log-probabilities.

    Example: gymrl rollout chain_sum --model smollm2 --num-generations 4 --output rollouts.jsonl
    """
    from gymrl.cli.plan import RolloutOptions
    from gymrl.cli.rollout import rollout_command

    options = RolloutOptions(
        target=target,
        model=model,
        base_urls=tuple(base_url or ()),
        model_name=model_name,
        tokenizer=tokenizer,
        servers=servers,
        registry=registry,
        config=config,
        params=tuple(param or ()),
        num_prompts=num_prompts,
        num_generations=num_generations,
        max_output_tokens=max_output_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        workers=workers,
        in_process=in_process,
        batch_size=batch_size,
        dtype=dtype,
        backend=backend,
        failure_policy=failure_policy,
    )
    raise typer.Exit(rollout_command(options, output, overwrite=overwrite, verbose=verbose))


@app.command()
def serve(  # noqa: PLR0913 - one parameter an option
    model: Annotated[str, typer.Option(help="A directory, a hub id, or smollm2.")],
    model_name: Annotated[str, typer.Option(help="Name that requests may ask for.")] = "policy",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = "float32",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = 16,
    backend: Annotated[Backend, typer.Option(help="What runs the model.")] = "transformers",
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Context in tokens (default: the model's own).")
    ] = None,
) -> None:
    """Serve a model over the OpenAI API, with token ids and log-probabilities, until interrupted."""
    from gymrl.cli.serve import serve_command
    from gymrl.config import GenerationConfig

    config = GenerationConfig(
        model=model,
        served_model_name=model_name,
        host=host,
        port=port,
        dtype=dtype,
        max_batch_size=batch_size,
        backend=backend,
        max_model_len=max_model_len,
    )
    raise typer.Exit(serve_command(config))


@app.command()
def doctor(
    rollouts: Annotated[
        list[Path], typer.Argument(metavar="ROLLOUTS.jsonl...", help="Files of rollouts.")
    ],
    model: Annotated[str, typer.Option(help="The model that sampled them.")],
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest gap that is still well.")
    ] = 1e-3,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = "float32",
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Only this many rows of each file.")
    ] = None,
) -> None:
    """Recompute recorded log-probabilities with transformers, and print the gaps."""
    from gymrl.cli.doctor import DoctorOptions, doctor_command

    options = DoctorOptions(model=model, tolerance=tolerance, dtype=dtype, max_rows=max_rows)
    raise typer.Exit(doctor_command(rollouts, options))
