"""The viewer's server: a page, and the JSON that it asks for.

Everything is a GET, and nothing is written. Rows are named by their line in the file, which holds as
long as the file is only appended to. What is decoded or searched is so in a thread; a few decoded
rows are kept, for a page asks for a row in several parts.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import logging
import secrets
import socket
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import msgspec
from aiohttp import web

from gymrl.browsers import is_loopback
from gymrl.errors import ConfigError, FileChangedError, RowValueError
from gymrl.records import MediaFolder
from gymrl.viewer.access import Access
from gymrl.viewer.detail import DecodedRow, first_difference
from gymrl.viewer.listing import group_entry, list_groups, list_rows, one_group, row_entry
from gymrl.viewer.query import parse_query
from gymrl.viewer.raw import raw_node
from gymrl.viewer.rollout_file import RolloutFile
from gymrl.viewer.token_text import TokenTexts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from gymrl.viewer.index import NameTables, Snapshot
    from gymrl.viewer.report import EvaluationReports

T = TypeVar("T")
logger = logging.getLogger(__name__)

_KEPT_BYTES = 64 << 20
_KEPT_ROWS = 16
_PAGES = (
    "/",
    "/rows",
    "/report",
    "/against",
    "/group/{number:\\d+}",
    "/row/{line:\\d+}",
    "/compare/{left:\\d+}/{right:\\d+}",
)
_PLAN_FILE, _ROLLOUTS_FILE = "plan.json", "rollouts.jsonl"
_STATIC_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_encoder = msgspec.json.Encoder()


class ViewerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a file is shown, and to whom.

    Attributes:
        host: To listen on. Beyond loopback a `token` is required.
        port: 0 takes a free one.
        token: What every browser must know; it is part of the address.
        tokenizer: A directory with ``tokenizer.json``, that file, or a hub id: shows the text of
            each token. Without it tokens are ids, and texts are shown by the turn.
        poll_s: Seconds between two looks for new rows.
        against: The directory of another evaluation, with which the one shown is compared.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    tokenizer: str | None = None
    poll_s: float = 0.5
    against: str | None = None


def new_token() -> str:
    """A token that can't be guessed."""
    return secrets.token_urlsafe(24)


class Viewer:
    """A viewer that is open.

    Attributes:
        url: Where it is, token included.
        file: What it shows.
    """

    def __init__(self, url: str, file: RolloutFile) -> None:
        self.url = url
        self.file = file


@contextlib.asynccontextmanager
async def open_viewer(
    path: str | Path, options: ViewerOptions | None = None
) -> AsyncIterator[Viewer]:
    """Show a file of rollouts until the block ends.

    The page can be used at once; a large file is indexed meanwhile, and a file that grows is
    followed.

    Args:
        path: A JSONL file of rollouts.
        options: Where and how.

    Raises:
        ConfigError: The file is none of rollouts, the tokenizer can't be loaded, the port is taken,
            the evaluation to compare with is none, or the host is beyond loopback and there is no token.
    """
    options = options or ViewerOptions()
    if not is_loopback(options.host) and not options.token:
        raise ConfigError(
            f"--host {options.host} would show the file to others on the network; require a token "
            "(--token), or leave it at loopback and use a tunnel (ssh -L)",
            setting="host",
        )
    texts = None
    if options.tokenizer is not None:
        texts = await anyio.to_thread.run_sync(TokenTexts, options.tokenizer)
    reports = await _reports_of(Path(path), options.against)
    access = Access(options.token)
    async with RolloutFile(path, poll_s=options.poll_s) as file:
        runner = web.AppRunner(
            _application(_Handlers(file, texts, reports), access),
            access_log=None,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        try:
            host, port = await _listen(runner, options)
            access.begin(port, _names(options.host, port) if is_loopback(options.host) else None)
            shown = f"[{host}]" if ":" in host else host
            query = f"?token={options.token}" if options.token else ""
            yield Viewer(f"http://{shown}:{port}/{query}", file)
        finally:
            with anyio.CancelScope(shield=True):
                await runner.cleanup()


async def _reports_of(path: Path, against: str | None) -> EvaluationReports | None:
    """Where there is a plan beside a file, it is an evaluation's."""
    if path.name != _ROLLOUTS_FILE or not path.with_name(_PLAN_FILE).is_file():
        if against is not None:
            raise ConfigError(
                f"{path} is not an evaluation's: there is no {_PLAN_FILE} beside it, so it can't be "
                f"compared with {against}",
                setting="against",
            )
        return None
    # It brings the rooms that run evaluations with it, which no other file needs.
    from gymrl.viewer.report import EvaluationReports  # noqa: PLC0415

    if against is None:
        return EvaluationReports(path)
    reports = EvaluationReports(path, Path(against))
    await reports.check_other()
    return reports


async def _listen(runner: web.AppRunner, options: ViewerOptions) -> tuple[str, int]:
    # "localhost" may be two addresses, and a free port of each would be another one.
    listen = "127.0.0.1" if options.host == "localhost" else options.host
    site = web.TCPSite(runner, listen, options.port)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(
            f"{options.host}:{options.port} can't be listened on: {error.strerror}", setting="port"
        ) from error
    address = runner.addresses[0]
    host = socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host
    return host, int(address[1])


def _names(host: str, port: int) -> list[str]:
    shown = f"[{host}]" if ":" in host else host
    return [f"{name}:{port}" for name in (shown, "127.0.0.1", "localhost", "[::1]")]


def _application(handlers: _Handlers, access: Access) -> web.Application:
    app = web.Application(middlewares=[access.middleware, _errors])
    for page in _PAGES:
        app.router.add_get(page, handlers.page)
    app.router.add_get("/static/{name}", handlers.static)
    for path, handler in (
        ("/api/status", handlers.status),
        ("/api/groups", handlers.groups),
        ("/api/groups/{number:\\d+}", handlers.group),
        ("/api/rows", handlers.rows),
        ("/api/rows/{line:\\d+}", handlers.row),
        ("/api/rows/{line:\\d+}/tokens", handlers.tokens),
        ("/api/rows/{line:\\d+}/raw", handlers.raw),
        ("/api/rows/{line:\\d+}/line", handlers.whole_line),
        ("/api/rows/{line:\\d+}/images/{number:\\d+}", handlers.image),
        ("/api/rows/{line:\\d+}/experts", handlers.experts),
        ("/api/report", handlers.report),
        ("/api/report/tasks", handlers.report_tasks),
        ("/api/report/comparison", handlers.report_comparison),
        ("/api/compare/{left:\\d+}/{right:\\d+}", handlers.compare),
    ):
        app.router.add_get(path, handler)
    return app


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(value), status=status, content_type="application/json")


def _problem(status: int, text: str) -> web.Response:
    return _json({"error": text}, status)


@web.middleware
async def _errors(
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


class _Handlers:
    """One method a path.

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

    async def page(self, request: web.Request) -> web.Response:
        del request
        return web.Response(
            body=self._static["index.html"], content_type="text/html", charset="utf-8"
        )

    async def static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        kind = _STATIC_TYPES.get(name[name.rfind(".") :])
        if kind is None or name not in self._static:
            return _problem(404, f"there is no {name}")
        return web.Response(body=self._static[name], content_type=kind, charset="utf-8")

    async def status(self, request: web.Request) -> web.Response:
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

    async def groups(self, request: web.Request) -> web.Response:
        return await self._list(request, list_groups)

    async def rows(self, request: web.Request) -> web.Response:
        return await self._list(request, list_rows)

    async def _list(self, request: web.Request, make: Callable[..., T]) -> web.Response:
        query = parse_query(request.query)
        snapshot, names, epoch = await self._moment()
        read = self._reader(epoch)
        return _json(await anyio.to_thread.run_sync(make, snapshot, names, query, read))

    def _reader(self, epoch: int) -> Callable[[int, int], bytes]:
        """Reads of one epoch's file, blocking, for work in a thread."""
        return lambda offset, size: self._file.read_now(offset, size, epoch)

    async def group(self, request: web.Request) -> web.Response:
        snapshot, names, epoch = await self._moment()
        number = int(request.match_info["number"])
        if number >= len(snapshot.groups):
            return _problem(404, f"there is no group {number} (yet)")
        read = self._reader(epoch)
        return _json(await anyio.to_thread.run_sync(one_group, snapshot, names, number, read))

    async def row(self, request: web.Request) -> web.Response:
        line = int(request.match_info["line"])
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

    async def tokens(self, request: web.Request) -> web.Response:
        decoded = await self._row_of(request)
        start, end = _number(request, "start", 0), _number(request, "end", 0)
        sequence = _number(request, "sequence", 0)
        span = await anyio.to_thread.run_sync(decoded.tokens, start, end, sequence, self._texts)
        return _json(span)

    async def raw(self, request: web.Request) -> web.Response:
        line = await self._line_of(request)
        path, offset = request.query.get("path", "[]"), _number(request, "offset", 0)
        return _json(await anyio.to_thread.run_sync(raw_node, line, path, offset))

    async def whole_line(self, request: web.Request) -> web.Response:
        line = await self._line_of(request)
        name = f"line-{request.match_info['line']}.json"
        return web.Response(
            body=line,
            content_type="application/json",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    async def image(self, request: web.Request) -> web.Response:
        decoded = await self._row_of(request)
        number = int(request.match_info["number"])
        kind, data = await anyio.to_thread.run_sync(decoded.image, number, limiter=self._one_image)
        return web.Response(body=data, content_type=kind)

    async def experts(self, request: web.Request) -> web.Response:
        decoded = await self._row_of(request)
        position, sequence = _number(request, "position", 0), _number(request, "sequence", 0)
        return _json({"experts": decoded.experts(position, sequence)})

    async def report(self, request: web.Request) -> web.Response:
        del request
        if self._reports is None:
            return _problem(404, _NO_EVALUATION)
        return _json(await self._reports.view())

    async def report_tasks(self, request: web.Request) -> web.Response:
        if self._reports is None:
            return _problem(404, _NO_EVALUATION)
        snapshot, _, _ = await self._moment()
        return _json(await self._reports.tasks(request.query, snapshot))

    async def report_comparison(self, request: web.Request) -> web.Response:
        del request
        if self._reports is None:
            return _problem(404, _NO_EVALUATION)
        snapshot, _, _ = await self._moment()
        return _json(await self._reports.comparison(snapshot))

    async def compare(self, request: web.Request) -> web.Response:
        snapshot, names, epoch = await self._moment()
        lines = [int(request.match_info[side]) for side in ("left", "right")]
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
        place = _place(snapshot, int(request.match_info["line"]))
        columns = snapshot.columns
        return await self._file.read(
            int(columns["offset"][place]), int(columns["size"][place]), epoch
        )

    async def _row_of(self, request: web.Request) -> DecodedRow:
        snapshot, _, epoch = await self._moment()
        return await self._decoded(snapshot, int(request.match_info["line"]), epoch)

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


_NO_EVALUATION = "this file is not an evaluation's: there is no plan.json beside it"
_NAMES = 200
"""Names of each kind that the page's filters offer."""


def _place(snapshot: Snapshot, line: int) -> int:
    place = snapshot.row_at_line(line)
    if place is None:
        raise RowValueError(f"line {line} is no row of this file (yet)")
    return place


def _first_line(snapshot: Snapshot, group: int) -> int | None:
    if not 0 <= group < len(snapshot.groups):
        return None
    return int(snapshot.columns["line"][snapshot.rows_of(group)[0]])


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 12:
        raise ConfigError(f"{name}={text[:40]} is no position", setting=name)
    return int(text)
