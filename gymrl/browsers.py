"""Keeps web pages away from servers that listen on this machine without a key.

A browser sends requests to loopback for any page that it shows, and our servers ask nobody who they
are: a page could have prompts sampled, at the expense of the key that a relay adds, and where its
name is made to point at this machine (DNS rebinding) read the answers. So:

- A request that says which page sent it (``Origin``) is refused, unless the page is of this machine.
- A server on loopback is asked for by an address, by ``localhost``, or by a name that no public
  resolver gives out; a request for any other host is refused.

Programs send no ``Origin`` and name what they connect to, so none of it concerns them.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import web

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware

_LOCAL_ENDINGS = (".localhost", ".local", ".internal")
"""Of names that are never public ones (RFC 6761, RFC 6762, and ICANN's choice for private use)."""


def is_loopback(host: str) -> bool:
    """Whether an address to listen on, or a host's name, is this machine alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def guard(listens_on: str) -> Middleware:
    """A middleware that refuses what web pages send; to be the first of an application's.

    Args:
        listens_on: The host that the server was told to listen on.
    """
    is_local = is_loopback(listens_on)

    @functools.lru_cache(maxsize=64)
    def may_ask_for(host: str) -> bool:
        return not is_local or _is_certain(_name(f"//{host}"), listens_on)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin, host = request.headers.get("Origin"), request.headers.get("Host")
        if origin is not None and not is_loopback(_name(origin)):
            return _refusal(
                HTTPStatus.FORBIDDEN,
                f"requests of web pages are not served here, and this one is of {origin[:200]!r}",
            )
        if host is not None and not may_ask_for(host):
            return _refusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"this server listens on {listens_on} and is asked for {host[:200]!r}; ask for its "
                "address, or have the proxy in front of it do so",
            )
        return await handler(request)

    return guarded


def _name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_certain(name: str, listens_on: str) -> bool:
    """Whether nobody else can have had a resolver lead this name here."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        # Names of one part are those of a local network; nobody can register one.
        is_short = bool(name) and "." not in name
        own = (listens_on.lower(), socket.gethostname().lower())
        return is_short or name in own or name.endswith(_LOCAL_ENDINGS)
    return True


def _refusal(status: HTTPStatus, message: str) -> web.Response:
    error = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "not_for_web_pages",
    }
    return web.json_response({"error": error}, status=status)
