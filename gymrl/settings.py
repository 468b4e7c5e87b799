"""The base of every configuration, and how one is read from a file.

A configuration is a frozen struct whose fields are checked when it is built: first their types, then
whatever its own ``__post_init__`` requires.
"""

from __future__ import annotations

import difflib
import functools
import json
import numbers
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec
import yaml

from gymrl.errors import ConfigError

ConfigT = TypeVar("ConfigT", bound="Config")

_PLAIN_TYPES = frozenset({bool, int, float, str, dict, type(None)})
_KEY = re.compile(r"(api_?key|secret|password|authorization|_token|^token)$", re.IGNORECASE)
_PATH = re.compile(r" - at `\$\.([^`]+)`$")
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")


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
        given = {
            name: value
            for name, settings in _settings_of(cls).items()
            if not isinstance(value := getattr(self, name), settings)
        }
        try:
            typed = msgspec.convert(
                {name: _plain(value) for name, value in given.items()}, _fields_of(cls)
            )
        except msgspec.ValidationError as error:
            raise _type_error(cls, error) from None
        for name, value in given.items():
            if type(converted := getattr(typed, name)) is not type(value):
                msgspec.structs.force_setattr(self, name, converted)

    def __repr__(self) -> str:
        """As of any struct, but for keys that stand in a mapping, such as a server's block."""
        fields = [(name, getattr(self, name)) for name in self.__struct_fields__]
        shown = ", ".join(f"{name}={_without_keys(name, value)!r}" for name, value in fields)
        return f"{type(self).__name__}({shown})"

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


def _without_keys(name: str, value: Any) -> Any:
    """A value to show, without what its name says to be a key; where a key comes from is shown."""
    if isinstance(value, dict):
        return {key: _without_keys(str(key), item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_keys(name, item) for item in value)
    is_key = isinstance(value, str) and value and _KEY.search(name) is not None
    return "(a key, not shown)" if is_key and not value.startswith("${") else value


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
    return msgspec.defstruct(cls.__name__, [(field.name, field.type, None) for field in fields])


@functools.cache
def _settings_of(cls: type[Config]) -> dict[str, tuple[type[Config], ...]]:
    """By field, the settings that its type names: such values were checked when they were built."""
    return {
        field.name: tuple(
            one for one in _options(field.type) if isinstance(one, type) and issubclass(one, Config)
        )
        for field in msgspec.structs.fields(cls)
    }


def _type_error(cls: type[Config], error: msgspec.ValidationError) -> ConfigError:
    """What is wrong with plain data: where, and what would be right there."""
    text, _, _ = str(error).partition(" - at `")
    found = _PATH.search(str(error))
    setting = found.group(1) if found else ""
    if isinstance(error.__cause__, ConfigError):
        return _placed(error.__cause__, setting)
    if unknown := _UNKNOWN.fullmatch(text):
        return _unknown_setting(cls, setting, unknown.group(1))
    if not setting:
        return ConfigError(f"{cls.__name__}: {error}")
    choices = _choices(cls, setting)
    hint = f"; choose {', '.join(map(repr, choices))}" if choices else ""
    return ConfigError(f"{setting}: {text}{hint}", setting=setting)


def _placed(error: ConfigError, place: str) -> ConfigError:
    """An error of a block, with the block's place before the name of its setting."""
    setting = error.setting or ""
    block, _, last = place.rpartition(".")
    if setting.split(".")[0] == last:
        place = block
    if not place or not setting or not error.message.startswith(setting):
        return error
    fields = {**error.fields, "setting": f"{place}.{setting}"}
    return type(error)(f"{place}.{error.message}", **fields)


def _unknown_setting(cls: type[Config], place: str, name: str) -> ConfigError:
    names = sorted(_field_types(_kind_at(cls, _STEP.findall(place))))
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
    setting = f"{place}.{name}" if place else name
    return ConfigError(f"{setting}: there is no such setting; {hint}", setting=setting)


def _choices(cls: type[Config], setting: str) -> tuple[Any, ...]:
    """What a field that takes one of some values takes; empty for any other field."""
    for option in _options(_kind_at(cls, _STEP.findall(setting))):
        if typing.get_origin(option) is Literal:
            return typing.get_args(option)
    return ()


def _kind_at(kind: Any, steps: list[str]) -> Any:
    """The type that steps lead to: names of fields, or into a collection; None for nowhere."""
    if not steps:
        return kind
    if fields := _field_types(kind):
        return _kind_at(fields.get(steps[0]), steps[1:])
    for option in _options(kind):
        if typing.get_origin(option) in (dict, tuple, list):
            values = [item for item in typing.get_args(option) if item is not ...]
            return _kind_at(values[-1], steps[1:])
    return None


def _options(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    return typing.get_args(kind) if is_union else (kind,)


def _field_types(kind: Any) -> dict[str, Any]:
    """The fields of a struct, or of the struct among the options of a union; empty for others."""
    for option in _options(kind):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return {field.encode_name: field.type for field in msgspec.structs.fields(option)}
    return {}


class _YamlLoader(yaml.SafeLoader):
    """YAML as people write it: ``1e-5`` is a number, and no key is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in keys:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                    )
                keys.add(key_node.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


# YAML 1.1, which PyYAML reads, wants a point in the number and a sign in the exponent.
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str) -> Any:
    """What a YAML text says; ``1e-5`` is a number.

    Raises:
        yaml.YAMLError: It does not parse, or a key is given twice.
    """
    # A safe loader with another pattern of numbers: it makes plain data alone.
    return yaml.load(text, _YamlLoader)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML, TOML or JSON file.

    Raises:
        ConfigError: The file is missing, does not parse, or holds something else.
    """
    file = Path(path)
    parse = _PARSERS.get(file.suffix, parse_yaml)
    try:
        values = parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}", setting=str(file)) from error
    except (yaml.YAMLError, ValueError) as error:
        # Also text that is not UTF-8.
        raise ConfigError(f"{file} does not parse: {error}", setting=str(file)) from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}; a mapping is needed")
    return values


_PARSERS: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}


def load(cls: type[ConfigT], path: str | Path) -> ConfigT:
    """Read `cls` from a YAML, TOML or JSON file; errors name the file."""
    try:
        return cls.from_dict(read_mapping(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", setting=error.setting) from error
