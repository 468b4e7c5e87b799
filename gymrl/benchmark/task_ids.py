"""Ids for rows that have none of their own, where the configuration says where to take them from.

NeMo Gym's plans refuse such rows, and most of its benchmarks have them. ``task_ids_from`` is the name
of a field, with dots where it is nested (``verifier_metadata.task_id``), or ``content``: then a task's
id is made of what is asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gymrl.benchmark.plan import row_task_id, task_digest
from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

TASK_IDS_FROM = "task_ids_from"
CONTENT = "content"
_DIGITS = 16
"""Of the digest: two of a million tasks share them once in some tens of millions of data sets."""


def with_task_ids(rows: Sequence[dict[str, Any]], source: object) -> list[dict[str, Any]]:
    """The rows, with a ``task_id`` where they have no id.

    Args:
        rows: Flat rows, each once; not changed.
        source: A field's name, ``content``, or None: rows stay as they are.

    Raises:
        ConfigError: It is no name, or a row has no such field; names the row.
    """
    if source is None:
        return list(rows)
    if not isinstance(source, str) or not source:
        raise ConfigError(
            f"{TASK_IDS_FROM}={source!r}: give a field's name, or {CONTENT!r}",
            setting=TASK_IDS_FROM,
        )
    if source == CONTENT:
        return _by_content(rows)
    return [
        row if row_task_id(row) is not None else {**row, "task_id": _field(row, source, index)}
        for index, row in enumerate(rows)
    ]


def _field(row: Mapping[str, Any], path: str, index: int) -> str:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ConfigError(
            f"{TASK_IDS_FROM}={path!r}: row {index} has no text or whole number there, but {value!r}; "
            f"its fields are: {', '.join(row)}",
            setting=TASK_IDS_FROM,
        )
    return str(value)


def _by_content(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that ask the same are numbered: which of them is which makes no difference."""
    seen: Counter[str] = Counter()
    named = []
    for row in rows:
        if row_task_id(row) is None:
            digest = task_digest(row).removeprefix("sha256:")[:_DIGITS]
            seen[digest] += 1
            number = seen[digest]
            row = {**row, "task_id": digest if number == 1 else f"{digest}-{number}"}  # noqa: PLW2901 - a copy in its place
        named.append(row)
    return named
