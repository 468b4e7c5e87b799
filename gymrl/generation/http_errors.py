"""Errors of the HTTP server, in OpenAI's shape and with the status that fits.

``{"error": {"message", "type", "param", "code"}}``: 400 names the field that is wrong, 413 the limit,
503 says that another server, or a later call, may do better. Anything else is 500 with the type of
what went wrong.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from gymrl.errors import (
    ConfigError,
    ContextOverflowError,
    GenerationRequestError,
    GenerationTransportError,
    GeneratorDiedError,
    MediaError,
    MediaFetchError,
    PrefixError,
)
from gymrl.generation.deferred import LoadFailedError, NotReadyError
from gymrl.generation.policy import ServerClosingError

INVALID = "invalid_request_error"

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


def error_answer(
    status: int, message: str, kind: str, param: str | None = None, code: str | None = None
) -> web.Response:
    """A JSON answer that tells of an error."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    answer = json_answer({"error": error})
    answer.set_status(status)
    return answer


def status_answer(error: web.HTTPException, request: web.Request) -> web.Response:
    """What aiohttp refuses by itself: no such route, or not with this method."""
    message = f"{error.reason}: {request.method} {request.path}"
    answer = error_answer(error.status, message, INVALID)
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer


def known_answer(error: Exception) -> web.Response | None:
    """The answer to an error that says what is wrong; None: it is the server's own fault."""
    match error:
        case ContextOverflowError():
            return error_answer(400, str(error), INVALID, "input", "context_length_exceeded")
        case PrefixError():
            return error_answer(400, str(error), INVALID, "input", "prefix_rewritten")
        case UnknownModelError():
            return error_answer(404, str(error), INVALID, "model", "model_not_found")
        case BodyTooLargeError():
            return error_answer(413, str(error), INVALID)
        case MediaError():
            return error_answer(400, str(error), INVALID, "input", "image_refused")
        case BrokenBodyError():
            answer = error_answer(400, str(error), INVALID)
            answer.force_close()
            return answer
        case GenerationRequestError():
            return error_answer(400, str(error), INVALID, error.param)
        case ConfigError():
            return error_answer(400, str(error), INVALID, error.setting)
        case _ if isinstance(error, _UNAVAILABLE):
            return error_answer(503, str(error), type(error).__name__)
        case _:
            return None
