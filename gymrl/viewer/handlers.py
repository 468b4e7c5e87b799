"""What the viewer's page asks for, one method a path: JSON, the page's own files, images.

Rows are named by their line in the file, which holds as long as the file is only appended to. What is
decoded or searched is so in a thread; a few decoded rows are kept, for a page asks for a row in several
parts.
"""

from __future__ import annotations

import importlib.resources
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgspec
from aiohttp import web

from gymrl.errors import ConfigError, FileChangedError, RowValueError
from gymrl.records import MediaFolder
from gymrl.viewer.detail import DecodedRow, first_difference
from gymrl.viewer.listing import group_entry, list_groups, list_rows, one_group, row_entry
from gymrl.viewer.query import parse_query
from gymrl.viewer.raw import raw_node

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gymrl.viewer.index import NameTables, Snapshot
    from gymrl.viewer.report import EvaluationReports
    from gymrl.viewer.rollout_file import RolloutFile
    from gymrl.viewer.token_text import TokenTexts

T = TypeVar("T")

_PAGES = (
    "/",
    "/rows",
    "/report",
    "/against",
    "/group/{number:\\d+}",
    "/row/{line:\\d+}",
    "/compare/{left:\\d+}/{right:\\d+}",
)
_KEPT_BYTES = 64 << 20
_KEPT_ROWS = 16
_STATIC_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_NO_EVALUATION = "this file is not an evaluation's: there is no plan.json beside it"
_MAX_DIGITS = 30
_NAMES = 200
"""Names of each kind that the page's filters offer."""

_encoder = msgspec.json.Encoder()


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(value), status=status, content_type="application/json")


def _problem(status: int, text: str) -> web.Response:
    return _json({"error": text}, status)


@web.middleware
async def problems(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What can be wrong with a request, as JSON for the page."""
    try:
        return await handler(request)
    except ConfigError as error:
        return _problem(400, error.message)
    except RowValueError as error:
        return _problem(404, error.message)
    except FileChangedError as error:
        return _problem(409, error.message)


class Handlers:
    """One method a path; see :meth:`routes`.

    Args:
        file: What is shown.
        texts: Texts of tokens, where there is a tokenizer.
        reports: Of the evaluation that the file is of, where it is one's.
    """

    def __init__(
        self, file: RolloutFile, texts: TokenTexts | None, reports: EvaluationReports | None
    ) -> None:
        self._file = file
        self._texts = texts
        self._reports = reports
        self._media = MediaFolder(file.path)
        # The folder keeps what it has read, for one thread at a time.
        self._one_image = anyio.CapacityLimiter(1)
        self._static = {
            entry.name: entry.read_bytes()
            for entry in (importlib.resources.files("gymrl.viewer") / "static").iterdir()
            if entry.is_file()
        }
        self._kept: OrderedDict[tuple[int, int], DecodedRow] = OrderedDict()

    def routes(self) -> list[web.RouteDef]:
        """All paths, and what answers them."""
        table = dict.fromkeys(_PAGES, self._page) | {
            "/static/{name}": self._static_file,
            "/api/status": self._status,
            "/api/groups": self._groups,
            "/api/groups/{number:\\d+}": self._group,
            "/api/rows": self._rows,
            "/api/rows/{line:\\d+}": self._row,
            "/api/rows/{line:\\d+}/tokens": self._tokens,
            "/api/rows/{line:\\d+}/raw": self._raw,
            "/api/rows/{line:\\d+}/line": self._whole_line,
            "/api/rows/{line:\\d+}/images/{number:\\d+}": self._image,
            "/api/rows/{line:\\d+}/experts": self._experts,
            "/api/report": self._report,
            "/api/report/tasks": self._report_tasks,
            "/api/report/comparison": self._report_comparison,
            "/api/compare/{left:\\d+}/{right:\\d+}": self._compare,
        }
        return [web.get(path, handler) for path, handler in table.items()]

    async def _page(self, request: web.Request) -> web.Response:
        del request
        return web.Response(
            body=self._static["index.html"], content_type="text/html", charset="utf-8"
        )

    async def _static_file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        kind = _STATIC_TYPES.get(name[name.rfind(".") :])
        if kind is None or name not in self._static:
            return _problem(404, f"there is no {name}")
        return web.Response(body=self._static[name], content_type=kind, charset="utf-8")

    async def _status(self, request: web.Request) -> web.Response:
        del request
        index, progress = self._file.index, self._file.progress
        names = index.names
        return _json(
            {
                "file": self._file.path.name,
                "path": str(self._file.path.absolute()),
                "tokenizer": self._texts is not None,
                "evaluation": self._reports is not None,
                "against": self._reports is not None and self._reports.has_other,
                "progress": progress,
                "rows": index.num_rows,
                "groups": index.num_groups,
                "broken": index.num_broken,
                "broken_lines": index.broken,
                "agents": names.agents.texts[:_NAMES],
                "routes": names.routes.texts[:_NAMES],
                "benchmarks": [text for text in names.benchmarks.texts[:_NAMES] if text],
                "failures": names.failures.texts[:_NAMES],
                "runs": len(index.runs),
            }
        )

    async def _groups(self, request: web.Request) -> web.Response:
        return await self._list(request, list_groups)

    async def _rows(self, request: web.Request) -> web.Response:
        return await self._list(request, list_rows)

    async def _list(self, request: web.Request, make: Callable[..., T]) -> web.Response:
        query = parse_query(request.query)
        snapshot, names, epoch = await self._moment()
        read = self._reader(epoch)
        return _json(await anyio.to_thread.run_sync(make, snapshot, names, query, read))

    def _reader(self, epoch: int) -> Callable[[int, int], bytes]:
        """Reads of one epoch's file, blocking, for work in a thread."""
        return lambda offset, size: self._file.read_now(offset, size, epoch)

    async def _group(self, request: web.Request) -> web.Response:
        snapshot, names, epoch = await self._moment()
        number = _named(request, "number")
        if number >= len(snapshot.groups):
            return _problem(404, f"there is no group {number} (yet)")
        read = self._reader(epoch)
        return _json(await anyio.to_thread.run_sync(one_group, snapshot, names, number, read))

    async def _row(self, request: web.Request) -> web.Response:
        line = _named(request, "line")
        snapshot, names, epoch = await self._moment()
        place = _place(snapshot, line)
        try:
            decoded = await self._decoded(snapshot, line, epoch)
        except RowValueError as error:
            # The row is there, but not whole; its raw JSON can still be had.
            return _problem(422, error.message)
        number = int(snapshot.columns["group"][place])
        return _json(
            {
                "row": await anyio.to_thread.run_sync(decoded.view),
                "entry": row_entry(snapshot, names, place),
                "group": group_entry(snapshot, names, number, None),
                "next_group": _first_line(snapshot, number + 1),
                "previous_group": _first_line(snapshot, number - 1),
            }
        )

    async def _tokens(self, request: web.Request) -> web.Response:
        decoded = await self._row_of(request)
        start, end = _number(request, "start", 0), _number(request, "end", 0)
        sequence = _number(request, "sequence", 0)
        span = await anyio.to_thread.run_sync(decoded.tokens, start, end, sequence, self._texts)
        return _json(span)

    async def _raw(self, request: web.Request) -> web.Response:
        line = await self._line_of(request)
        path, offset = request.query.get("path", "[]"), _number(request, "offset", 0)
        return _json(await anyio.to_thread.run_sync(raw_node, line, path, offset))

    async def _whole_line(self, request: web.Request) -> web.Response:
        line = await self._line_of(request)
        name = f"line-{request.match_info['line']}.json"
        return web.Response(
            body=line,
            content_type="application/json",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    async def _image(self, request: web.Request) -> web.Response:
        decoded = await self._row_of(request)
        number = _named(request, "number")
        kind, data = await anyio.to_thread.run_sync(decoded.image, number, limiter=self._one_image)
        return web.Response(body=data, content_type=kind)

    async def _experts(self, request: web.Request) -> web.Response:
        decoded = await self._row_of(request)
        position, sequence = _number(request, "position", 0), _number(request, "sequence", 0)
        return _json({"experts": decoded.experts(position, sequence)})

    async def _report(self, request: web.Request) -> web.Response:
        del request
        if self._reports is None:
            return _problem(404, _NO_EVALUATION)
        return _json(await self._reports.view())

    async def _report_tasks(self, request: web.Request) -> web.Response:
        if self._reports is None:
            return _problem(404, _NO_EVALUATION)
        snapshot, _, _ = await self._moment()
        return _json(await self._reports.tasks(request.query, snapshot))

    async def _report_comparison(self, request: web.Request) -> web.Response:
        del request
        if self._reports is None:
            return _problem(404, _NO_EVALUATION)
        snapshot, _, _ = await self._moment()
        return _json(await self._reports.comparison(snapshot))

    async def _compare(self, request: web.Request) -> web.Response:
        snapshot, names, epoch = await self._moment()
        lines = [_named(request, side) for side in ("left", "right")]
        decoded = [await self._decoded(snapshot, line, epoch) for line in lines]
        groups = {int(snapshot.columns["group"][_place(snapshot, line)]) for line in lines}
        difference = None
        failed = any(one.record.trajectory is None for one in decoded)
        if not failed:
            left, right = (one.arrays()[0] for one in decoded)
            difference = first_difference(left, right)
        return _json(
            {
                "rows": [await anyio.to_thread.run_sync(one.view) for one in decoded],
                "first_difference": difference,
                "identical": not failed and difference is None,
                "group": group_entry(snapshot, names, groups.pop(), None)
                if len(groups) == 1
                else None,
            }
        )

    async def _moment(self) -> tuple[Snapshot, NameTables, int]:
        """The index, its names and its epoch, of one moment."""
        while True:
            epoch, index = self._file.epoch, self._file.index
            snapshot = await self._file.snapshot()
            if epoch == self._file.epoch:
                return snapshot, index.names, epoch

    async def _line_of(self, request: web.Request) -> bytes:
        snapshot, _, epoch = await self._moment()
        place = _place(snapshot, _named(request, "line"))
        columns = snapshot.columns
        return await self._file.read(
            int(columns["offset"][place]), int(columns["size"][place]), epoch
        )

    async def _row_of(self, request: web.Request) -> DecodedRow:
        snapshot, _, epoch = await self._moment()
        return await self._decoded(snapshot, _named(request, "line"), epoch)

    async def _decoded(self, snapshot: Snapshot, line: int, epoch: int) -> DecodedRow:
        kept = self._kept.get((epoch, line))
        if kept is not None:
            self._kept.move_to_end((epoch, line))
            return kept
        place, columns = _place(snapshot, line), snapshot.columns
        data = await self._file.read(
            int(columns["offset"][place]), int(columns["size"][place]), epoch
        )
        decoded = await anyio.to_thread.run_sync(DecodedRow, line, data, self._media)
        self._kept[epoch, line] = decoded
        while len(self._kept) > 1 and (
            len(self._kept) > _KEPT_ROWS
            or sum(row.size for row in self._kept.values()) > _KEPT_BYTES
        ):
            self._kept.popitem(last=False)
        return decoded


def _place(snapshot: Snapshot, line: int) -> int:
    place = snapshot.row_at_line(line)
    if place is None:
        raise RowValueError(f"line {line} is no row of this file (yet)")
    return place


def _first_line(snapshot: Snapshot, group: int) -> int | None:
    if not 0 <= group < len(snapshot.groups):
        return None
    return int(snapshot.columns["line"][snapshot.rows_of(group)[0]])


def _named(request: web.Request, name: str) -> int:
    """A number of the path; Python reads no longer ones, and no file has them."""
    text = request.match_info[name]
    if len(text) > _MAX_DIGITS:
        raise RowValueError(f"there is no {name} {text[:_MAX_DIGITS]}...")
    return int(text)


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 12:
        raise ConfigError(f"{name}={text[:40]} is no position", setting=name)
    return int(text)
