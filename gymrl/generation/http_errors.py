"""Errors of the HTTP server, in OpenAI's shape and with the status that fits.

``{"error": {"message", "type", "param", "code"}}``: 400 names the field that is wrong, 413 the limit,
503 says that another server, or a later call, may do better. Anything else is 500 with the type of
what went wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from gymrl.errors import (
    ConfigError,
    ContextOverflowError,
    GenerationRequestError,
    GenerationTransportError,
    GeneratorDiedError,
    GymrlError,
    MediaError,
    MediaFetchError,
    PrefixError,
)
from gymrl.generation.deferred import LoadFailedError, NotReadyError
from gymrl.generation.policy import ServerClosingError

INVALID = "invalid_request_error"

MAX_MESSAGE_CHARS = 4096
"""A request's own text is in some messages; whatever it holds, an answer stays short."""

_UNAVAILABLE = (
    ServerClosingError,
    NotReadyError,
    LoadFailedError,
    GeneratorDiedError,
    GenerationTransportError,
    MediaFetchError,
)


class UnknownModelError(GenerationRequestError):
    """A request names a model that is not served here."""


class BodyTooLargeError(GenerationRequestError):
    """A request says that its body is larger than what the server takes."""


class BrokenBodyError(GenerationRequestError):
    """The rest of a request can't be read, nor what comes after it on its connection."""


def json_answer(value: Any) -> web.Response:
    """A JSON answer."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class Told(NamedTuple):
    """An error as the API tells it."""

    status: int
    message: str
    kind: str
    param: str | None = None
    code: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        is_long = len(self.message) > MAX_MESSAGE_CHARS
        message = f"{self.message[:MAX_MESSAGE_CHARS]}..." if is_long else self.message
        return {"message": message, "type": self.kind, "param": self.param, "code": self.code}

    def answer(self) -> web.Response:
        """As an answer of its own."""
        answer = json_answer({"error": self.fields})
        answer.set_status(self.status)
        return answer


def error_answer(status: int, message: str, kind: str) -> web.Response:
    """A JSON answer that tells of an error."""
    return Told(status, message, kind).answer()


def status_answer(error: web.HTTPException, request: web.Request) -> web.Response:
    """What aiohttp refuses by itself: no such route, or not with this method."""
    message = f"{error.reason}: {request.method} {request.path}"
    answer = error_answer(error.status, message, INVALID)
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer


def told(error: Exception, path: str) -> Told:
    """An error as the API tells it: what is wrong with the request, or 500 and what went wrong.

    Args:
        error: What was raised.
        path: Of the request: the routes call what they are asked by different names.
    """
    match error:
        case ContextOverflowError():
            return Told(400, str(error), INVALID, _asked(path), "context_length_exceeded")
        case PrefixError():
            return Told(400, str(error), INVALID, _asked(path), "prefix_rewritten")
        case UnknownModelError():
            return Told(404, str(error), INVALID, "model", "model_not_found")
        case BodyTooLargeError():
            return Told(413, str(error), INVALID)
        case MediaError():
            return Told(400, str(error), INVALID, _asked(path), "image_refused")
        case GenerationRequestError():
            # A position is one of a token, whatever the prompt was made of.
            is_prompt = error.param == "input" or error.position is not None
            param = _asked(path) if is_prompt else error.param
            return Told(400, str(error), INVALID, param)
        case ConfigError():
            return Told(400, str(error), INVALID, error.setting)
        case _ if isinstance(error, _UNAVAILABLE):
            return Told(503, str(error), type(error).__name__)
        case GymrlError() | ConnectionError():
            return Told(500, str(error), type(error).__name__)
        case _:
            return Told(500, f"{type(error).__name__}: {error}", type(error).__name__)


def _asked(path: str) -> str:
    """How a route calls what it is asked."""
    if path.endswith(("/chat/completions", "/tokenize")):
        return "messages"
    return "prompt" if path.endswith("/completions") else "input"
