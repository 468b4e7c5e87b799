"""Who may read the viewer's pages, and what a page may do.

Three lines of defence for data that a model has written and that may be confidential:

- The server listens on loopback. Beyond it a token is required, which the printed address carries.
- Every request must name a host that the server was started as. A page of another site whose name
  was made to point here (DNS rebinding) names its own, and is refused.
- The page may load and run only what this server serves, and may not make markup of text. What a
  model wrote is shown as text.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

import yarl
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


class Access:
    """Checks of every request, as a middleware.

    Args:
        token: Required of every request, where given: once in the address (``?token=``), after
            which the browser holds it in a cookie.
    """

    def __init__(self, token: str | None) -> None:
        self._token = token
        self._hosts: frozenset[str] | None = frozenset()
        self._cookie = "gymrl_viewer"

    def begin(self, port: int, hosts: Iterable[str] | None) -> None:
        """Let requests in, now that the port is known.

        Args:
            port: Part of the cookie's name: browsers send one port's cookies to all of a host.
            hosts: The names, with ports, that requests may be for; None: any (with a token).
        """
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._cookie = f"gymrl_viewer_{port}"

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse, or pass on and add the headers."""
        response = self._refusal(request)
        if response is None:
            try:
                response = await handler(request)
            except web.HTTPException as error:
                response = error
        response.headers.update(HEADERS)
        if isinstance(response, web.HTTPException):
            raise response
        return response

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        if self._hosts is not None and request.headers.get("Host", "").lower() not in self._hosts:
            return web.Response(status=421, text="this viewer does not serve that host name\n")
        if request.method not in ("GET", "HEAD"):
            return web.Response(
                status=405, text="the viewer only shows\n", headers={"Allow": "GET"}
            )
        if self._token is None:
            return None
        given = request.query.get("token")
        if given is not None:
            return self._enter(request, given)
        if self._is_token(request.cookies.get(self._cookie, "")):
            return None
        return web.Response(status=403, text="open the address that the command printed\n")

    def _enter(self, request: web.Request, given: str) -> web.StreamResponse:
        """Take the token out of the address, so that links and the history don't hold it."""
        if not self._is_token(given):
            return web.Response(status=403, text="that is not this viewer's token\n")
        query = [(name, value) for name, value in request.query.items() if name != "token"]
        location = yarl.URL.build(path=request.path, query=query)
        response = web.Response(status=303, headers={"Location": str(location)})
        # Lax: a link from a page elsewhere (a chat, a ticket) may open the viewer, and nothing more.
        response.set_cookie(self._cookie, given, httponly=True, samesite="Lax", path="/")
        return response

    def _is_token(self, given: str) -> bool:
        # What is no UTF-8 in a header comes as surrogates.
        told = given.encode("utf-8", "surrogateescape")
        return hmac.compare_digest(told, (self._token or "").encode())
