"""Which rows or groups a list shows, and in what order: from a query string to row numbers.

Pure arithmetic on columns; safe in a thread beside the scan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np

from gymrl.errors import ConfigError
from gymrl.viewer.scan import MASKED, TRUNCATED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gymrl.viewer.index import Column, Names, NameTables, Snapshot

Page = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
PageSize = Annotated[int, msgspec.Meta(ge=1, le=200)]
Flag = Literal["yes", "no"]

_GROUP_SORTS = {
    "file": "first",
    "mean": "mean",
    "min": "minimum",
    "max": "maximum",
    "std": "deviation",
    "rows": "rows",
    "failures": "failures",
    "truncated": "truncated",
    "tokens": "tokens",
}
_ROW_SORTS = ("line", "reward", "tokens", "generated", "turns", "size")


class ListQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A list's filters, order and page, as the page's address has them.

    Attributes:
        sort: A column, ``-`` before it for descending. Groups: file, mean, min, max, std, spread,
            rows, failures, truncated, tokens. Rows: line, reward, tokens, generated, turns, size.
        agent: Rows of this agent.
        route: Rows of this route.
        benchmark: Rows of this benchmark, in a file of an evaluation.
        failure: ``none``, ``any``, a kind (``infra``, ``data``), or one failure (``kind: error``).
        reward_min: Rows with at least this reward; failed rows have none.
        reward_max: Rows with at most this reward.
        tokens_min: Rows with at least so many tokens.
        tokens_max: Rows with at most so many tokens.
        truncated: Rows that were cut off, or those that were not.
        masked: Rows that the environment left out of the loss, or those it did not.
        mixed: Groups whose rewards differ, or those whose rewards are all the same.
        group: Rows of this group alone.
        q: Rows whose line holds this text.
        offset: Of the page's first entry.
        limit: Entries of a page.
        cursor: Where a search goes on.
    """

    sort: str = ""
    agent: str | None = None
    route: str | None = None
    benchmark: str | None = None
    failure: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    truncated: Flag | None = None
    masked: Flag | None = None
    mixed: Flag | None = None
    group: Page | None = None
    q: Annotated[str, msgspec.Meta(max_length=500)] = ""
    offset: Page = 0
    limit: PageSize = 50
    cursor: Page = 0


def parse_query(parameters: Mapping[str, str]) -> ListQuery:
    """The query of an address; empty parameters count as absent.

    Raises:
        ConfigError: A parameter is unknown or has no sound value; it is named.
    """
    given = {name: value for name, value in parameters.items() if value != ""}
    try:
        return msgspec.convert(given, ListQuery, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the address's query: {error}", setting="query") from error


def matching_rows(snapshot: Snapshot, names: NameTables, query: ListQuery) -> Column:
    """Bool, one a row: which rows pass every filter but the text."""
    columns = snapshot.columns
    keep = ~snapshot.superseded
    for column, table, wanted in (
        ("agent", names.agents, query.agent),
        ("route", names.routes, query.route),
        ("benchmark", names.benchmarks, query.benchmark),
    ):
        if wanted is not None:
            number = table.find(wanted)
            keep = keep & (columns[column] == (-2 if number is None else number))
    if query.failure is not None:
        keep = keep & _failed_so(columns["failure"], names.failures, query.failure)
    for column, low, high in (
        ("reward", query.reward_min, query.reward_max),
        ("tokens", query.tokens_min, query.tokens_max),
    ):
        if low is not None:
            keep = keep & (columns[column] >= low)
        if high is not None:
            keep = keep & (columns[column] <= high)
    for bit, wanted_flag in ((TRUNCATED, query.truncated), (MASKED, query.masked)):
        if wanted_flag is not None:
            keep = keep & (((columns["flags"] & bit) > 0) == (wanted_flag == "yes"))
    if query.mixed is not None:
        keep = keep & _mixed(snapshot, query.mixed)[columns["group"]]
    if query.group is not None:
        keep = keep & (columns["group"] == query.group)
    return keep


def _failed_so(failure: Column, names: Names, wanted: str) -> Column:
    if wanted == "none":
        return failure < 0
    if wanted == "any":
        return failure >= 0
    numbers = [
        number
        for number, text in enumerate(list(names.texts))
        if wanted in (text, text.split(":", 1)[0])
    ]
    return np.isin(failure, numbers)


def _mixed(snapshot: Snapshot, wanted: Flag) -> Column:
    # Groups without any reward are neither.
    stats = snapshot.stats
    return stats.maximum > stats.minimum if wanted == "yes" else stats.maximum == stats.minimum


def ordered_groups(snapshot: Snapshot, rows: Column, query: ListQuery) -> Column:
    """The numbers of groups with a matching row, in the order asked for.

    Raises:
        ConfigError: Groups can't be sorted by that.
    """
    stats = snapshot.stats
    name, descending = _sort_of(query.sort or "file")
    if name == "spread":
        values = stats.maximum - stats.minimum
    elif name in _GROUP_SORTS:
        values = getattr(stats, _GROUP_SORTS[name])
    else:
        raise _no_sort(name, [*_GROUP_SORTS, "spread"])
    chosen = np.unique(snapshot.columns["group"][rows])
    return chosen[_order(values[chosen], descending)]


def ordered_rows(snapshot: Snapshot, rows: Column, query: ListQuery) -> Column:
    """The numbers of matching rows, in the order asked for.

    Raises:
        ConfigError: Rows can't be sorted by that.
    """
    name, descending = _sort_of(query.sort or "line")
    if name not in _ROW_SORTS:
        raise _no_sort(name, _ROW_SORTS)
    chosen = np.flatnonzero(rows)
    return chosen[_order(snapshot.columns[name][chosen], descending)]


def _sort_of(sort: str) -> tuple[str, bool]:
    return sort.removeprefix("-"), sort.startswith("-")


def _no_sort(name: str, known: list[str] | tuple[str, ...]) -> ConfigError:
    return ConfigError(f"sort={name} is not known; there is {', '.join(known)}", setting="sort")


def _order(values: Column, descending: bool) -> Column:
    """Positions in order, equals in file order, NaN (no reward) always last."""
    floats = values.astype(np.float64)
    return np.argsort(-floats if descending else floats, kind="stable")
