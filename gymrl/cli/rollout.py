"""``gymrl rollout``: make the plan, run the engine, write the file, print the summary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec
import typer

from gymrl.api_keys import read_api_key
from gymrl.benchmark import RunTally
from gymrl.cli import interrupt
from gymrl.cli.consoles import configure_logging, error_console, output_console
from gymrl.cli.discovery import served_model_name
from gymrl.cli.plan import RolloutOptions, RolloutPlan, make_plan
from gymrl.cli.progress import Display, RunProgress, make_display
from gymrl.cli.report import print_summary
from gymrl.concurrency import closing_stream
from gymrl.errors import ConfigError, GymrlError
from gymrl.generation.models import resolve_model
from gymrl.records import RecordWriter, RunRecord, config_digest
from gymrl.rollout.engine import RolloutEngine
from gymrl.types import Failure

if TYPE_CHECKING:
    from rich.console import Console

    from gymrl.config import RolloutConfig
    from gymrl.scoring import GroupStats
    from gymrl.types import RolloutGroup, RowResult

EXIT_FAILED_ROWS = 1


def check_output(path: Path, *, overwrite: bool) -> None:
    """Refuse a path that cannot be written, before anything starts.

    Raises:
        ConfigError: It exists and `overwrite` is off, it is no file, or its directory is missing
            or read-only; or it is ``-``.
    """
    directory = path.parent
    if str(path) == "-":
        problem = "--output -: rollouts go to a file alone, since results are on standard output"
    elif path.exists() and not path.is_file():
        problem = f"{path} is no file: name a file to write"
    elif path.exists() and not overwrite:
        problem = f"{path} exists: add --overwrite to replace it, or choose another path"
    elif not directory.is_dir():
        problem = f"{path}: there is no directory {directory}: make it first"
    elif not os.access(directory, os.W_OK):
        problem = f"{path}: the directory {directory} is read-only"
    else:
        return
    raise ConfigError(problem, setting="--output")


def with_tokenizer(config: RolloutConfig) -> RolloutConfig:
    """The configuration with the loaded model's own tokenizer, where it names none.

    A shipped model is fetched for that the first time. A hub id's tokenizer is left alone: name it
    with ``--tokenizer`` to get text.

    Raises:
        ConfigError: The model is not there.
    """
    generation = config.generation
    if generation is None or config.gym.tokenizer is not None or not config.gym.decode_text:
        return config
    directory = resolve_model(generation.model)
    if not Path(directory, "tokenizer.json").is_file():
        return config
    gym = msgspec.structs.replace(config.gym, tokenizer=directory)
    return msgspec.structs.replace(config, gym=gym)


def policy_of(config: RolloutConfig) -> str:
    """Who samples, in words."""
    if config.generation is not None:
        return f"model {config.generation.model}"
    if config.gym.base_urls:
        return f"policy at {', '.join(config.gym.base_urls)}"
    return f"the policy of the servers at {config.gym.registry_url}"


def open_records(plan: RolloutPlan, output: Path, *, overwrite: bool) -> RecordWriter:
    """A new file for what the plan's run gives.

    Raises:
        ConfigError: Another run has made it since it was looked for, and `overwrite` is off.
    """
    if overwrite:
        output.unlink(missing_ok=True)
    config = plan.config
    model = config.generation.model if config.generation else config.gym.model_name
    record = RunRecord(
        config_digest=config_digest(config), notes={"benchmark": plan.name, "model": model}
    )
    mode = config.generation.logprobs_mode if config.generation else None
    return RecordWriter(output, record, logprobs_mode=mode)


class _Run:
    """One run: what it counts, where it writes, what it shows. Observes the engine."""

    def __init__(
        self, plan: RolloutPlan, output: Path | None, display: Display, *, overwrite: bool = False
    ) -> None:
        self.plan = plan
        self.tally = RunTally()
        self.progress = RunProgress(len(plan.rows), plan.num_rows)
        self.seconds = 0.0
        self.rows_written = 0
        self._is_reported = False
        self._drops_groups = plan.config.failure_policy == "drop_group"
        self._output = output
        self._overwrite = overwrite
        self._display = display

    def on_row(self, result: RowResult, instance: str) -> None:
        """Show the counters with the row."""
        del instance
        self.progress.add_row(result)
        if self._drops_groups and isinstance(result.outcome, Failure):
            self.tally.add_failure(result.outcome)
        self._show()

    def on_group(self, group: RolloutGroup, stats: GroupStats) -> None:
        """Show the counters with the group."""
        del stats
        self.progress.add_group(group)
        self._show()

    def _show(self) -> None:
        if not self._is_reported:
            self._display.update(self.progress)

    async def _completed_config(self) -> RolloutConfig:
        config = self.plan.config
        if self.plan.asks_model_name:
            key = read_api_key(config.gym.api_key_env, "--api-key-env")
            name = await served_model_name(config.gym.base_urls[0], key)
            gym = msgspec.structs.replace(config.gym, model_name=name)
            config = msgspec.structs.replace(config, gym=gym)
        return await anyio.to_thread.run_sync(with_tokenizer, config, abandon_on_cancel=True)

    async def run(self) -> None:
        """Start everything, count and write each group as it finishes, close everything."""
        self._display.phase(f"starting servers and workers, {policy_of(self.plan.config)}")
        config = await self._completed_config()
        async with RolloutEngine(config, observer=self) as engine:
            # Only now: a run that could not start leaves a former file as it was.
            writer = None
            if self._output is not None:
                writer = open_records(self.plan, self._output, overwrite=self._overwrite)
            try:
                self.progress.begin()
                self._display.phase(
                    f"rolling out {self.plan.name}: {len(self.plan.rows)} prompts, "
                    f"{self.plan.num_rows} rows"
                )
                stream = engine.stream(self.plan.rows, num_generations=self.plan.num_generations)
                async with closing_stream(stream) as groups:
                    async for group in groups:
                        if self._is_reported:
                            break
                        if writer is not None:
                            writer.write(group)
                            self.rows_written += len(group.rows)
                        self.tally.add(group)
            finally:
                self.seconds = self.progress.elapsed
                if writer is not None:
                    writer.close()
            self._display.phase("closing")

    def interrupt(self, signal_name: str) -> None:
        """Print what the run gave so far: closing may take longer than there is time for."""
        self._display.close()
        if self.progress.groups_done and not self._is_reported:
            self.seconds = self.seconds or self.progress.elapsed
            self.report(output_console())
        self._is_reported = True
        typer.echo(f"gymrl: {signal_name}: ending the run", err=True)

    def report(self, console: Console) -> None:
        """Print what the run gave so far."""
        print_summary(console, self.tally.summary(self.seconds))
        if self._output is not None:
            console.print(
                f"{self.rows_written} rows written to {self._output}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def rollout_command(
    options: RolloutOptions, output: Path | None, *, overwrite: bool, verbose: bool
) -> int:
    """Run the command.

    Returns:
        0; 1 when a row failed or a group is missing; 128 + n when signal n ended the run.

    Raises:
        ConfigError, RowError: Before anything starts.
        GymrlError: The run broke; the rows until then are in the file.
    """
    if output is not None:
        check_output(output, overwrite=overwrite)
    plan = make_plan(options)
    errors = error_console()
    configure_logging(errors, verbose=verbose)
    # A bar that is redrawn would draw over a debugger's prompt.
    display = make_display(errors, is_live=not plan.config.in_process)
    run = _Run(plan, output, display, overwrite=overwrite)
    try:
        interrupt.run(run.run, run.interrupt)
    except interrupt.Interrupted as interrupted:
        return interrupted.exit_code
    except GymrlError:
        display.close()
        if run.progress.groups_done:
            run.report(output_console())
        raise
    finally:
        display.close()
    run.report(output_console())
    missing = run.progress.num_groups - run.progress.groups_done
    if missing:
        errors.print(
            f"gymrl: {missing} of {run.progress.num_groups} groups were dropped "
            f"(failure policy {plan.config.failure_policy})",
            markup=False,
            highlight=False,
        )
    return EXIT_FAILED_ROWS if missing or run.progress.rows_failed else 0
