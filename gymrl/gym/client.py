"""HTTP towards Gym servers: a pooled session, and every aiohttp error as one of ours.

This is the only module that knows aiohttp's errors. They hold what cannot cross a process boundary
(request headers, open connections), so they end here: what leaves is a typed failure with URL,
status and the beginning of the body. Nothing is sent twice; what a failed attempt means is decided
by the caller, from :func:`failure_of`.
"""

from __future__ import annotations

import contextlib
import io
import traceback
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import anyio.to_thread
import msgspec

from gymrl.concurrency import deadline
from gymrl.errors import (
    ActorDiedError,
    DeadlineExceeded,
    GymRequestError,
    GymrlError,
    GymTransportError,
    RolloutFailure,
    RolloutTimeout,
    ServerError,
)
from gymrl.gym.deaths import DeathWatch
from gymrl.types import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gymrl.types import Row

BODY_EXCERPT_CHARS = 2000
LARGE_BODY_BYTES = 1 << 19
MAX_ANSWER_BYTES = 1 << 30
CHAIN_LIMIT = 16
TRACEBACK_CHARS = 8000
RETRIABLE_STATUSES = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


class HttpAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A complete HTTP answer.

    Attributes:
        cookies: What ``Set-Cookie`` set, spelled as it came.
        retry_after_s: Seconds from ``Retry-After``, where it gives seconds.
        location: Where a redirect leads.
    """

    url: str
    status: int
    body: bytes
    cookies: dict[str, str] = {}
    retry_after_s: float | None = None
    location: str | None = None

    @property
    def excerpt(self) -> str:
        """The beginning of the body as text."""
        return self.body[: 4 * BODY_EXCERPT_CHARS].decode("utf-8", "replace")[:BODY_EXCERPT_CHARS]


class HttpPool:
    """One session's worth of connections. Belongs to the event loop that opened it.

    There is no limit on the number of connections or on the wait for an answer (generations are
    long); callers bound what they start and set deadlines. Connecting has its own limit. Redirects
    are not followed: they would make a GET of a POST, or lead where nobody was told of.

    Args:
        connect_timeout_s: For a TCP connection to be made.
        headers: Sent with every request.
        reuses_connections: False: each request has a connection of its own. A server that answers
            twice, or late, then can't have its answer taken for that of another request.
        max_answer_bytes: Longer answers are refused, decompressed bytes counted.
    """

    def __init__(
        self,
        connect_timeout_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
        *,
        reuses_connections: bool = True,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._headers = dict(headers or {})
        self._reuses_connections = reuses_connections
        self._max_answer_bytes = max_answer_bytes
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # Servers commonly drop idle connections after 5 s; a shorter life here keeps a request
        # from being written to a connection that is being closed.
        life = {"keepalive_timeout": 3.0} if self._reuses_connections else {"force_close": True}
        connector = aiohttp.TCPConnector(limit=0, **life)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection. Safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(
        self, url: str, body: bytes, cookies: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """POST JSON and read the whole answer, whatever its status.

        Cancelling closes the connection, so that the server sees it.

        Raises:
            GymTransportError: No complete answer came.
            GymRequestError: `url` is no URL, or the answer is a redirect or longer than
                `max_answer_bytes`.
        """
        headers = {"Content-Type": "application/json"}
        if cookies:
            headers["Cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        # Written in pieces, so that a large body does not hold the event loop.
        data = io.BytesIO(body) if len(body) > LARGE_BODY_BYTES else body
        answer = await self._request("POST", url, data=data, headers=headers)
        if HTTPStatus.MULTIPLE_CHOICES <= answer.status < HTTPStatus.BAD_REQUEST:
            raise GymRequestError(
                f"{url}: HTTP {answer.status}, a redirect to {answer.location!r}, which is not "
                "followed; configure the address that it leads to",
                url=url,
                status=answer.status,
            )
        return answer

    async def get(self, url: str) -> HttpAnswer:
        """GET and read the whole answer. Raises as :meth:`post`, but for a redirect."""
        return await self._request("GET", url)

    async def delete(self, url: str) -> HttpAnswer:
        """DELETE and read the whole answer. Raises as :meth:`post`."""
        return await self._request("DELETE", url)

    async def _request(self, method: str, url: str, **arguments: Any) -> HttpAnswer:
        if self._session is None:
            raise RuntimeError("the HTTP pool is not open: use it as an async context manager")
        with _typed_errors(url):
            async with self._session.request(
                method, url, allow_redirects=False, **arguments
            ) as response:
                body = await self._whole_body(url, response.content)
                return HttpAnswer(
                    url=url,
                    status=response.status,
                    body=body,
                    cookies={k: morsel.coded_value for k, morsel in response.cookies.items()},
                    retry_after_s=_seconds(response.headers.get("Retry-After")),
                    location=response.headers.get("Location"),
                )

    async def _whole_body(self, url: str, content: aiohttp.StreamReader) -> bytes:
        """All bytes of an answer.

        Those of a large one are put together in a thread: when many rows end at once, their copies
        one after the other would hold the event loop.
        """
        chunks: list[bytes] = []
        size = 0
        async for chunk in content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > self._max_answer_bytes:
                raise GymRequestError(
                    f"{url}: the answer is longer than {self._max_answer_bytes} bytes", url=url
                )
        if size <= LARGE_BODY_BYTES:
            return b"".join(chunks)
        return await anyio.to_thread.run_sync(b"".join, chunks)


@contextlib.contextmanager
def _typed_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise GymRequestError(f"{url!r} is no URL that can be requested", url=url) from error
    except aiohttp.ServerTimeoutError as error:
        was_sent = False if isinstance(error, aiohttp.ConnectionTimeoutError) else None
        raise GymTransportError(
            f"{url}: no connection in time ({error})", url=url, was_sent=was_sent
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise GymTransportError(f"{url}: {_described(error)}", url=url, was_sent=False) from error
    except aiohttp.ClientPayloadError as error:
        raise GymTransportError(f"{url}: the answer ended early ({error})", url=url) from error
    except aiohttp.ClientResponseError as error:
        # It has a status, 400, that no server sent; as a cause it would decide whose fault this is.
        raise GymTransportError(
            f"{url}: what came is no HTTP answer ({error.message})", url=url
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise GymTransportError(f"{url}: {_described(error)}", url=url) from error


def _described(error: BaseException) -> str:
    text = _text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - somebody else's __str__ may raise anything
        return f"<its text cannot be made: {type(broken).__name__}>"


def _seconds(header: str | None) -> float | None:
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def is_infra_status(status: int) -> bool:
    """Whether a status says "not now" rather than "not this": 5xx, 408, 429."""
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in RETRIABLE_STATUSES


def raise_for_status(answer: HttpAnswer, what: str) -> None:
    """Raise unless the status is below 400.

    Args:
        answer: The answer.
        what: Whose it is, as the error will say.

    Raises:
        GymTransportError: 5xx, 408 or 429.
        GymRequestError: Another 4xx. The text carries the body's beginning.
    """
    if answer.status < HTTPStatus.BAD_REQUEST:
        return
    meaning = ""
    if answer.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        meaning = " (the server takes no body of this size; raise its limit or shrink the row)"
    text = f"{what}: HTTP {answer.status} from {answer.url}{meaning}: {answer.excerpt}"
    if is_infra_status(answer.status):
        raise GymTransportError(
            text,
            url=answer.url,
            status=answer.status,
            body=answer.excerpt,
            retry_after_s=answer.retry_after_s,
        )
    raise GymRequestError(text, url=answer.url, status=answer.status, body=answer.excerpt)


class GymClient:
    """``/run`` calls.

    Args:
        pool: An open pool.
        row_timeout_s: Deadline of one call.
        deaths: Ends the calls under way when a server dies; None: nobody tells of deaths.
        setting: The setting that holds the deadline, for the error.
    """

    def __init__(
        self,
        pool: HttpPool,
        row_timeout_s: float,
        deaths: DeathWatch | None = None,
        setting: str = "gym.row_timeout_s",
    ) -> None:
        self._pool = pool
        self._deaths = deaths or DeathWatch()
        self._row_timeout_s = row_timeout_s
        self._setting = setting

    async def run(self, url: str, row: Row, agent: str) -> bytes:
        """POST one row to `url` and return the answer's body.

        Raises:
            RolloutTimeout: The deadline passed.
            RolloutInfraFailure: A server of the worker died; names it.
            GymTransportError: Connection trouble, or HTTP 5xx, 408, 429.
            GymRequestError: Another HTTP 4xx.
        """
        what = f"row {row.index} (agent {agent!r})"
        try:
            with (
                self._deaths.watching(),
                deadline(self._row_timeout_s, f"{what}: an answer from {url}", self._setting),
            ):
                answer = await self._pool.post(url, row.body)
        except DeadlineExceeded as error:
            raise RolloutTimeout(
                error.message,
                row=row.index,
                agent=agent,
                url=url,
                seconds=self._row_timeout_s,
                setting=self._setting,
            ) from error
        except RolloutFailure as error:
            fields = {**error.fields, "row": row.index, "agent": agent}
            raise type(error)(f"{what}: {error.message}", **fields) from error
        try:
            raise_for_status(answer, what)
        except RolloutFailure as error:
            fields = {**error.fields, "row": row.index, "agent": agent}
            raise type(error)(error.message, **fields) from None
        return answer.body


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """`error` and what it came from, outermost first; each once and at most `CHAIN_LIMIT`."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < CHAIN_LIMIT:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (
            None if current.__suppress_context__ else current.__context__
        )


_INFRA_TYPES = (TimeoutError, OSError, aiohttp.ClientError, ServerError, ActorDiedError)


def failure_kind_of(error: BaseException) -> FailureKind:
    """Whose fault an error is. A status in the chain of causes decides before any type.

    What nothing is known of is data: it will most likely happen again.
    """
    chain = tuple(chain_of(error))
    for link in chain:
        status = getattr(link, "status", None)
        if isinstance(status, int) and status >= HTTPStatus.BAD_REQUEST:
            return FailureKind.INFRA if is_infra_status(status) else FailureKind.DATA
    for link in chain:
        if isinstance(link, RolloutFailure):
            return FailureKind(link.kind)
        if isinstance(link, _INFRA_TYPES):
            return FailureKind.INFRA
    return FailureKind.DATA


def failure_of(
    error: BaseException, *, row: int | None = None, agent: str | None = None
) -> Failure:
    """An ended attempt as plain data.

    Args:
        error: What ended it; the chain of causes is looked through, bounded.
        row: The row, where the error does not name it.
        agent: The agent, where the error does not name it.
    """
    told = next((link for link in chain_of(error) if isinstance(link, RolloutFailure)), error)
    fields = dict(told.fields) if isinstance(told, GymrlError) else {}
    status = next(
        (s for s in (getattr(e, "status", None) for e in chain_of(error)) if isinstance(s, int)),
        None,
    )
    formatted = "".join(traceback.format_exception(error))
    return Failure(
        kind=failure_kind_of(error),
        error=type(told).__name__,
        message=_sound(_text(told))[:BODY_EXCERPT_CHARS],
        row=fields.get("row") if fields.get("row") is not None else row,
        turn=fields.get("turn"),
        agent=fields.get("agent") or agent,
        instance=fields.get("instance"),
        url=fields.get("url"),
        status=status,
        traceback=_sound(formatted)[-TRACEBACK_CHARS:],
        fields=fields,
    )


def _sound(text: str) -> str:
    """`text` as something that UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()
