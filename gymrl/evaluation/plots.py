"""Pictures of evaluations as PNG files. Needs matplotlib (the extra ``plots``); no display."""

from __future__ import annotations

import importlib
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymrl.errors import ConfigError
from gymrl.evaluation.journal import write_whole
from gymrl.evaluation.report import report_evaluation
from gymrl.evaluation.statistics import mean_of, reward_histogram

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gymrl.evaluation.comparison import Comparison
    from gymrl.evaluation.reading import Evaluation
    from gymrl.evaluation.report import EvaluationReport, PassEstimate

_INCHES = (6.4, 4.0)
_DPI = 120
_INK, _BLUE, _GREEN, _RED = "#333333", "#3465a4", "#4e9a06", "#cc0000"


def plot_evaluation(
    evaluation: Evaluation, directory: str | Path, report: EvaluationReport | None = None
) -> list[Path]:
    """For each benchmark the distribution of its rewards and its pass@k curve.

    Files are ``<benchmark>-rewards.png`` and ``<benchmark>-pass-at-k.png``; those that are there
    are replaced. A benchmark without any reward has no pictures.

    Args:
        evaluation: As read.
        directory: Made where it is missing.
        report: Of the evaluation: what passes, and how sure its intervals are; None: the default one.

    Raises:
        ConfigError: matplotlib is not installed.
        OutputError: A file cannot be written.
    """
    folder = _folder(directory)
    report = report or report_evaluation(evaluation)
    written = []
    for label, name in _file_names(report.benchmarks).items():
        rewards = [
            reward
            for task in evaluation.tasks
            if task.key.benchmark == label
            for reward in task.rewards
        ]
        if rewards:
            written.append(_rewards(label, rewards, folder / f"{name}-rewards.png"))
            written.append(_pass_curve(label, report, folder / f"{name}-pass-at-k.png"))
    return written


def plot_comparison(comparison: Comparison, directory: str | Path) -> list[Path]:
    """For each benchmark the differences of its tasks, the largest fall first.

    Files are ``<benchmark>-differences.png``; those that are there are replaced.

    Args:
        comparison: Of two evaluations.
        directory: Made where it is missing.

    Raises:
        ConfigError: matplotlib is not installed.
        OutputError: A file cannot be written.
    """
    folder = _folder(directory)
    written = []
    for label, name in _file_names(comparison.benchmarks).items():
        benchmark = comparison.benchmarks[label]
        differences = [task.difference for task in benchmark.tasks]
        if not differences:
            continue
        figure, axes = _figure()
        colors = [_RED if value < 0 else _GREEN for value in differences]
        axes.bar(range(len(differences)), differences, color=colors, width=1.0)
        axes.axhline(0.0, color=_INK, linewidth=0.8)
        total = benchmark.total.difference
        if total is not None:
            axes.axhline(total.mean, color=_BLUE, linestyle="--", label=f"mean {total.mean:+.3f}")
            if total.low is not None and total.high is not None:
                axes.axhspan(total.low, total.high, color=_BLUE, alpha=0.15, linewidth=0)
            axes.legend()
        axes.set(
            title=_plain(f"{label}: B - A by task"),
            xlabel="tasks, sorted",
            ylabel="mean reward, B - A",
        )
        written.append(_saved(figure, folder / f"{name}-differences.png"))
    return written


def _rewards(label: str, rewards: list[float], path: Path) -> Path:
    figure, axes = _figure()
    histogram = reward_histogram(rewards)
    if histogram is not None:
        width = (histogram.high - histogram.low) / len(histogram.counts)
        edges = [histogram.low + place * width for place in range(len(histogram.counts))]
        look = {"color": _BLUE, "edgecolor": "white"}
        axes.bar(edges, histogram.counts, width=width, align="edge", **look)
    mean = mean_of(rewards)
    axes.axvline(mean, color=_RED, linestyle="--", label=f"mean {mean:.3f}")
    axes.legend()
    axes.set(title=_plain(f"{label}: {len(rewards)} rewards"), xlabel="reward", ylabel="rows")
    return _saved(figure, path)


def _pass_curve(label: str, report: EvaluationReport, path: Path) -> Path:
    figure, axes = _figure()
    numbers = report.benchmarks[label].total
    _curve(axes, "pass@k", numbers.pass_at, {"color": _BLUE, "marker": "o"})
    _curve(axes, "pass^k", numbers.pass_hat, {"color": _GREEN, "marker": "s", "linestyle": "--"})
    ticks = [estimate.k for estimate in numbers.pass_at]
    axes.set(title=_plain(f"{label}: passing within k attempts"), xlabel="k", ylim=(-0.02, 1.02))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(k) for k in ticks])
    axes.minorticks_off()
    axes.legend()
    return _saved(figure, path)


def _curve(axes: Any, name: str, estimates: tuple[PassEstimate, ...], look: dict[str, str]) -> None:
    held = [(each.k, each.estimate) for each in estimates if each.estimate is not None]
    means = [estimate.mean for _, estimate in held]
    ks = [k for k, _ in held]
    axes.plot(ks, means, label=name, **look)
    lows = [e.mean if e.low is None else max(0.0, e.low) for _, e in held]
    highs = [e.mean if e.high is None else min(1.0, e.high) for _, e in held]
    axes.fill_between(ks, lows, highs, color=look["color"], alpha=0.15, linewidth=0)


def _figure() -> tuple[Any, Any]:
    """A figure of its own: nothing of pyplot, which keeps figures and asks for a display."""
    figure_module = _matplotlib("figure")
    figure = figure_module.Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    return figure, figure.add_subplot()


def _saved(figure: Any, path: Path) -> Path:
    _matplotlib("backends.backend_agg").FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_whole(path, buffer.getvalue())
    return path


def _matplotlib(module: str) -> Any:
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib: pip install 'gymrl[plots]'", setting="plots"
        ) from error


def _folder(directory: str | Path) -> Path:
    _matplotlib("figure")
    folder = Path(directory)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", setting="plots") from error
    return folder


def _plain(text: str) -> str:
    """Text that is not read as a formula."""
    return text.replace("$", r"\$")


def _file_names(labels: Iterable[str]) -> dict[str, str]:
    """A name for the files of each label; where two would get one, a number tells them apart."""
    names: dict[str, str] = {}
    for label in labels:
        name = plain = re.sub(r"[^A-Za-z0-9._-]+", "_", label)
        number = 1
        while name in names.values():
            number += 1
            name = f"{plain}-{number}"
        names[label] = name
    return names
