"""Keys in a benchmark's configuration: a plan holds where they come from, never what they are.

They come from the environment (``${oc.env:NAME}``), also inside a longer text (``Bearer
${oc.env:NAME}``), or from an ``env.yaml``, where NeMo Gym's users keep them: then the plan holds
``${name}``, and whoever runs it has such a file.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import ConfigError, RealServersError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_NAMED = re.compile(
    r"api_?key|secret|password|authorization|(hf|auth|access)_token$", re.IGNORECASE
)
POLICY_KEY = "gymrl-policy-api-key"
"""Stands for the policy's key while a plan is made."""

_NONE = frozenset({"", "none", "empty", "dummy", POLICY_KEY})
_LONG = 8
"""Characters from which a key is one also as a part of another text."""

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)(?:,([^}]*))?\}")


def is_key(name: str, value: object) -> bool:
    """Whether a text is a key: its name says so, and it is none of those that stand for no key."""
    return isinstance(value, str) and bool(_NAMED.search(name)) and value.lower() not in _NONE


def keys_in(value: Any, name: str = "") -> Iterator[str]:
    """The keys in a resolved configuration."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from keys_in(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from keys_in(item, name)
    elif is_key(name, value):
        yield value


def child_of(node: Any, key: Any) -> Any:
    """What stands under a key, or at an index, of plain data; None where there is nothing."""
    if isinstance(node, dict):
        return node.get(key)
    return node[key] if isinstance(node, list) and key < len(node) else None


class WrittenKeys(msgspec.Struct, frozen=True):
    """Where the keys of a configuration come from.

    Attributes:
        written: The configuration with its references.
        local: Names that the ``env.yaml`` has.
        keys: All keys, resolved.
    """

    written: dict[str, Any]
    local: frozenset[str]
    keys: frozenset[str]

    @classmethod
    def of(
        cls, resolved: Mapping[str, Any], written: Mapping[str, Any], local: Mapping[str, Any]
    ) -> WrittenKeys:
        """Look them up.

        Args:
            resolved: The configuration as it is used.
            written: The same with its references.
            local: The content of the ``env.yaml``.
        """
        return cls(dict(written), frozenset(local), frozenset(keys_in(dict(resolved))))

    def holds(self, text: str) -> bool:
        """Whether a text is one of the keys, under whatever name, or has one in it."""
        return any(key == text or (len(key) >= _LONG and key in text) for key in self.keys)

    def restated(
        self,
        value: Any,
        here: Any,
        plain: Callable[[str], str] = str,
        path: tuple[str, ...] = (),
    ) -> Any:
        """Resolved data with references where keys were.

        Args:
            value: The data.
            here: The same as it is written.
            plain: What becomes of texts that are no keys.
            path: Where it stands.

        Raises:
            RealServersError: A key is written out; names the place, not the key.
        """
        if isinstance(value, dict):
            return {
                key: self.restated(item, child_of(here, key), plain, (*path, str(key)))
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [
                self.restated(item, child_of(here, index), plain, (*path, str(index)))
                for index, item in enumerate(value)
            ]
        if not isinstance(value, str):
            return value
        return self.source(here, path) if self.holds(value) else plain(value)

    def source(self, here: Any, path: tuple[str, ...]) -> str:
        """The text that a key comes from, followed through other keys of the configuration.

        Raises:
            RealServersError: As :meth:`restated`.
        """
        seen: set[str] = set()
        while isinstance(here, str) and (found := _REFERENCE.fullmatch(here)):
            name = found[1]
            if name in seen:
                break
            seen.add(name)
            target: Any = self.written
            for part in name.split("."):
                target = child_of(target, part) if isinstance(target, dict) else None
            if name in self.local and isinstance(target, str) and "${" not in target:
                return here
            here = target
        if isinstance(here, str) and "${oc.env:" in here and "$" not in _VARIABLE.sub("", here):
            return here
        raise _written_out(".".join(path))


def _written_out(where: str) -> RealServersError:
    return RealServersError(
        f"{where} holds a key, and a plan holds none: write ${{oc.env:NAME}} in its place, and put the "
        "key into that environment variable; or ${name}, and the key under that name into env.yaml",
        setting=where,
    )


def require_no_keys(overrides: Mapping[str, Any]) -> None:
    """Refuse overrides that hold keys: a plan has them in it.

    Raises:
        ConfigError: Names the place, not the key.
    """
    for path, value in _texts(overrides, ()):
        if not is_key(path[-1], value) or "${" in value:
            continue
        where = ".".join(path)
        if where == "policy_api_key":
            raise ConfigError(
                "overrides: policy_api_key is no part of a plan: give the policy's key when the plan is "
                "run (--api-key-env, or api_key of the run's options)",
                setting=where,
            )
        raise ConfigError(f"overrides: {_written_out(where).message}", setting=where)


def _texts(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, dict):
        for key, item in node.items():
            yield from _texts(item, (*path, str(key)))
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _texts(item, path)
    elif isinstance(node, str) and path:
        yield path, node


def with_keys(servers: Any, local: Mapping[str, Any], path: tuple[str, ...] = ()) -> Any:
    """Servers of a plan with the keys that it refers to, as they are here and now.

    Args:
        servers: As planned; not changed.
        local: The content of the ``env.yaml``.
        path: Where they stand.

    Raises:
        ConfigError: A key is not there; names it.
    """
    if isinstance(servers, dict):
        return {key: with_keys(v, local, (*path, str(key))) for key, v in servers.items()}
    if isinstance(servers, list):
        return [with_keys(item, local, path) for item in servers]
    if not isinstance(servers, str) or not path or not _NAMED.search(path[-1]):
        return servers
    where = ".".join(path)
    reference = _REFERENCE.fullmatch(servers)
    if reference is None:
        return _VARIABLE.sub(lambda found: _variable(found, where), servers)
    found = local.get(reference[1])
    if not isinstance(found, str):
        raise ConfigError(
            f"{where}: the plan takes this key from {reference[1]!r} in an env.yaml, and there is none "
            "that has it in the working directory or the folders given",
            setting=where,
        )
    return found


def _variable(found: re.Match[str], where: str) -> str:
    value = os.environ.get(found[1], found[2])
    if value is None:
        raise ConfigError(
            f"{where}: the plan takes this key from the environment variable {found[1]}, which is not "
            "set",
            setting=where,
        )
    return value
