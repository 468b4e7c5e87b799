"""``key=value`` as options have it: the value is YAML, and a dotted key is a path."""

from __future__ import annotations

from typing import Any

import yaml

from gymrl.errors import ConfigError
from gymrl.settings import parse_yaml


def parsed_value(text: str, option: str, assignment: str) -> Any:
    """The value of an assignment: 3, 1e-3, true and [1, 2] are what they seem.

    Raises:
        ConfigError: It does not parse.
    """
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{option} {assignment!r}: the value does not parse: {error}", setting=option
        ) from error


def set_nested(target: dict[str, Any], key: str, value: Any, option: str) -> None:
    """Set a dotted key in nested mappings.

    Raises:
        ConfigError: A part of the key is empty, or something is set there already.
    """
    *parents, last = key.split(".")
    if not all((*parents, last)):
        raise ConfigError(f"{option} {key}: a part of the key is empty", setting=option)
    node: Any = target
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{option} {key}: {parent} has a value already", setting=option)
    if last in node:
        raise ConfigError(f"{option} {key}: {last} has a value already", setting=option)
    node[last] = value
