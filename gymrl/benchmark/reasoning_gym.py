"""Tasks of the reasoning-gym package, one dataset a benchmark.

reasoning-gym generates tasks without end and scores answers with a function of each dataset. Here
a task is generated, checked and frozen into a row; the resources server scores with the same
function. What a language model says around its answer is taken away first by an *answer
extractor*, which the server's configuration names.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import msgspec

from gymrl.benchmark.base import (
    Benchmark,
    generator_seed,
    global_random,
    instance_name,
    refuse_unknown_params,
    require_count,
    simple_agent_servers,
    task_id,
)
from gymrl.config import SamplingParams
from gymrl.errors import ConfigError

ANSWER_EXTRACTORS = ("whole", "last_integer", "first_word", "answer_tag")

_ANSWER_TAG_HINT = "\nPut your final answer between <answer> and </answer>."
_FULL_MARKS = 0.999


class ReasoningGymPreset(msgspec.Struct, frozen=True, kw_only=True):
    """A dataset with the settings that make a benchmark of it.

    Attributes:
        name: The benchmark's name.
        description: One line.
        dataset: reasoning-gym's name of the dataset.
        settings: The dataset's settings; a caller's parameters win.
        answer_extractor: What of a reply is scored.
        prompt: Text of the user message; ``{question}`` stands for the dataset's question.
        sampling: Suggested.
    """

    name: str
    description: str
    dataset: str
    settings: dict[str, Any] = {}
    answer_extractor: str = "answer_tag"
    prompt: str | None = None
    sampling: SamplingParams = SamplingParams(max_tokens=512)


def _package() -> Any:
    """The module `reasoning_gym.factory`, which knows every dataset."""
    # Loaded when a benchmark of it is: the package takes a second and is an optional extra.
    try:
        import reasoning_gym  # noqa: PLC0415
        import reasoning_gym.factory  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"this benchmark needs the reasoning-gym package ({error}); "
            "install it with: pip install 'gymrl[tasks]'"
        ) from error
    return reasoning_gym.factory


def dataset_names() -> tuple[str, ...]:
    """Every dataset of the installed reasoning-gym that stands alone, sorted.

    Raises:
        ConfigError: The package is not installed.
    """
    return tuple(sorted(name for name in _package().DATASETS if name != "composite"))


def _make_dataset(preset: ReasoningGymPreset, size: int, seed: int, params: dict[str, Any]) -> Any:
    factory = _package()
    if preset.dataset not in dataset_names():
        close = difflib.get_close_matches(preset.dataset, dataset_names(), n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(
            f"reasoning-gym has no dataset {preset.dataset!r}.{hint} "
            f"Known: {', '.join(dataset_names())}.",
            setting="benchmark",
        )
    config_class = factory.DATASETS[preset.dataset][1]
    names = [field.name for field in dataclasses.fields(config_class)]
    known_params = [name for name in names if name not in ("seed", "size")]
    refuse_unknown_params(preset.name, params, [*known_params, "answer_extractor", "prompt"])
    settings = preset.settings | {k: v for k, v in params.items() if k in known_params}
    try:
        return factory.create_dataset(preset.dataset, size=size, seed=seed, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"benchmark {preset.name!r}: reasoning-gym refuses the settings {settings}: {error}",
            setting="params",
        ) from error


def _as_json(entry: dict[str, Any], where: str) -> dict[str, Any]:
    """The entry as it will arrive at the resources server."""
    try:
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(entry))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{where} cannot travel as JSON: {error}", setting="benchmark") from error
    return plain


def _checked_entry(dataset: Any, entry: dict[str, Any], where: str) -> dict[str, Any]:
    """The entry as plain data, once its own answer has earned full marks with it.

    Raises:
        ConfigError: There is no answer, it cannot travel as JSON, or after travelling the scorer
            raises or does not give the reference answer full marks: such an entry would grade
            right replies as wrong.
    """
    if not isinstance(entry.get("answer"), str):
        raise ConfigError(
            f"{where} has no answer (answer={entry.get('answer')!r}), so no reply to it can be "
            "checked; choose another dataset",
            setting="benchmark",
        )
    plain = _as_json(entry, where)
    try:
        score = float(dataset.score_answer(plain["answer"], plain))
    except Exception as error:
        raise ConfigError(
            f"{where} cannot be scored: its scorer raised {type(error).__name__}: {error}",
            setting="benchmark",
        ) from error
    if score < _FULL_MARKS:
        raise ConfigError(
            f"{where} cannot be scored: its scorer gives the reference answer {score:g} instead "
            "of 1 once the entry has travelled as JSON; choose another dataset",
            setting="benchmark",
        )
    return plain


def _prompt(template: str | None, extractor: str, question: str) -> str:
    if template is None:
        return question + (_ANSWER_TAG_HINT if extractor == "answer_tag" else "")
    return template.replace("{question}", question)


def load_reasoning_gym(
    preset: ReasoningGymPreset, *, num_tasks: int, seed: int, params: dict[str, Any]
) -> Benchmark:
    """Generate the tasks of one dataset.

    Args:
        preset: The dataset and its settings.
        num_tasks: How many; the first `n` of a longer benchmark are those of a shorter one for
            datasets that draw each task on its own.
        seed: Decides the tasks.
        params: Settings of the dataset by its own names, and ``answer_extractor`` and ``prompt``
            (a text in which ``{question}`` is replaced).

    Raises:
        ConfigError: An unknown dataset or parameter, settings the dataset refuses, or an entry
            that cannot be graded.
    """
    require_count(num_tasks)
    extractor = params.get("answer_extractor", preset.answer_extractor)
    if extractor not in ANSWER_EXTRACTORS:
        raise ConfigError(
            f"answer_extractor={extractor!r}: must be one of {', '.join(ANSWER_EXTRACTORS)}",
            setting="answer_extractor",
        )
    template = params.get("prompt", preset.prompt)
    if template is not None and "{question}" not in str(template):
        raise ConfigError(f"prompt={template!r}: must contain {{question}}", setting="prompt")
    instance = instance_name(preset.name)
    base = generator_seed(preset.name, seed)
    dataset = _make_dataset(preset, num_tasks, base, params)
    rows = []
    for index in range(num_tasks):
        where = f"benchmark {preset.name!r}: entry {index} of reasoning-gym {preset.dataset!r}"
        with global_random(base + index):
            entry = _checked_entry(dataset, dataset[index], where)
        text = _prompt(template, extractor, entry["question"])
        rows.append(
            {
                "task_id": task_id(preset.name, seed, index),
                "task_source": instance,
                "dataset": preset.dataset,
                "entry": entry,
                "responses_create_params": {"input": [{"role": "user", "content": text}]},
            }
        )
    resources = {
        "entrypoint": "gymrl.gym.embedded.reasoning_gym:ReasoningGymServer",
        "answer_extractor": extractor,
    }
    return Benchmark(
        name=preset.name,
        description=preset.description,
        rows=tuple(rows),
        servers=simple_agent_servers(instance, "reasoning_gym", resources, max_steps=1),
        sampling=preset.sampling,
    )
