"""``gymrl doctor``: are the recorded log-probabilities those of the model?"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from rich.table import Table

from gymrl.cli.consoles import configure_logging, error_console, output_console
from gymrl.cli.rollout_files import file_of
from gymrl.config import GenerationConfig, LogprobsMode, SamplingParams
from gymrl.errors import ConfigError
from gymrl.records import RowRecord, read_records, read_run
from gymrl.types import Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rich.console import Console

    from gymrl.generation.fidelity import FidelityReport, RecordedSequence

EXIT_GAP = 1
_ROWS_AT_ONCE = 64


class DoctorOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line said."""

    model: str
    tolerance: float = 1e-3
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    max_rows: int | None = None


class FileGap(msgspec.Struct, frozen=True, kw_only=True):
    """Gaps of one file.

    Attributes:
        path: The file.
        rows: Rows with sampled tokens.
        tokens: Sampled tokens.
        mean_gap: Mean absolute difference, in nats.
        max_gap: The largest one.
        worst: Row index and token position of the largest one.
    """

    path: str
    rows: int
    tokens: int
    mean_gap: float
    max_gap: float
    worst: tuple[int, int] | None


def sampling_of(record: RowRecord) -> SamplingParams:
    """How a row's tokens were sampled, as far as it changes log-probabilities."""
    sampling = record.sampling
    return SamplingParams(
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=sampling.top_k,
    )


def combine(path: str, reports: Sequence[tuple[Sequence[RowRecord], FidelityReport]]) -> FileGap:
    """One file's gaps from those of its pieces; the mean is over tokens, not over pieces."""
    tokens = sum(report.num_tokens for _, report in reports)
    total = sum(report.mean_gap * report.num_tokens for _, report in reports)
    max_gap, worst = 0.0, None
    for records, report in reports:
        if report.worst is not None and (worst is None or report.max_gap > max_gap):
            max_gap = report.max_gap
            worst = (records[report.worst[0]].index, report.worst[1])
    return FileGap(
        path=path,
        rows=sum(len(records) for records, _ in reports),
        tokens=tokens,
        mean_gap=total / tokens if tokens else 0.0,
        max_gap=max_gap,
        worst=worst,
    )


def _checkable(path: Path, max_rows: int | None) -> Iterable[tuple[RowRecord, Trajectory]]:
    rows = (
        (record, sample)
        for record in read_records(path)
        if isinstance(sample := record.sample(), Trajectory)
        and sample.num_generated > 0
        and not any(sample.images)  # what the model saw can't be had again from tokens alone
    )
    return itertools.islice(rows, max_rows)


def require_vocabulary(records: Sequence[tuple[RowRecord, Trajectory]], size: int) -> None:
    """Refuse token ids that a model of `size` tokens cannot have sampled or read.

    Raises:
        ConfigError: Names the row and the token.
    """
    for record, trajectory in records:
        largest = int(trajectory.token_ids.max())
        if largest >= size:
            raise ConfigError(
                f"row {record.index} holds token {largest}, but the model has {size} tokens: it is "
                "not the model that sampled these rollouts; name that one with --model",
                setting="--model",
            )


def _check_file(model: Any, path: Path, max_rows: int | None) -> FileGap:
    from gymrl.generation.fidelity import RecordedSequence, check_fidelity

    pieces = []
    rows = iter(_checkable(path, max_rows))
    while batch := list(itertools.islice(rows, _ROWS_AT_ONCE)):
        require_vocabulary(batch, model.get_input_embeddings().num_embeddings)
        by_mode: dict[LogprobsMode, list[tuple[RowRecord, Trajectory]]] = {}
        for record, trajectory in batch:
            mode = record.sampling.logprobs_mode or "processed"
            by_mode.setdefault(mode, []).append((record, trajectory))
        for mode, found in by_mode.items():
            sequences: list[RecordedSequence] = [
                RecordedSequence.of(trajectory, sampling_of(record)) for record, trajectory in found
            ]
            report = check_fidelity(model, sequences, mode=mode)
            pieces.append(([record for record, _ in found], report))
    return combine(str(path), pieces)


def print_gaps(console: Console, gaps: Sequence[FileGap], tolerance: float) -> None:
    """A line a file."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("rollouts", overflow="fold")
    for header in ("rows", "sampled tokens", "mean gap", "max gap", "at", "verdict"):
        table.add_column(header, justify="right")
    for gap in gaps:
        place = f"row {gap.worst[0]}, token {gap.worst[1]}" if gap.worst else "-"
        table.add_row(
            gap.path,
            str(gap.rows),
            f"{gap.tokens:,}",
            f"{gap.mean_gap:.2e}",
            f"{gap.max_gap:.2e}",
            place,
            verdict(gap, tolerance),
        )
    console.print(table)


def verdict(gap: FileGap, tolerance: float) -> str:
    """In words: within the tolerance, above it, or nothing to compare."""
    if not gap.tokens:
        return "nothing to compare"
    return "ok" if gap.max_gap <= tolerance else f"above {tolerance:g}"


OTHER_MODEL_NATS = 0.5
"""A mean gap above this is no rounding."""


def remedy(gap: FileGap, tolerance: float) -> str:
    """What to change; empty where nothing need be."""
    if not gap.tokens:
        return (
            "no row holds sampled tokens: failed rows, placeholders and rows with images are left "
            "out. Check a file whose policy server returns token ids"
        )
    if gap.max_gap <= tolerance:
        return ""
    if not gap.mean_gap <= OTHER_MODEL_NATS:  # NaN is none either
        return (
            "these tokens were hardly sampled from this model: name the checkpoint that served "
            "them with --model. In a run that trains, the weights change from step to step "
            "(weight_versions of a row says which they were)"
        )
    return (
        "the same model in other arithmetic: sample in float32 (generation.dtype), or accept it "
        f"with a --tolerance above {gap.max_gap:.2g}. Where the temperature was not 1, see with "
        "--base-url whether the server gives raw log-probabilities"
    )


def doctor_command(paths: Sequence[Path], options: DoctorOptions) -> int:
    """Run the command.

    Args:
        paths: Files of rollouts, or directories of evaluations.
        options: What they are checked against.

    Returns:
        0 when every file's largest gap is within the tolerance, else 1; a file without sampled
        tokens proves nothing and gives 1 too.

    Raises:
        ConfigError: A file or the model is not there.
        RowValueError: A file is not one of rollouts.
        BadLogprobsError: A recorded log-probability is not finite.
    """
    paths = [file_of(path) for path in paths]
    for path in paths:
        read_run(path)
    configure_logging(error_console(), verbose=False)
    try:
        from gymrl.generation.model_loading import load_model
        from gymrl.generation.models import resolve_model
    except ImportError as error:
        raise ConfigError(
            f"checking log-probabilities needs transformers ({error}); install it with: "
            "pip install 'gymrl[transformers]'"
        ) from error
    config = GenerationConfig(model=options.model, dtype=options.dtype)
    model = load_model(resolve_model(options.model), config)
    gaps = [_check_file(model, path, options.max_rows) for path in paths]
    console = output_console()
    print_gaps(console, gaps, options.tolerance)
    for gap in gaps:
        advice = remedy(gap, options.tolerance)
        if advice:
            console.print(f"{gap.path}: {advice}.", markup=False, highlight=False, soft_wrap=True)
    return 0 if all(verdict(gap, options.tolerance) == "ok" for gap in gaps) else EXIT_GAP
