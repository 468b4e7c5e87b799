"""The viewer's server: a page, and the JSON that it asks for. Everything is a GET, nothing is written."""

from __future__ import annotations

import contextlib
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
from aiohttp import web

from gymrl.addresses import bound_socket
from gymrl.browsers import is_loopback
from gymrl.errors import ConfigError
from gymrl.listening import IDLE_S, Door
from gymrl.viewer.access import Access
from gymrl.viewer.handlers import Handlers, problems
from gymrl.viewer.rollout_file import RolloutFile
from gymrl.viewer.token_text import TokenTexts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gymrl.viewer.report import EvaluationReports

_PLAN_FILE, _ROLLOUTS_FILE = "plan.json", "rollouts.jsonl"


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
            _application(Handlers(file, texts, reports), access),
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=IDLE_S,
        )
        await runner.setup()
        door = None
        try:
            door = await _listen(runner, options)
            port = door.port
            host = socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host
            access.begin(port, _names(options.host, port) if is_loopback(options.host) else None)
            shown = f"[{host}]" if ":" in host else host
            query = f"?token={options.token}" if options.token else ""
            yield Viewer(f"http://{shown}:{port}/{query}", file)
        finally:
            with anyio.CancelScope(shield=True):
                if door is not None:
                    await door.close()
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


async def _listen(runner: web.AppRunner, options: ViewerOptions) -> Door:
    # "localhost" may be two addresses, and a free port of each would be another one.
    listen = "127.0.0.1" if options.host == "localhost" else options.host
    try:
        door = Door(runner, bound_socket(listen, options.port))
        await door.open()
    except OSError as error:
        raise ConfigError(
            f"{options.host}:{options.port} can't be listened on: {error.strerror}", setting="port"
        ) from error
    return door


def _names(host: str, port: int) -> list[str]:
    shown = f"[{host}]" if ":" in host else host
    return [f"{name}:{port}" for name in (shown, "127.0.0.1", "localhost", "[::1]")]


def _application(handlers: Handlers, access: Access) -> web.Application:
    app = web.Application(middlewares=[access.middleware, problems])
    app.add_routes(handlers.routes())
    return app
