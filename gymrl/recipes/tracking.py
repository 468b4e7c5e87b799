"""What a run leaves behind: lines of JSON, TensorBoard's events, a picture; and a live display."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from types import TracebackType

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = (
    "reward_mean",
    "truncation_rate",
    "generated_tokens_mean",
    "entropy",
    "logprob_gap_mean",
    "staleness_mean",
    "share/rollout",
    "share/train",
    "share/weights",
)


def sparkline(values: list[float], width: int = 60) -> str:
    """Numbers from 0 to 1 as a line of bars, the last `width` of them."""
    last = values[-width:]
    return "".join(_BARS[min(7, max(0, int(value * 8)))] for value in last)


class Tracker:
    """Metrics of one run, on the rank that keeps them.

    Args:
        directory: Where ``metrics.jsonl``, ``tensorboard/`` and ``reward.png`` go.
        steps: Of the whole run.
        resumed_at: Steps that are done already; later lines of a broken run are dropped.
        is_live: Show a table on the terminal.
        tensorboard: Write its events.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        steps: int,
        resumed_at: int = 0,
        is_live: bool = False,
        tensorboard: bool = True,
    ) -> None:
        self._root = Path(directory)
        self._root.mkdir(parents=True, exist_ok=True)
        self._steps = steps
        self._history = [
            line for line in read_metrics(self._root) if int(line["step"]) <= resumed_at
        ]
        self._is_live = is_live
        self._has_tensorboard = tensorboard
        self._live: Live | None = None
        self._events: Any = None
        self._resumed_at = resumed_at

    @property
    def path(self) -> Path:
        """The file of each step's numbers, one JSON object a line."""
        return self._root / "metrics.jsonl"

    def __enter__(self) -> Tracker:
        aside = self.path.with_suffix(".part")
        aside.write_text("".join(json.dumps(line) + "\n" for line in self._history), "utf-8")
        aside.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if self._has_tensorboard:
            # Loads TensorBoard, an optional extra, and takes a second.
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

            self._events = SummaryWriter(
                str(self._root / "tensorboard"), purge_step=self._resumed_at + 1
            )
        if self._is_live:
            console = Console(file=sys.stdout)
            self._live = Live(self._table({}), console=console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._events is not None:
            self._events.close()
        self._file.close()

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Keep the numbers of a step, from 1; each line is on disk when this returns."""
        line = {"step": step, **metrics}
        self._history.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(name, value, step)
        if self._live is not None:
            self._live.update(self._table(metrics), refresh=True)

    def _table(self, metrics: dict[str, float]) -> Table:
        rewards = [line["reward_mean"] for line in self._history if "reward_mean" in line]
        step = int(self._history[-1]["step"]) if self._history else 0
        table = Table(title=f"step {step} of {self._steps}", title_justify="left")
        table.add_column("metric")
        table.add_column("value", justify="right")
        for name in _SHOWN:
            if name in metrics:
                table.add_row(name, f"{metrics[name]:.4g}")
        table.add_row("reward", sparkline(rewards))
        return table

    def plot(self) -> Path:
        """Draw the rewards as ``reward.png``; needs matplotlib."""
        import matplotlib as mpl  # noqa: PLC0415 - an optional extra, for the end of a run

        mpl.use("Agg")
        from matplotlib import pyplot  # noqa: PLC0415

        figure, axes = pyplot.subplots(figsize=(7, 4))
        for name, label in (("reward_mean", "training"), ("validation/reward_mean", "validation")):
            points = [(line["step"], line[name]) for line in self._history if name in line]
            if points:
                axes.plot(*zip(*points, strict=True), marker=".", label=label)
        axes.set_xlabel("step")
        axes.set_ylabel("mean reward")
        axes.grid(alpha=0.3)
        axes.legend()
        target = self._root / "reward.png"
        figure.savefig(target, dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        return target


def read_metrics(directory: str | Path) -> list[dict[str, float]]:
    """The lines of a run's ``metrics.jsonl``; a torn last line is left out."""
    path = Path(directory) / "metrics.jsonl"
    lines: list[dict[str, float]] = []
    if not path.exists():
        return lines
    for text in path.read_text("utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
