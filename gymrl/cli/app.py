"""The commands and their options. What a command needs is loaded when it runs."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from gymrl._version import __version__
from gymrl.cli.eval_commands import eval_app
from gymrl.cli.serve_options import serve
from gymrl.errors import (
    ActorError,
    ActorStartError,
    ConfigError,
    GymrlError,
    RowError,
    UnsupportedOptionError,
)

EXIT_FAILED = 1
EXIT_USAGE = 2
_USAGE_ERRORS = (ConfigError, RowError, UnsupportedOptionError)

app = typer.Typer(
    name="gymrl",
    help="Rollouts of language models in NeMo Gym environments, without Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(eval_app)


def run_app(arguments: list[str]) -> int:
    """Run one command line; errors of gymrl and of the system become a message on standard error.

    Returns:
        The exit code.
    """
    _prepare_environment()
    _open_standard_streams()
    verbose = "--verbose" in arguments
    try:
        app(args=arguments, prog_name="gymrl", standalone_mode=True)
    except SystemExit as exit_request:
        code = exit_request.code
        return code if isinstance(code, int) else int(code is not None)
    except GymrlError as error:
        has_option = arguments[:1] in (["rollout"], ["eval"])
        return _fail(error, verbose, hints=has_option)
    except OSError as error:
        return _fail_by_system(error, verbose)
    except KeyboardInterrupt:
        return 130
    return 0


def _open_standard_streams() -> None:
    """Put the null device where the caller closed a standard stream (``gymrl ... >&-``).

    Otherwise the next socket or pipe gets that number, and the event loop ends the process when it
    closes it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one, since those below are open.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _prepare_environment() -> None:
    """Settings of libraries, before they are loaded here and in the workers, which inherit them.

    What the user has set stays. Progress bars of libraries would draw over ours. OpenMP threads
    that spin while they wait take whole cores from the other processes of a run: on two shared
    cores that makes decoding ten times slower.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _fail(error: GymrlError, verbose: bool, *, hints: bool) -> int:
    reason = _reason(error)
    text = reason.message
    if verbose:
        logging.getLogger("gymrl.cli").error("the command failed", exc_info=error)
    elif isinstance(reason, ActorStartError) and reason.remote_traceback:
        text = f"{text.removesuffix(reason.remote_traceback.rstrip()).rstrip()}"
        text += " (--verbose shows where it was raised)" if hints else ""
    # Only a failure needs what draws tables.
    from gymrl.cli.consoles import printable_lines

    text = printable_lines(text)  # it may quote servers, environments and models
    if isinstance(reason, _USAGE_ERRORS):
        typer.echo(f"gymrl: {text}", err=True)
        return EXIT_USAGE
    typer.echo(f"gymrl: {type(reason).__name__}: {text}", err=True)
    return EXIT_FAILED


def _fail_by_system(error: OSError, verbose: bool) -> int:
    if verbose:
        logging.getLogger("gymrl.cli").error("the command failed", exc_info=error)
    where = f"{error.filename}: " if error.filename else ""
    typer.echo(f"gymrl: {type(error).__name__}: {where}{error.strerror or error}", err=True)
    try:
        sys.stdout.flush()
    except OSError:
        # What it still holds can't be written, and would be tried again at exit.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    return EXIT_FAILED


def _reason(error: GymrlError) -> GymrlError:
    """What a worker's set-up complained about, where that is why the worker did not start."""
    cause: BaseException | None = error
    while isinstance(cause, ActorStartError):
        cause = cause.__cause__
    known = isinstance(cause, GymrlError) and not isinstance(cause, ActorError)
    return cause if known and isinstance(cause, GymrlError) else error


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
TokenSource = Literal["messages", "ledger", "both"]
SideCalls = Literal["drop", "keep"]
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
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the key of --base-url.")
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
    token_source: Annotated[
        TokenSource | None,
        typer.Option(
            help="Where tokens come from: messages (the agent's answer carries them), ledger (the "
            "policy server kept them), both (and a row fails where they differ) (default: messages)."
        ),
    ] = None,
    side_calls: Annotated[
        SideCalls | None,
        typer.Option(
            help="Model calls beside the main conversation, with --token-source ledger: drop counts "
            "them, keep makes trajectories of them (default: drop)."
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
        api_key_env=api_key_env,
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
        token_source=token_source,
        side_calls=side_calls,
    )
    raise typer.Exit(rollout_command(options, output, overwrite=overwrite, verbose=verbose))


app.command()(serve)


@app.command()
def doctor(  # noqa: PLR0913 - one parameter an option
    rollouts: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[ROLLOUTS.jsonl...]",
            help="Files of rollouts to check, or evaluations' directories.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model: a directory, a hub id, or smollm2.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="A policy server to check, with /v1.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the key of --base-url.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="Name that requests ask the policy server for.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            help="What the run does not do: several user turns, tools, or reasoning. Repeatable."
        ),
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="As generation.tool_parser will be set.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="As generation.reasoning_parser will be set.")
    ] = "auto",
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest gap that is still well.")
    ] = 1e-3,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = "float32",
    max_rows: Annotated[
        int | None, typer.Option(min=1, help="Only this many rows of each file.")
    ] = None,
) -> None:
    """Find out before a run, or after it, what would make training see other tokens.

    With --model alone: does the chat template keep what was sampled? With --base-url: what does
    that policy server return? With files of rollouts and --model: recompute the recorded
    log-probabilities, and print the gaps. Exits with 1 where something would break.
    """
    from gymrl.cli.doctor import DoctorOptions, doctor_command
    from gymrl.cli.doctor_setup import SetupOptions, check_setup

    if rollouts:
        if model is None:
            raise ConfigError(
                "rollouts are checked against the model that sampled them: add --model",
                setting="--model",
            )
        if base_url is not None:
            raise ConfigError(
                "--base-url checks a server, not files of rollouts: leave one of them out",
                setting="--base-url",
            )
        options = DoctorOptions(model=model, tolerance=tolerance, dtype=dtype, max_rows=max_rows)
        raise typer.Exit(doctor_command(rollouts, options))
    setup = SetupOptions(
        model=model,
        base_url=base_url,
        model_name=model_name,
        without=tuple(without or ()),
        api_key_env=api_key_env,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    raise typer.Exit(check_setup(setup))


@app.command()
def view(  # noqa: PLR0913 - one parameter an option
    path: Annotated[
        Path, typer.Argument(metavar="ROLLOUTS.jsonl", help="The file; it may still be growing.")
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Shows each token's text: a directory with tokenizer.json, that file, a hub id, or "
            "smollm2."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="To listen on; beyond loopback --token is required.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    token: Annotated[
        bool,
        typer.Option(
            "--token",
            help="Only who has the printed address may read: a token is part of it "
            "(GYMRL_VIEW_TOKEN sets a fixed one).",
        ),
    ] = False,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY", help="Of an evaluation: another one, to compare it with."
        ),
    ] = None,
) -> None:
    """Show a file of rollouts as a local page: groups, tokens, rewards, failures.

    Files of any size open at once and are indexed meanwhile; a file that grows is followed. An
    evaluation's directory has its report as well.
    """
    from gymrl.cli.view import token_of, tokenizer_of, view_command
    from gymrl.viewer import ViewerOptions

    options = ViewerOptions(
        host=host,
        port=port,
        token=token_of(token),
        tokenizer=tokenizer_of(tokenizer),
        against=against,
    )
    raise typer.Exit(view_command(path, options, browser=browser))
