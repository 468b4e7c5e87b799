"""What an actor class promises: its methods, their arguments and results, read from annotations.

A contract is built once a class. It binds a caller's arguments by the annotations before anything
is sent, and says which types the other side decodes to.
"""

from __future__ import annotations

import collections.abc
import inspect
import typing
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np

from gymrl.actors.failures import MAX_ECHO, bounded
from gymrl.errors import EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

RESERVED = frozenset({"setup", "close"})
SPAWN_PARAMETERS = frozenset({"cls", "in_process", "options"})
_STREAM_ORIGINS = (
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


class UnresolvedAnnotationError(EncodeError):
    """An annotation names something that does not exist (yet)."""


class ValueCodec(Protocol):
    """What binding needs from the codec: the round trip that a value takes over the wire."""

    def round_trip(self, value: object, type_: Any, root: str = "value") -> Any:
        """Encode `value` and decode it as `type_`; `root` begins the path in an error."""
        ...


class MethodContract:
    """One method: how its arguments are bound, and what comes back.

    Attributes:
        name: The method's name.
        label: ``Class.method``, as errors say it.
        kind: ``call`` or ``stream``.
        arguments: A struct with one field a parameter; a field left unset takes the method's
            own default on the callee's side.
        result: The type of the result, or of one item of the stream.
        arguments_root: What the path of an argument in an error begins with.
        result_root: The same for the result, or an item.
    """

    def __init__(
        self, label: str, function: Callable[..., Any], hints: Mapping[str, Any], kind: str
    ) -> None:
        self.label = label
        self.name = function.__name__
        self.arguments_root = f"{label}()"
        self.result_root = f"the result of {label}" if kind == "call" else f"an item of {label}"
        self.kind: Literal["call", "stream"] = "stream" if kind == "stream" else "call"
        self.result: Any = _result_type(label, hints.get("return", Any), self.kind)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        self._positional = tuple(p.name for p in parameters if p.kind != p.KEYWORD_ONLY)
        self._keyword = tuple(p.name for p in parameters if p.kind == p.KEYWORD_ONLY)
        self._names = (*self._positional, *self._keyword)
        self._required = tuple(p.name for p in parameters if p.default is p.empty)
        self._plain = len(self._required) == len(self._positional) == len(parameters)
        fields: list[Any] = []
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise EncodeError(
                    f"{label}: *{parameter.name} has no annotation per argument and cannot travel; "
                    "name the parameters, or take one list or dict",
                    path=parameter.name,
                )
            hint = hints.get(parameter.name, Any)
            check_type(hint, f"{label}({parameter.name})")
            if parameter.default is parameter.empty:
                fields.append((parameter.name, hint))
            else:
                unset: Any = typing.Union[hint, msgspec.UnsetType]  # noqa: UP007  # hint may be a string-free object without `|`
                fields.append((parameter.name, unset, msgspec.UNSET))
        check_type(self.result, f"{label} -> ")
        self.arguments: type[msgspec.Struct] = msgspec.defstruct(
            f"{label.replace('.', '_')}_arguments", fields, kw_only=True, forbid_unknown_fields=True
        )
        self.bytes_in_arguments = holds_bytes(self.arguments)
        self.bytes_in_result = holds_bytes(self.result)

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], codec: ValueCodec
    ) -> msgspec.Struct:
        """Arguments as the struct that travels, checked against the annotations.

        Raises:
            TypeError: Too many, missing, doubled or unknown arguments, by name.
            EncodeError: A value that its annotation does not allow, or that cannot travel.
        """
        if self._plain and not kwargs and len(args) == len(self._positional):
            values = dict(zip(self._positional, args, strict=True))
        else:
            values = self._named(args, kwargs)
        try:
            return msgspec.convert(values, self.arguments, dec_hook=accept_custom)
        except (msgspec.ValidationError, RecursionError):
            # What travels decides: numpy scalars, subclasses and the like become plain on the way.
            return self._bind_as_travelled(values, codec)

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._positional):
            raise TypeError(
                f"{self.label}() takes {len(self._positional)} positional arguments, "
                f"got {len(args)}"
            )
        values = dict(zip(self._positional, args, strict=False))
        for name, value in kwargs.items():
            if name in values:
                raise TypeError(f"{self.label}() got argument {name!r} twice")
            if name not in self._names:
                raise TypeError(
                    f"{self.label}() has no argument {bounded(name, MAX_ECHO)!r}; it takes "
                    f"{', '.join(self._names) or 'none'}"
                )
            values[name] = value
        for name in self._required:
            if name not in values:
                raise TypeError(f"{self.label}() misses argument {name!r}")
        return values

    def _bind_as_travelled(self, values: dict[str, Any], codec: ValueCodec) -> msgspec.Struct:
        try:
            unchecked = self.arguments(**values)
            bound: msgspec.Struct = codec.round_trip(unchecked, self.arguments, self.arguments_root)
        except msgspec.ValidationError as error:
            text = bounded(str(error), MAX_ECHO)
            path = text.rpartition("`$.")[2].rstrip("`") if "`$." in text else None
            raise EncodeError(
                f"{self.label}(): argument {path or self.name}: {text}", path=path
            ) from None
        return bound

    def invoke(self, actor: object, arguments: msgspec.Struct) -> Any:
        """Call the method; a coroutine for a call, an async iterator for a stream."""
        method = getattr(actor, self.name)
        if self._plain:
            return method(*msgspec.structs.astuple(arguments))
        given = {
            name: value
            for name in self._names
            if (value := getattr(arguments, name)) is not msgspec.UNSET
        }
        return method(**given)


class ActorContract:
    """All methods of an actor class, and the parameters of its set-up."""

    def __init__(
        self, name: str, setup: MethodContract, methods: Mapping[str, MethodContract]
    ) -> None:
        self.name = name
        self.setup = setup
        self.methods = methods

    @classmethod
    def of(cls, actor_class: type) -> ActorContract:
        """Read the contract of `actor_class`.

        Raises:
            EncodeError: An annotation cannot travel; the text leads to it.
            UnresolvedAnnotationError: An annotation names something that does not exist.
        """
        name = actor_class.__name__
        methods: dict[str, MethodContract] = {}
        for attribute in dir(actor_class):
            if attribute.startswith("_") or attribute in RESERVED:
                continue
            function = inspect.getattr_static(actor_class, attribute)
            if inspect.isfunction(function):
                contract = _method_contract(name, attribute, function)
                if contract is not None:
                    methods[attribute] = contract
        setup = _setup_contract(name, inspect.getattr_static(actor_class, "setup"))
        return cls(name, setup, methods)

    def method(self, name: str, kind: Literal["call", "stream"]) -> MethodContract:
        """The contract of one method.

        Raises:
            AttributeError: There is no such method; the text lists those there are.
            TypeError: It is a stream and was called, or the other way round.
        """
        contract = self.methods.get(name)
        if contract is None:
            known = ", ".join(sorted(self.methods)) or "none"
            raise AttributeError(
                f"{self.name} has no public async method {bounded(name, MAX_ECHO)!r}; it has: {known}"
            )
        if contract.kind != kind:
            right = f'.stream("{name}", ...)' if kind == "call" else f'.call("{name}", ...)'
            raise TypeError(f"{contract.label} is a {contract.kind}: use {right}")
        return contract


def _hints(label: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UnresolvedAnnotationError(
            f"{label}: an annotation names {error.name!r}, which does not exist in module "
            f"{function.__module__} at run time; import it there outside of TYPE_CHECKING, and "
            "define it at module level",
            path=label,
        ) from None


def _method_contract(actor: str, name: str, function: Callable[..., Any]) -> MethodContract | None:
    label = f"{actor}.{name}"
    if inspect.isasyncgenfunction(function):
        return MethodContract(label, function, _hints(label, function), "stream")
    if inspect.iscoroutinefunction(function):
        return MethodContract(label, function, _hints(label, function), "call")
    return None


def _setup_contract(actor: str, function: Callable[..., Any]) -> MethodContract:
    label = f"{actor}.setup"
    hints = _hints(label, function)
    if function.__qualname__ == "Actor.setup":

        async def setup(self: object) -> None: ...

        return MethodContract(label, setup, {"return": None}, "call")
    contract = MethodContract(label, function, hints, "call")
    clash = SPAWN_PARAMETERS.intersection(contract.arguments.__struct_fields__)
    if clash:
        raise EncodeError(
            f"{label}: parameter {sorted(clash)[0]!r} has a meaning for spawn(); rename it",
            path=sorted(clash)[0],
        )
    return contract


def _result_type(label: str, hint: Any, kind: str) -> Any:
    if kind == "call":
        return type(None) if hint is None else hint
    if hint is Any:
        return Any
    origin = typing.get_origin(hint) or hint
    if origin not in _STREAM_ORIGINS:
        raise EncodeError(
            f"{label} yields, so its annotation must be AsyncIterator[...], not {hint!r}",
            path="return",
        )
    arguments = typing.get_args(hint)
    return arguments[0] if arguments else Any


def accept_custom(type_: Any, value: Any) -> Any:
    """The decoding hook: lets arrays through when their dtype is what the annotation says."""
    if isinstance(value, np.ndarray):
        wanted = _dtype_of(type_)
        if wanted is not None and not issubclass(value.dtype.type, wanted):
            raise TypeError(f"Expected an array of {wanted.__name__}, got {value.dtype}")
    return value


_dtypes: dict[Any, type[np.generic] | None] = {np.ndarray: None}


def _dtype_of(type_: Any) -> type[np.generic] | None:
    try:
        return _dtypes[type_]
    except KeyError:
        pass
    found: type[np.generic] | None = None
    for argument in typing.get_args(type_)[1:]:
        inner = typing.get_args(argument)
        if inner and isinstance(inner[0], type) and issubclass(inner[0], np.generic):
            found = inner[0]
    _dtypes[type_] = found
    return found


_REFUSED: dict[Any, str] = {
    msgspec.inspect.MemoryViewType: "memoryview (use bytes or a numpy array)",
    msgspec.inspect.ExtType: "msgspec.msgpack.Ext",
    msgspec.inspect.RawType: "msgspec.Raw (use bytes)",
}


def check_type(hint: Any, path: str) -> None:
    """Refuse a type that cannot travel, with the path that leads to it.

    Raises:
        EncodeError: It holds a class that is neither plain data nor a numpy array.
    """
    try:
        info = msgspec.inspect.type_info(hint)
    except (TypeError, NameError) as error:
        raise EncodeError(f"{path}: {hint!r} cannot travel: {error}", path=path) from None
    pending: list[tuple[Any, str]] = [(info, path)]
    seen: set[Any] = set()
    while pending:
        node, place = pending.pop()
        if isinstance(node, msgspec.inspect.CustomType):
            custom = typing.get_origin(node.cls) or node.cls
            if custom is not np.ndarray:
                raise EncodeError(
                    f"{place}: type {getattr(custom, '__qualname__', custom)} cannot travel "
                    "between processes; pass plain data, a msgspec.Struct, a dataclass, bytes or "
                    "a numpy array",
                    path=place,
                )
        refused = _REFUSED.get(type(node))
        if refused is not None:
            raise EncodeError(f"{place}: {refused} cannot travel", path=place)
        cls = getattr(node, "cls", None)
        if cls is not None and hasattr(node, "fields"):
            if cls in seen:
                continue
            seen.add(cls)
        pending.extend(_parts(node, place))


def _parts(node: Any, place: str) -> list[tuple[Any, str]]:
    """The types inside a type, each with its path."""
    parts: list[tuple[Any, str]] = [
        (field.type, f"{place}.{field.name}") for field in getattr(node, "fields", ())
    ]
    if hasattr(node, "item_type"):
        parts.append((node.item_type, f"{place}[]"))
    if hasattr(node, "item_types"):
        parts.extend((item, f"{place}[{i}]") for i, item in enumerate(node.item_types))
    if isinstance(node, msgspec.inspect.DictType):
        parts.append((node.key_type, f"{place}{{key}}"))
        parts.append((node.value_type, f"{place}{{}}"))
    if isinstance(node, msgspec.inspect.UnionType):
        parts.extend((member, place) for member in node.types)
    return parts


def holds_bytes(hint: Any) -> bool:
    """Whether a declared ``bytes`` is anywhere inside a type."""
    return _holds_bytes(msgspec.inspect.type_info(hint))


def fields_with_bytes(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields of a struct whose types hold a declared ``bytes``; all, where types are unknown."""
    try:
        info: Any = msgspec.inspect.type_info(struct)
    except (TypeError, NameError):  # it can be encoded all the same
        return struct.__struct_fields__
    return tuple(field.name for field in info.fields if _holds_bytes(field.type))


def _holds_bytes(info: Any) -> bool:
    pending = [info]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, msgspec.inspect.BytesType):
            return True
        cls = getattr(node, "cls", None)
        if cls is not None and hasattr(node, "fields"):
            if cls in seen:
                continue
            seen.add(cls)
        pending.extend(part for part, _ in _parts(node, ""))
    return False
