"""The ledger over HTTP.

==========================  =======================================================================
``GET /ledger``             JSON: ``server_id``, ``rollouts``, ``bytes``, ``max_bytes``, ``evicted``
``GET /ledger/{id}``        the rollout's :class:`~gymrl.token_ledger.LedgerFrame`, msgpack; it stays
``DELETE /ledger/{id}``     the same, and the server forgets it
``?images=1``               of the last two: with the files of the images that the calls showed; of
                            any: such files are kept from now on, which they are not before
==========================  =======================================================================

All three also under ``/v1``. A rollout that is not known gives 404 (``ledger_not_found``), one that
was evicted 410 (``ledger_evicted``) with the reason; both carry ``server_id``, so that a restart of
the server can be told from a rollout that never called it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gymrl.errors import GenerationRequestError
from gymrl.generation.ledger import LedgerEvictedError, LedgerNotFoundError
from gymrl.token_ledger import ROLLOUT_HEADER, ROLLOUT_ID, LedgerFrame

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.generation.ledger import LedgerBook, RolloutLedger
    from gymrl.generation.policy import Conversation

_ROLLOUT_ID = re.compile(ROLLOUT_ID)


class LedgerRoutes:
    """Gives ledgers out, and tells calls which one they belong to.

    Args:
        book: Of the server.
    """

    def __init__(self, book: LedgerBook) -> None:
        self._book = book

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        for prefix in ("", "/v1"):
            app.router.add_get(f"{prefix}/ledger", self._summary)
            app.router.add_get(f"{prefix}/ledger/{{rollout_id}}", self._read)
            app.router.add_delete(f"{prefix}/ledger/{{rollout_id}}", self._take)

    def conversation(self, request: web.Request, conversation: Conversation) -> Conversation:
        """The conversation as a call of the rollout that the request names; as it is if none.

        Raises:
            GenerationRequestError: The id has characters that no rollout id has, or path and
                header name different rollouts.
            PrefixError: A message carries other tokens than those that were served.
        """
        ledger = self.ledger(request)
        return conversation if ledger is None else conversation.in_rollout(ledger)

    def ledger(self, request: web.Request) -> RolloutLedger | None:
        """The ledger of the rollout that the request names; None if none, or if it was evicted.

        Raises:
            GenerationRequestError: As :meth:`conversation`.
        """
        rollout_id = _rollout_id(request)
        return None if rollout_id is None else self._book.open(rollout_id)

    def _wants_images(self, request: web.Request) -> bool:
        wants = request.query.get("images") == "1"
        self._book.shelf.is_wanted |= wants
        return wants

    async def _summary(self, request: web.Request) -> web.Response:
        book = self._book
        self._wants_images(request)
        values = {
            "server_id": book.server_id,
            "rollouts": len(book),
            "bytes": book.nbytes,
            "max_bytes": book.max_bytes,
            "evicted": book.num_evicted,
        }
        return web.Response(
            body=msgspec.json.encode(values),
            content_type="application/json",
        )

    async def _read(self, request: web.Request) -> web.Response:
        return self._answer(request, self._book.read)

    async def _take(self, request: web.Request) -> web.Response:
        return self._answer(request, self._book.take)

    def _answer(self, request: web.Request, give: Callable[..., LedgerFrame]) -> web.Response:
        try:
            frame = give(request.match_info["rollout_id"], with_media=self._wants_images(request))
        except LedgerNotFoundError as error:
            return self._missing(404, error, "ledger_not_found")
        except LedgerEvictedError as error:
            return self._missing(410, error, "ledger_evicted")
        return web.Response(body=frame.encode(), content_type="application/msgpack")

    def _missing(self, status: int, error: Exception, code: str) -> web.Response:
        told = {"message": str(error), "type": "invalid_request_error", "param": None, "code": code}
        body = msgspec.json.encode({"error": told, "server_id": self._book.server_id})
        return web.Response(status=status, body=body, content_type="application/json")


def _rollout_id(request: web.Request) -> str | None:
    named = request.match_info.get("rollout_id")
    header = request.headers.get(ROLLOUT_HEADER)
    if named is not None and header is not None and named != header:
        raise GenerationRequestError(
            f"the path names rollout {named!r} and the header {ROLLOUT_HEADER} {header!r}; "
            "send one of them",
            param=ROLLOUT_HEADER,
        )
    rollout_id = header if named is None else named
    if rollout_id is not None and not _ROLLOUT_ID.fullmatch(rollout_id):
        raise GenerationRequestError(
            f"{rollout_id!r} is no rollout id: letters, digits, '.', '_' and '-', beginning with a "
            "letter or a digit, at most 255",
            param=ROLLOUT_HEADER,
        )
    return rollout_id
