"""Who a request belongs to: a signed cookie per server, and bounded state per session.

A server names its cookie ``<ClassName>___<instance>`` and sets it on every answer. The cookie
holds a session id and a signature, so a server trusts only ids that it gave out itself.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import uuid
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from aiohttp import web

StateT = TypeVar("StateT")

MAX_AGE_S = 14 * 24 * 3600
MAX_SESSIONS = 1 << 17


class SessionCookie:
    """One server's session cookie.

    Args:
        name: The cookie's name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._key = secrets.token_bytes(32)

    def read(self, request: web.Request) -> str:
        """The session id of a request; a new one when it brings none that was given out here."""
        payload, _, signature = request.cookies.get(self.name, "").partition(".")
        if payload and hmac.compare_digest(_bytes(signature), _bytes(self._sign(payload))):
            try:
                padded = payload + "=" * (-len(payload) % 4)
                return str(json.loads(base64.urlsafe_b64decode(padded))["session_id"])
            except (binascii.Error, ValueError, KeyError, TypeError):
                return str(uuid.uuid4())
        return str(uuid.uuid4())

    def value(self, session_id: str) -> str:
        """The cookie's value for a session."""
        text = json.dumps({"session_id": session_id}).encode()
        # Padding would have to be quoted in a cookie.
        payload = base64.urlsafe_b64encode(text).decode().rstrip("=")
        return f"{payload}.{self._sign(payload)}"

    def write(self, response: web.StreamResponse, session_id: str) -> None:
        """Set the cookie on an answer."""
        response.set_cookie(
            self.name,
            self.value(session_id),
            max_age=MAX_AGE_S,
            path="/",
            httponly=True,
            samesite="lax",
        )

    def _sign(self, payload: str) -> str:
        digest = hmac.new(self._key, _bytes(payload), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    # What is no UTF-8 in a header comes as surrogates.
    return text.encode("utf-8", "surrogateescape")


class SessionStates(Generic[StateT]):
    """State by session id, the oldest dropped when there are too many.

    A rollout that is cancelled never reaches ``/verify``, where its state would be let go.

    Args:
        limit: At most this many.
    """

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._states: OrderedDict[str, StateT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._states

    def put(self, session_id: str, state: StateT) -> None:
        """Keep `state`; the session counts as the newest."""
        self._states[session_id] = state
        self._states.move_to_end(session_id)
        while len(self._states) > self._limit:
            self._states.popitem(last=False)

    def get(self, session_id: str) -> StateT | None:
        """The state, or None."""
        return self._states.get(session_id)

    def pop(self, session_id: str) -> StateT | None:
        """The state, which is then let go; or None."""
        return self._states.pop(session_id, None)
