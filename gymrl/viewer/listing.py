"""Pages of groups, pages of rows, and searches: from a snapshot to what a page lists."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import FileChangedError
from gymrl.viewer.query import ListQuery, matching_rows, ordered_groups, ordered_rows
from gymrl.viewer.scan import MASKED, PLACEHOLDER, SIDES, TRUNCATED

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.viewer.index import NameTables, Snapshot

SEARCH_BYTES = 64 << 20
SEARCH_S = 0.5
"""A search answers after so many bytes or seconds, with where it goes on."""
GROUP_ROWS = 64
"""Rows of a group that a list shows; the group's own page has all."""
_SNIPPET_CHARS = 60
PREVIEW_CHARS = 200


class RowEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A row in a list. `failure` is empty where there is a trajectory; then `reward` is a number."""

    line: int
    group: int
    index: int
    rollout_index: int
    agent: str
    route: str
    benchmark: str
    failure: str
    reward: float | None
    tokens: int
    generated: int
    turns: int
    size: int
    truncated: bool
    masked: bool
    placeholder: bool
    sides: bool
    superseded: bool
    snippet: str = ""


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a list.

    Attributes:
        number: In file order, from 0.
        expected: Rows that it should have.
        count: Rows that it has.
        rows: The first of them.
        preview: The beginning of its prompt.
    """

    number: int
    run: int
    group: int
    task_index: int
    route: str
    expected: int
    count: int
    failures: int
    truncated: int
    minimum: float | None
    mean: float | None
    maximum: float | None
    deviation: float | None
    tokens: float | None
    rows: list[RowEntry]
    preview: str = ""


class GroupPage(msgspec.Struct, frozen=True):
    """One page of groups."""

    total: int
    offset: int
    groups: list[GroupEntry]
    matching_rows: int


class RowPage(msgspec.Struct, frozen=True):
    """One page of rows.

    Attributes:
        total: All rows that pass the filters; of a search those that were looked at so far.
        cursor: Where a search goes on; None where it is done, or where there is none.
        scanned: Bytes that this answer's search has read.
    """

    total: int
    offset: int
    rows: list[RowEntry]
    cursor: int | None = None
    scanned: int = 0


def row_entry(snapshot: Snapshot, names: NameTables, row: int, snippet: str = "") -> RowEntry:
    """A row of the snapshot as lists show it."""
    columns = snapshot.columns
    number = {name: int(columns[name][row]) for name in columns if name != "reward"}
    failed = number["failure"] >= 0
    flags = number["flags"]
    return RowEntry(
        line=number["line"],
        group=number["group"],
        index=number["index"],
        rollout_index=number["rollout_index"],
        agent=names.agents.texts[number["agent"]],
        route=names.routes.texts[number["route"]],
        benchmark=names.benchmarks.texts[number["benchmark"]],
        failure=names.failures.texts[number["failure"]] if failed else "",
        reward=None if failed else float(columns["reward"][row]),
        tokens=number["tokens"],
        generated=number["generated"],
        turns=number["turns"],
        size=number["size"],
        truncated=bool(flags & TRUNCATED),
        masked=bool(flags & MASKED),
        placeholder=bool(flags & PLACEHOLDER),
        sides=bool(flags & SIDES),
        superseded=bool(snapshot.superseded[row]),
        snippet=snippet,
    )


def group_entry(
    snapshot: Snapshot, names: NameTables, number: int, limit: int | None = GROUP_ROWS
) -> GroupEntry:
    """A group of the snapshot with its rows, at most `limit` of them."""
    group, stats = snapshot.groups[number], snapshot.stats
    rows = snapshot.rows_of(number)

    def value(column: Any) -> float | None:
        found = float(column[number])
        return None if math.isnan(found) else found

    return GroupEntry(
        number=number,
        run=group.run,
        group=group.group,
        task_index=group.task_index,
        route=group.route,
        expected=group.size,
        count=int(stats.rows[number]),
        failures=int(stats.failures[number]),
        truncated=int(stats.truncated[number]),
        minimum=value(stats.minimum),
        mean=value(stats.mean),
        maximum=value(stats.maximum),
        deviation=value(stats.deviation),
        tokens=value(stats.tokens),
        rows=[row_entry(snapshot, names, row) for row in rows[:limit]],
    )


def list_groups(
    snapshot: Snapshot, names: NameTables, query: ListQuery, read: Callable[[int, int], bytes]
) -> GroupPage:
    """One page of groups. Reads the first line of each for its prompt.

    Raises:
        ConfigError: Groups can't be sorted so.
    """
    matching = matching_rows(snapshot, names, query)
    chosen = ordered_groups(snapshot, matching, query)
    page = chosen[query.offset : query.offset + query.limit]
    return GroupPage(
        total=len(chosen),
        offset=query.offset,
        groups=[one_group(snapshot, names, int(number), read, GROUP_ROWS) for number in page],
        matching_rows=int(matching.sum()),
    )


def one_group(
    snapshot: Snapshot,
    names: NameTables,
    number: int,
    read: Callable[[int, int], bytes],
    limit: int | None = None,
) -> GroupEntry:
    """A group with its prompt, for which its first line is read."""
    entry = group_entry(snapshot, names, number, limit)
    preview = _preview(snapshot, int(snapshot.stats.first[number]), read)
    return msgspec.structs.replace(entry, preview=preview)


def list_rows(
    snapshot: Snapshot, names: NameTables, query: ListQuery, read: Callable[[int, int], bytes]
) -> RowPage:
    """One page of rows, or the next part of a search.

    Raises:
        ConfigError: Rows can't be sorted so.
        FileChangedError: The file changed under a search.
    """
    chosen = ordered_rows(snapshot, matching_rows(snapshot, names, query), query)
    if query.q:
        return _search(snapshot, names, query, [int(row) for row in chosen[query.cursor :]], read)
    page = chosen[query.offset : query.offset + query.limit]
    rows = [row_entry(snapshot, names, int(row)) for row in page]
    return RowPage(len(chosen), query.offset, rows)


def _search(
    snapshot: Snapshot,
    names: NameTables,
    query: ListQuery,
    rows: list[int],
    read: Callable[[int, int], bytes],
) -> RowPage:
    """Lines that hold the text, in the order of `rows`, until one of the bounds is met."""
    wanted = _needles(query.q)
    found: list[RowEntry] = []
    scanned = looked = 0
    ends = time.monotonic() + SEARCH_S
    columns = snapshot.columns
    for row in rows:
        if scanned >= SEARCH_BYTES or len(found) >= query.limit or time.monotonic() > ends:
            break
        size = int(columns["size"][row])
        line = read(int(columns["offset"][row]), size)
        scanned += size
        looked += 1
        snippet = _find(line, wanted)
        if snippet is not None:
            found.append(row_entry(snapshot, names, row, snippet))
    cursor = query.cursor + looked
    done = looked == len(rows)
    return RowPage(cursor, query.cursor, found, None if done else cursor, scanned)


def _needles(text: str) -> list[bytes]:
    """How JSON may spell a text, in lower case: as UTF-8, or in ASCII with escapes."""
    plain = msgspec.json.encode(text)[1:-1].lower()
    if text.isascii():
        return [plain]
    return [plain, b"".join(_escaped(character) for character in text).lower()]


def _escaped(character: str) -> bytes:
    r"""A character as writers that keep to ASCII spell it: ``\uXXXX``, in pairs where needed."""
    if character.isascii():
        return msgspec.json.encode(character)[1:-1]
    units = character.encode("utf-16-be")
    pairs = [units[place : place + 2] for place in range(0, len(units), 2)]
    return b"".join(b"\\u" + pair.hex().encode() for pair in pairs)


_NOT_TEXTS = ((b'"token_ids":[', b'],"turns":'), (b'"routed_experts":"', b'"'))


def _texts_of(line: bytes) -> bytes:
    """A line without token ids, log-probabilities and routes: in them any number would be found."""
    place = max(0, line.find(b'"trajectory":{"agent":'))
    for begins, ends in _NOT_TEXTS:
        start = line.find(begins, place)
        end = line.find(ends, start + len(begins))
        if 0 <= start < end:
            line = line[:start] + line[end:]
    return line


def _find(line: bytes, needles: list[bytes]) -> str | None:
    """What is around the first place of a text, ASCII letters in either case; None without one."""
    texts = _texts_of(line)
    lower = texts.lower()
    for needle in needles:
        place = lower.find(needle)
        if place >= 0:
            end = place + len(needle) + _SNIPPET_CHARS
            return texts[max(0, place - _SNIPPET_CHARS) : end].decode("utf-8", "ignore")
    return None


class _Message(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b'""')


class _Params(msgspec.Struct, frozen=True):
    input: str | list[msgspec.Raw] = ""


class _Task(msgspec.Struct):
    responses_create_params: _Params = _Params()


class _Turn(msgspec.Struct):
    prompt_text: str | None = None


class _Trajectory(msgspec.Struct):
    turns: list[_Turn] = []


class _Line(msgspec.Struct):
    task: msgspec.Raw = msgspec.Raw(b"{}")
    trajectory: _Trajectory | None = None


_line_decoder = msgspec.json.Decoder(_Line)


def _preview(snapshot: Snapshot, row: int, read: Callable[[int, int], bytes]) -> str:
    """The beginning of a row's last user message; else of its first prompt; else nothing."""
    columns = snapshot.columns
    try:
        line = _line_decoder.decode(read(int(columns["offset"][row]), int(columns["size"][row])))
    except (FileChangedError, msgspec.DecodeError):
        return ""
    text = _user_text(line.task)
    if not text and line.trajectory is not None and line.trajectory.turns:
        text = line.trajectory.turns[0].prompt_text or ""
    return " ".join(text[: 4 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]


def _user_text(task: msgspec.Raw) -> str:
    try:
        given = msgspec.json.decode(task, type=_Task).responses_create_params.input
        if isinstance(given, str):
            return given
        for raw in reversed(given):
            message = msgspec.json.decode(raw, type=_Message)
            if message.role == "user":
                return _content_text(msgspec.json.decode(message.content))
    except msgspec.DecodeError:
        return ""
    return ""


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return " ".join(text for text in texts if isinstance(text, str))
