"""Errors as plain data: what a callee raised, bounded, and rebuilt on the caller's side.

Types of :mod:`gymrl.errors` and plain builtins come back as themselves, with a
:class:`~gymrl.errors.RemoteError` as their cause that carries the remote traceback. Any other type
arrives as a `RemoteError`. Whatever an exception does (a ``__str__`` that raises, a chain that
refers to itself, ten megabytes of text), describing it never raises.
"""

from __future__ import annotations

import builtins
import contextlib
import traceback
import typing
from typing import Any

import msgspec

import gymrl.errors
from gymrl.errors import ActorStartError, GymrlError, RemoteError

MAX_TEXT = 64 * 1024
# Of a refused value, in the text of the refusal.
MAX_ECHO = 500
MAX_CHAIN = 8
MAX_GROUP = 16
MAX_ERRORS = 64
_PLAIN = (type(None), bool, int, float, str, bytes)
# Rebuilt, these would end the caller's loop, generator or process instead of reporting.
_NEVER_REBUILT = (StopIteration, StopAsyncIteration)


class ErrorData(msgspec.Struct, frozen=True, omit_defaults=True):
    """One exception as data.

    Attributes:
        type: Qualified name of its class.
        module: Where the class is defined.
        message: Its text, at most 64 Ki characters.
        traceback: Formatted on the raising side, at most 64 Ki characters.
        args: Its arguments, when all are plain data.
        fields: Declared fields of a gymrl error, as far as they travel.
        cause: The next error of its chain (``__cause__``, else ``__context__``).
        members: The errors of an exception group.
    """

    type: str
    module: str
    message: str
    traceback: str = ""
    args: list[Any] | None = None
    fields: dict[str, Any] = {}
    cause: ErrorData | None = None
    members: list[ErrorData] | None = None


def describe(error: BaseException, with_traceback: bool = True) -> ErrorData:
    """`error` as data. Never raises, and its size is bounded."""
    try:
        return _describe(error, with_traceback, set(), MAX_CHAIN)
    except BaseException as fault:  # noqa: BLE001  # attributes of a foreign class may raise anything
        return describe_briefly(error, f"describing it raised {type(fault).__name__}")


def describe_briefly(error: BaseException, why: str) -> ErrorData:
    """The same in under three kilobytes, when the whole does not fit into a message."""
    cls = type(error)
    return ErrorData(
        type=bounded(cls.__qualname__, 200),
        module=bounded(str(cls.__module__), 200),
        message=f"{bounded(_message(error), 800)} [{bounded(why, 300)}]",
    )


def _describe(error: BaseException, with_traceback: bool, seen: set[int], budget: int) -> ErrorData:
    seen.add(id(error))
    cls = type(error)
    chained = error.__cause__
    if chained is None and not error.__suppress_context__:
        chained = error.__context__
    cause = None
    if chained is not None and id(chained) not in seen and budget > 0:
        cause = _describe(chained, False, seen, budget - 1)
    members = None
    if isinstance(error, BaseExceptionGroup) and budget > 0:
        members = [
            _describe(member, False, seen, budget - 1)
            for member in error.exceptions[:MAX_GROUP]
            if id(member) not in seen
        ]
    return ErrorData(
        type=bounded(cls.__qualname__, 500),
        module=bounded(str(cls.__module__), 500),
        message=_message(error),
        traceback=_traceback(error) if with_traceback else "",
        args=_args(error),
        fields=_fields(error),
        cause=cause,
        members=members,
    )


def bounded(text: str, limit: int = MAX_TEXT) -> str:
    """`text` as valid Unicode of at most about `limit` characters; says what it left out."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}... [{len(text) - limit} characters left out] ...{text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _message(error: BaseException) -> str:
    try:
        text = error.message if isinstance(error, GymrlError) else str(error)
        return bounded(str(text))
    except BaseException as fault:  # noqa: BLE001  # a foreign __str__ may raise anything
        return f"<its text is not to be had: __str__ raised {type(fault).__name__}>"


def _traceback(error: BaseException) -> str:
    try:
        if _is_small(error):
            return bounded("".join(traceback.format_exception(error)))
    except BaseException:  # noqa: BLE001  # formatting calls the error's own __str__ and friends
        pass
    try:
        return bounded("".join(traceback.format_tb(error.__traceback__)))
    except BaseException as fault:  # noqa: BLE001  # sources may be unreadable; the error still goes on
        return f"<its traceback is not to be had: {type(fault).__name__}>"


def _is_small(error: BaseException) -> bool:
    """Whether formatting it takes no time: few errors in its chain and groups."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if len(seen) > MAX_ERRORS:
            return False
        pending += (one.__cause__, None if one.__suppress_context__ else one.__context__)
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions[: MAX_ERRORS + 1]
    return True


def _travels(value: object) -> bool:
    try:
        return len(msgspec.msgpack.encode(value)) <= 4 * MAX_TEXT
    except BaseException:  # noqa: BLE001  # whatever it is, it does not travel
        return False


def _args(error: BaseException) -> list[Any] | None:
    if isinstance(error, BaseExceptionGroup):
        return [bounded(error.message)]
    if isinstance(error, OSError) and type(error.filename) is str:
        named = [error.errno, bounded(str(error.strerror)), bounded(error.filename)]
        return named if _travels(named) else None
    try:
        args = [bounded(item) if type(item) is str else item for item in error.args]
    except BaseException:  # noqa: BLE001  # `args` may be overridden
        return None
    if all(type(item) in _PLAIN for item in args) and _travels(args):
        return args
    return None


def _fields(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, GymrlError):
        return {}
    fields: dict[str, Any] = {}
    for name, value in vars(error).items():
        if name == "fields" or name.startswith("_") or not hasattr(type(error), name):
            continue
        fields[name] = value if _travels(value) else bounded(_repr(value), 2000)
    return fields


def _repr(value: object) -> str:
    try:
        return repr(value)
    except BaseException as fault:  # noqa: BLE001  # a foreign __repr__ may raise anything
        return f"<{type(value).__name__}, whose repr raised {type(fault).__name__}>"


def rebuild(data: ErrorData, actor: str | None = None) -> Exception:
    """The exception to raise on the caller's side."""
    remote = _remote(data, actor)
    if data.cause is not None:
        remote.__cause__ = rebuild(data.cause, actor)
    known = _known(data, actor)
    if known is None:
        return remote
    if data.traceback or data.cause is not None:
        known.__cause__ = remote
    return known


def _remote(data: ErrorData, actor: str | None) -> RemoteError:
    name = data.type if data.module == "builtins" else f"{data.module}.{data.type}"
    where = f" in actor {actor}" if actor else ""
    text = f"{name}{where}: {data.message}"
    if data.traceback:
        text = f"{text}\n\n{data.traceback.rstrip()}"
    return RemoteError(
        text,
        actor=actor,
        remote_type=data.type,
        remote_module=data.module,
        remote_message=data.message,
        remote_traceback=data.traceback,
    )


def _known(data: ErrorData, actor: str | None) -> Exception | None:
    if data.module == "gymrl.errors":
        cls = getattr(gymrl.errors, data.type, None)
        if isinstance(cls, type) and issubclass(cls, GymrlError):
            return cls.rebuild(data.message, _sound_fields(cls, data.fields))
        return None
    if data.module != "builtins":
        return None
    cls = getattr(builtins, data.type, None)
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        return None
    if issubclass(cls, BaseExceptionGroup):
        return _group(data, actor)
    if not issubclass(cls, Exception) or issubclass(cls, _NEVER_REBUILT) or data.args is None:
        return None
    try:
        return cls(*data.args)
    except Exception:  # noqa: BLE001  # its arguments were replaced; it goes as RemoteError
        return None


def _sound_fields(cls: type[GymrlError], fields: dict[str, Any]) -> dict[str, Any]:
    """Those of the type that the class declares: the other side may send anything."""
    types = typing.get_type_hints(cls)
    sound = {}
    for name in cls.declared().intersection(fields):
        with contextlib.suppress(msgspec.ValidationError):
            sound[name] = msgspec.convert(fields[name], types[name])
    return sound


def _group(data: ErrorData, actor: str | None) -> Exception | None:
    if not data.members:
        return None
    message = data.args[0] if data.args else data.message
    return ExceptionGroup(str(message), [rebuild(member, actor) for member in data.members])


def start_error(error: Exception, name: str) -> ActorStartError:
    """The error of a set-up or an import as the reason why an actor did not start."""
    remote = error if isinstance(error, RemoteError) else error.__cause__
    trace = remote.remote_traceback if isinstance(remote, RemoteError) else None
    kind = remote.remote_type if isinstance(remote, RemoteError) else type(error).__name__
    text = remote.remote_message if isinstance(remote, RemoteError) else str(error)
    start = ActorStartError(
        f"{name} did not start: {kind}: {text}" + (f"\n\n{trace.rstrip()}" if trace else ""),
        actor=name,
        remote_type=kind,
        remote_traceback=trace,
    )
    start.__cause__ = error
    return start
