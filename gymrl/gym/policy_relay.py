"""Stands where real Gym servers look for their policy, and passes on to where it is.

A Gym agent knows one host and port. Here they are this relay's: several policy servers take turns
behind it, each conversation staying with one of them; ``model`` is put in where the agent leaves it
out; and a policy that can't be reached is an answer, HTTP 502. Gym's own client would try a refused
connection again without end.

Nothing is passed on but what asks the model: the relay sends the policy's key, and behind the same key
and address there are files, jobs, ledgers of other rollouts, and routes that change the server.
"""

from __future__ import annotations

import itertools
import re
import zlib
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from gymrl.errors import RolloutFailure
from gymrl.gym.embedded.base import MAX_BODY_BYTES, decode_fields, json_response
from gymrl.listening import read_body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.gym.client import HttpAnswer, HttpPool

_COOKIE = "gymrl_policy"
_ROLLOUT = re.compile(r"/ng-rollout/([^/]+)/")
_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_PREFIX = rf"(?:/ng-rollout/{_SEGMENT}(?:/{_SEGMENT})?)?"
_ASKED = re.compile(
    rf"{_PREFIX}(?:/v1/(?:responses|chat/completions|completions|messages|embeddings)"
    r"|(?:/v1)?/(?:de)?tokenize)"
)
_TOLD = re.compile(rf"{_PREFIX}/v1/models(?:/{_SEGMENT})*")


class PolicyRelay:
    """Passes requests to policy servers and their answers back, byte for byte.

    Args:
        pool: An open pool; it sends the key that the servers ask for.
        roots: The policy servers, without ``/v1``; at least one.
        model_name: Put into ``model`` where a request has none.
    """

    def __init__(self, pool: HttpPool, roots: Sequence[str], model_name: str) -> None:
        self._pool = pool
        self._roots = list(roots)
        self._turns = itertools.cycle(range(len(self._roots)))
        self._model_member = b'"model":' + msgspec.json.encode(model_name)

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for path in ("/", "/livez", "/readyz", "/healthz", "/health"):
            app.router.add_get(path, self._alive)
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._post)
        return app

    async def _alive(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _get(self, request: web.Request) -> web.Response:
        if not _TOLD.fullmatch(request.path):
            return _not_passed_on(request)
        try:
            answer = await self._pool.get(self._roots[0] + request.path_qs)
        except RolloutFailure as error:
            return json_response(str(error), HTTPStatus.BAD_GATEWAY)
        return _passed_on(answer)

    async def _post(self, request: web.Request) -> web.Response:
        if not _ASKED.fullmatch(request.path):
            return _not_passed_on(request)
        cookies = _cookies_of(request.headers.get("Cookie", ""))
        turn = self._turn_of(cookies.pop(_COOKIE, None), request.path)
        body = self._with_model(await read_body(request))
        try:
            answer = await self._pool.post(self._roots[turn] + request.path_qs, body, cookies)
        except RolloutFailure as error:
            return json_response(str(error), HTTPStatus.BAD_GATEWAY)
        response = _passed_on(answer)
        response.headers.add("Set-Cookie", f"{_COOKIE}={turn}; Path=/; HttpOnly")
        return response

    def _turn_of(self, cookie: str | None, path: str) -> int:
        if cookie is not None and cookie.isdecimal() and int(cookie) < len(self._roots):
            return int(cookie)
        if (rollout := _ROLLOUT.match(path)) is not None:
            # Its ledger is at one server, also where the agent keeps no cookies.
            return zlib.crc32(rollout[1].encode()) % len(self._roots)
        return next(self._turns)

    def _with_model(self, body: bytes) -> bytes:
        try:
            fields = decode_fields(body)
        except (msgspec.DecodeError, RecursionError):
            return body  # the policy says what is wrong with it
        if "model" in fields and bytes(fields["model"]) != b"null":
            return body
        if "model" in fields:
            fields["model"] = msgspec.Raw(self._model_member.partition(b":")[2])
            return msgspec.json.encode(fields)
        rest = body[body.index(b"{") + 1 :]
        return b"{" + self._model_member + (b"," if fields else b"") + rest


def _not_passed_on(request: web.Request) -> web.Response:
    return json_response(
        f"{request.method} {request.path[:200]} is not passed on to the policy: only its responses, "
        "completions, messages, embeddings, tokens and models can be asked for here",
        HTTPStatus.NOT_FOUND,
    )


def _cookies_of(header: str) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return {name: value for name, equals, value in pairs if equals}


def _passed_on(answer: HttpAnswer) -> web.Response:
    response = web.Response(body=answer.body, status=answer.status, content_type="application/json")
    for name, value in answer.cookies.items():
        response.headers.add("Set-Cookie", f"{name}={value}; Path=/; HttpOnly")
    if answer.retry_after_s is not None:
        response.headers["Retry-After"] = f"{answer.retry_after_s:g}"
    return response
