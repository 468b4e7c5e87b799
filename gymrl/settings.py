"""The base of every configuration, and how one is read from a file.

A configuration is a frozen struct whose fields are checked when it is built: first their types, then
whatever its own ``__post_init__`` requires.
"""

from __future__ import annotations

import functools
import numbers
import os
import re
import tomllib
import typing
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec
import yaml

from gymrl.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound="Config")

_PLAIN_TYPES = frozenset({bool, int, float, str, dict, type(None)})
_PATH = re.compile(r" - at `\$\.([^`]+)`$")


def require(condition: bool, setting: str, value: object, remedy: str) -> None:
    """Raise `ConfigError` naming the setting and its value unless `condition` holds."""
    if not condition:
        raise ConfigError(f"{setting}={value!r}: {remedy}", setting=setting)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all settings: keyword-only, frozen, unknown keys and wrong types refused.

    Also where they are built in Python: a list becomes the tuple that a field wants, a mapping the
    settings that it wants, a number of numpy a plain one, a path its text.

    Raises:
        ConfigError: A value is not of its field's type, or out of range.
    """

    def __init_subclass__(cls) -> None:
        own_check = cls.__dict__.get("__post_init__")
        if own_check is None:
            return

        def check(self: Config) -> None:
            Config.__post_init__(self)
            own_check(self)

        cls.__post_init__ = check  # type: ignore[method-assign]  # types come before ranges

    def __post_init__(self) -> None:
        cls = type(self)
        given = {name: getattr(self, name) for name in cls.__struct_fields__}
        try:
            typed = msgspec.convert(
                {name: _plain(value) for name, value in given.items()}, _fields_of(cls)
            )
        except msgspec.ValidationError as error:
            raise _type_error(cls, error) from None
        for name, value in given.items():
            if type(converted := getattr(typed, name)) is not type(value):
                msgspec.structs.force_setattr(self, name, converted)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from plain data.

        Raises:
            ConfigError: An unknown key, a wrong type or a value out of range, with its path.
        """
        try:
            return msgspec.convert(values, cls, strict=True)
        except msgspec.ValidationError as error:
            raise _type_error(cls, error) from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` reads back."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


def _plain(value: Any) -> Any:
    """A value of numpy, a path or a text of a subclass as what a field's type knows."""
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


@functools.cache
def _fields_of(cls: type[Config]) -> type[msgspec.Struct]:
    """The fields of a configuration, without its checks."""
    fields = msgspec.structs.fields(cls)
    return msgspec.defstruct(cls.__name__, [(field.name, field.type) for field in fields])


def _type_error(cls: type[Config], error: msgspec.ValidationError) -> ConfigError:
    """A value of the wrong type or shape, with the choices where there are some."""
    if isinstance(error.__cause__, ConfigError):
        return error.__cause__
    path = _PATH.search(str(error))
    setting = path.group(1) if path else None
    choices = _choices(cls, setting.split(".")) if setting else ()
    hint = f"; choose {', '.join(map(repr, choices))}" if choices else ""
    return ConfigError(f"{cls.__name__}: {error}{hint}", setting=setting)


def _choices(kind: Any, path: list[str]) -> tuple[Any, ...]:
    """What a field that takes one of some values takes; empty for any other field."""
    if typing.get_origin(kind) is Literal:
        return typing.get_args(kind) if not path else ()
    for option in typing.get_args(kind):
        if found := _choices(option, path):
            return found
    if not path or not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return ()
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    return _choices(types.get(path[0]), path[1:])


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML, TOML or JSON file.

    Raises:
        ConfigError: The file is missing, does not parse, or holds something else.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            values: Any = tomllib.loads(text)
        else:
            values = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}", setting=str(file)) from error
    except (yaml.YAMLError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} does not parse: {error}", setting=str(file)) from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}; a mapping is needed")
    return values


def load(cls: type[ConfigT], path: str | Path) -> ConfigT:
    """Read `cls` from a YAML, TOML or JSON file; errors name the file."""
    try:
        return cls.from_dict(read_mapping(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", setting=error.setting) from error
