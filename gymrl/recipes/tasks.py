"""What a run trains on: the recipe's own two tasks with their tiny models, or a benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from gymrl.benchmark import load_benchmark
from gymrl.recipes.look_up import build_look_up_model, look_up_rows, look_up_servers
from gymrl.recipes.say_word import WORDS, build_word_model, say_word_rows, say_word_servers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gymrl.benchmark import Benchmark
    from gymrl.recipes.settings import GrpoConfig


class OwnTask(NamedTuple):
    """A task that brings its model.

    Attributes:
        rows: Of so many tasks, by a seed.
        most: How many different ones there are; None: more than anyone asks for.
        servers: The environment and its agent.
        build_model: Writes the model of a seed into a directory.
    """

    rows: Callable[[int, int], list[dict[str, Any]]]
    most: int | None
    servers: Callable[[], dict[str, Any]]
    build_model: Callable[[Path, int], Path]


def _cycled(count: int, seed: int) -> list[dict[str, Any]]:
    """There are as many tasks as words; a validation may want more."""
    del seed
    rows = say_word_rows()
    return [rows[index % len(rows)] for index in range(count)]


OWN_TASKS = {
    "say_word": OwnTask(
        rows=_cycled,
        most=len(WORDS),
        servers=say_word_servers,
        build_model=lambda directory, seed: build_word_model(directory, seed=seed, layers=1),
    ),
    "look_up": OwnTask(
        rows=lambda count, seed: look_up_rows(count, seed=seed),
        most=None,
        servers=look_up_servers,
        build_model=lambda directory, seed: build_look_up_model(directory, seed=seed, layers=2),
    ),
}
"""The recipe's own tasks, by the name that `GrpoConfig.benchmark` takes."""

_HELD_OUT = 1_000_003


def training_task(config: GrpoConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and servers of a run."""
    own = OWN_TASKS.get(config.benchmark)
    if own is not None:
        count = min(config.num_tasks, own.most or config.num_tasks)
        return own.rows(count, config.seed), own.servers()
    benchmark = _benchmark(config, config.num_tasks, config.seed)
    return list(benchmark.rows), benchmark.servers


def validation_rows(config: GrpoConfig) -> list[dict[str, Any]]:
    """Rows of a validation: drawn by another seed than those that are trained on."""
    count, seed = config.validation_prompts, config.seed + _HELD_OUT
    own = OWN_TASKS.get(config.benchmark)
    return own.rows(count, seed) if own is not None else list(_benchmark(config, count, seed).rows)


def _benchmark(config: GrpoConfig, num_tasks: int, seed: int) -> Benchmark:
    params = config.benchmark_params
    return load_benchmark(config.benchmark, num_tasks=num_tasks, seed=seed, params=params)
