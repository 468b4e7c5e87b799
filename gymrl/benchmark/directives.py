"""Blocks that are made of other blocks: ``_inherit_from``, ``_copy``, ``_delete_key``.

::

    my_agent:
      _inherit_from: base_agent            # a deep copy, with what stands here on top;
      responses_api_agents: {...}          # base_agent itself disappears

``_copy`` does the same and leaves the other block where it is. ``_delete_key: "a, b"`` takes keys
out. ``${inherit_from:path}`` and ``${copy:path}`` put a whole value in place. A path leads from the
top of the configuration, its parts separated by dots. Everything here is plain data; other
interpolations stay as they are.
"""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf

from gymrl.errors import ConfigError

_WHOLE_VALUE = re.compile(r"\$\{(inherit_from|copy):([^{}]+)\}")
_MISSING = "???"


def apply_directives(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with every directive done; `config` is not changed.

    Raises:
        ConfigError: A path leads nowhere or back to itself, or a key to delete is not there.
    """
    expansion = _Expansion(config)
    result: dict[str, Any] = expansion.expand(config, "", ())
    for path in sorted(expansion.inherited):
        _remove(result, path.split("."))
    return result


class _Expansion:
    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self.inherited: set[str] = set()

    def expand(self, value: Any, where: str, trail: tuple[str, ...]) -> Any:
        if isinstance(value, str):
            whole = _WHOLE_VALUE.fullmatch(value)
            return self._source(whole[2], whole[1], where, trail) if whole else value
        if isinstance(value, list):
            return [self.expand(v, f"{where}[{i}]", trail) for i, v in enumerate(value)]
        if not isinstance(value, dict):
            return value
        return self._block(dict(value), where, trail)

    def _block(self, own: dict[str, Any], where: str, trail: tuple[str, ...]) -> Any:
        doomed = [key.strip() for key in str(own.pop("_delete_key", "")).split(",") if key.strip()]
        kept_doomed = [key for key in doomed if key not in own]
        for key in doomed:
            own.pop(key, None)
        inherit, copied = own.pop("_inherit_from", None), own.pop("_copy", None)
        own = {k: self.expand(v, f"{where}.{k}" if where else k, trail) for k, v in own.items()}
        path = inherit if inherit is not None else copied
        if path is None:
            return own
        kind = "inherit_from" if inherit is not None else "copy"
        base = self._source(str(path), kind, where, trail)
        if base == _MISSING:
            return base
        if not isinstance(base, dict):
            raise ConfigError(f"{where}: _{kind}: {path} is no block", setting=where)
        merged: dict[str, Any] = OmegaConf.to_container(OmegaConf.merge(base, own), resolve=False)  # type: ignore[assignment]  # a mapping stays one
        for key in kept_doomed:
            if key not in merged:
                raise ConfigError(f"{where}: _delete_key: {path} has no key {key!r}", setting=where)
            del merged[key]
        return merged

    def _source(self, path: str, kind: str, where: str, trail: tuple[str, ...]) -> Any:
        if path in trail:
            circle = " -> ".join((*trail, path))
            raise ConfigError(f"{where}: blocks inherit from each other: {circle}", setting=where)
        value: Any = self._config
        for part in path.split("."):
            if value == _MISSING:
                return _MISSING
            if not isinstance(value, dict) or part not in value:
                raise ConfigError(
                    f"{where}: {kind} names {path!r}, which is not in the configuration",
                    setting=where,
                )
            value = value[part]
        if kind == "inherit_from":
            self.inherited.add(path)
        return self.expand(value, path, (*trail, path))


def _remove(config: dict[str, Any], path: list[str]) -> None:
    for part in path[:-1]:
        inner = config.get(part)
        if not isinstance(inner, dict):
            return
        config = inner
    config.pop(path[-1], None)
