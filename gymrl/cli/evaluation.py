"""``gymrl eval plan`` and ``run``: options to calls of :mod:`gymrl.evaluation`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from gymrl.api_keys import read_api_key
from gymrl.cli import interrupt
from gymrl.cli.assignments import parsed_value, set_nested
from gymrl.cli.consoles import configure_logging, error_console, output_console
from gymrl.cli.discovery import served_model_name
from gymrl.cli.eval_progress import EvaluationDisplay
from gymrl.cli.eval_tables import print_report
from gymrl.cli.progress import make_display
from gymrl.errors import ConfigError
from gymrl.evaluation import (
    BenchmarkChoice,
    EvaluationPlan,
    EvaluationSettings,
    PolicySettings,
    RunOptions,
    SamplingSettings,
    plan_evaluation,
    run_evaluation,
)
from gymrl.evaluation.journal import METRICS_FILE, PLAN_FILE, read_plan, write_whole

if TYPE_CHECKING:
    from gymrl.cli.progress import Display

EXIT_INCOMPLETE = 1


class PlanOptions(msgspec.Struct, kw_only=True, frozen=True):
    """What the command line said of a plan; None where it said nothing."""

    benchmarks: tuple[str, ...] = ()
    repeats: int | None = None
    overrides: tuple[str, ...] = ()
    task_ids: tuple[str, ...] = ()
    roots: tuple[Path, ...] = ()
    gym_python: str | None = None
    model: str | None = None
    model_name: str | None = None
    dtype: str | None = None
    backend: str | None = None
    max_model_len: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    seed: int | None = None


def parse_overrides(
    overrides: tuple[str, ...], labels: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """``key=value`` and ``BENCHMARK:key=value``; dots in a key nest, a value is read as YAML.

    Args:
        overrides: As they were written.
        labels: The benchmarks that may stand before a colon.

    Returns:
        Those for all benchmarks, and those for single ones.

    Raises:
        ConfigError: One is not written so, or a key is set twice.
    """
    everywhere: dict[str, Any] = {}
    single: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for override in overrides:
        key, separator, text = override.partition("=")
        label, colon, inner = key.rpartition(":")
        if not separator or not key or (colon and not inner):
            raise ConfigError(
                f"--overrides {override!r}: write it as key=value, or BENCHMARK:key=value",
                setting="--overrides",
            )
        if colon and label not in single:
            raise ConfigError(
                f"--overrides {override!r}: {label!r} is none of the benchmarks "
                f"({', '.join(labels)})",
                setting="--overrides",
            )
        value = parsed_value(text, "--overrides", override)
        target = single[label] if colon else everywhere
        set_nested(target, inner if colon else key, value, "--overrides")
    return everywhere, single


def settings_of(options: PlanOptions) -> EvaluationSettings:
    """The settings that the command line asks for.

    Raises:
        ConfigError: A value is out of range.
    """
    policy = {
        "model": options.model,
        "name": options.model_name,
        "dtype": options.dtype,
        "backend": options.backend,
        "max_model_len": options.max_model_len,
    }
    return EvaluationSettings(
        policy=PolicySettings.from_dict({k: v for k, v in policy.items() if v is not None}),
        sampling=SamplingSettings(
            temperature=options.temperature,
            top_p=options.top_p,
            max_output_tokens=options.max_output_tokens,
        ),
        seed=options.seed or 0,
    )


def make_plan(options: PlanOptions) -> EvaluationPlan:
    """Plan the benchmarks of the command line.

    Raises:
        ConfigError, RowError, UnsupportedOptionError: As
            :func:`~gymrl.evaluation.planning.plan_evaluation`.
    """
    named = []
    for benchmark in options.benchmarks:
        label, separator, name = benchmark.rpartition("=")
        named.append((label if separator else name, name))
    labels = tuple(label for label, _ in named)
    everywhere, single = parse_overrides(options.overrides, labels)
    choices = [
        BenchmarkChoice(
            name=name,
            label=label,
            overrides=single[label],
            task_ids=options.task_ids or None,
        )
        for label, name in named
    ]
    return plan_evaluation(
        choices,
        settings_of(options),
        repeats=options.repeats,
        overrides=everywhere,
        roots=options.roots,
        gym_python=options.gym_python,
    )


def key_from(variable: str | None) -> str | None:
    """The key in an environment variable.

    Raises:
        ConfigError: It is not set, empty, or cannot be sent.
    """
    return read_api_key(variable, "--api-key-env")


def plan_command(options: PlanOptions, output: Path | None) -> int:
    """Write a plan; without a file, to standard output."""
    configure_logging(error_console(), verbose=False)
    plan = make_plan(options)
    if output is None:
        typer.echo(plan.to_json(), nl=False)
        return 0
    if not output.parent.is_dir():
        raise ConfigError(f"{output}: there is no directory {output.parent}", setting="--output")
    write_whole(output, plan.to_json().encode())
    for benchmark in plan.benchmarks:
        if benchmark.refusal is not None:
            typer.echo(
                f"gymrl: {benchmark.label}: its servers cannot be started from this plan: "
                f"{benchmark.refusal}",
                err=True,
            )
        typer.echo(
            f"{benchmark.label}: {len(benchmark.plan.tasks)} tasks, {benchmark.repeats} attempts each"
        )
    typer.echo(f"{plan.num_rows} rows planned, configuration {plan.config_digest}")
    return 0


def planned_for_run(options: PlanOptions, output: Path) -> EvaluationPlan:
    """The plan that a run is asked for: a plan's file, benchmarks, or what its directory holds.

    Raises:
        ConfigError: Nothing says what to run, or the options contradict the plan's file.
    """
    targets = options.benchmarks
    if not targets:
        held = read_plan(output)
        if held is None:
            raise ConfigError(
                f"{output} holds no evaluation to continue: name a plan or benchmarks",
                setting="PLAN_OR_BENCHMARK",
            )
        return _completed(held, options, output / PLAN_FILE)
    if len(targets) == 1 and (targets[0].endswith(".json") or Path(targets[0]).is_file()):
        path = Path(targets[0])
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", setting=str(path)) from error
        return _completed(EvaluationPlan.from_json(text, str(path)), options, path)
    return make_plan(options)


def _completed(plan: EvaluationPlan, options: PlanOptions, path: Path) -> EvaluationPlan:
    """A plan from a file, with what it left open; what it says may not be said otherwise."""
    for flag, given in (
        ("--repeats", options.repeats),
        ("--overrides", options.overrides),
        ("--task-id", options.task_ids),
        # Servers of NeMo Gym's are looked up again when they are started.
        ("--root", () if any(b.gym_version for b in plan.benchmarks) else options.roots),
    ):
        if given:
            raise ConfigError(
                f"{flag} makes a plan, and {path} is made already: leave it out, or make a new plan",
                setting=flag,
            )
    asked = msgspec.to_builtins(settings_of(options))
    defaults = msgspec.to_builtins(EvaluationSettings())
    settings = msgspec.to_builtins(plan.settings)
    for block in ("policy", "sampling"):
        for name, value in asked[block].items():
            if value == defaults[block][name]:
                continue
            if settings[block][name] not in (defaults[block][name], value):
                raise ConfigError(
                    f"{block}.{name} is {settings[block][name]!r} in {path}, and {value!r} was "
                    "asked for: leave the option out, or make a new plan",
                    setting=name,
                )
            settings[block][name] = value
    if options.seed is not None and options.seed != plan.settings.seed:
        raise ConfigError(
            f"seed is {plan.settings.seed} in {path}, and {options.seed} was asked for: leave the "
            "option out, or make a new plan",
            setting="seed",
        )
    return plan.with_settings(EvaluationSettings.from_dict(settings))


class _Run:
    """One run: what it shows, and what it says at its end."""

    def __init__(self, plan: EvaluationPlan, output: Path, display: Display) -> None:
        self.plan = plan
        self.output = output
        self.display = display

    async def run(self, options: RunOptions, *, overwrite: bool, extend: bool) -> int:
        plan = await _with_served_name(self.plan, options)
        policy = plan.settings.policy
        who = (
            f"model {policy.model}" if policy.model else f"policy {policy.name or 'of the servers'}"
        )
        report = await run_evaluation(
            plan,
            self.output,
            options,
            observer=EvaluationDisplay(self.display, who),
            overwrite=overwrite,
            extend=extend,
        )
        self.display.close()
        print_report(output_console(), report)
        typer.echo(f"{self.output / METRICS_FILE} has the numbers, `gymrl eval report` shows them")
        return 0 if report.complete else EXIT_INCOMPLETE

    def interrupt(self, signal_name: str) -> None:
        """Say how it goes on: everything that ended is in the file already."""
        self.display.close()
        typer.echo(
            f"gymrl: {signal_name}: ending the run; `gymrl eval run --output {self.output}` "
            "continues it",
            err=True,
        )


async def _with_served_name(plan: EvaluationPlan, options: RunOptions) -> EvaluationPlan:
    policy = plan.settings.policy
    if policy.model is not None or policy.name is not None or not options.base_urls:
        return plan
    name = await served_model_name(options.base_urls[0], options.api_key)
    policy = msgspec.structs.replace(policy, name=name)
    return plan.with_settings(msgspec.structs.replace(plan.settings, policy=policy))


def run_command(
    planned: PlanOptions,
    options: RunOptions,
    output: Path,
    *,
    overwrite: bool,
    extend: bool,
    verbose: bool,
) -> int:
    """Run, or continue, an evaluation.

    Returns:
        0 when every row has a result; 1 when rows failed; 128 + n when signal n ended the run.

    Raises:
        ConfigError, RowError: Before anything starts.
        GymrlError: The run broke; the rows until then are in the file.
    """
    errors = error_console()
    configure_logging(errors, verbose=verbose)
    if overwrite and not planned.benchmarks:
        raise ConfigError(
            "--overwrite throws the directory's plan away: name a plan or benchmarks",
            setting="--overwrite",
        )
    plan = planned_for_run(planned, output)
    display = make_display(errors)
    run = _Run(plan, output, display)

    async def running() -> int:
        return await run.run(options, overwrite=overwrite, extend=extend)

    try:
        return interrupt.run(running, run.interrupt)
    except interrupt.Interrupted as interrupted:
        return interrupted.exit_code
    finally:
        display.close()
