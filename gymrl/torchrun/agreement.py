"""Whether all ranks were given the same configuration. Pure.

Rank 0 drives, so its configuration is what counts; another one on another rank is silently passed
over in most settings, and in some of them leaves ranks waiting for each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from gymrl.torchrun.config import TorchrunConfig

OWN = frozenset({"address"})
"""Settings that each rank may have for itself."""

SHARED = ("weight_transfer", "per_node", "rollout.in_process")
"""Settings of which two make ranks wait for each other."""


def fingerprints(config: TorchrunConfig) -> dict[str, str]:
    """What each setting is, as digests: a configuration may hold keys, and the store asks nobody."""
    return {
        name: hashlib.blake2b(msgspec.json.encode(value, order="sorted"), digest_size=8).hexdigest()
        for name, value in _settings(msgspec.to_builtins(config))
        if name not in OWN
    }


def _settings(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from _settings(inner, f"{name}.{key}" if name else str(key))


def differences(own: Mapping[str, str], first: Mapping[str, str]) -> list[str]:
    """The settings that are not those of rank 0, by name."""
    return sorted(name for name in own.keys() | first.keys() if own.get(name) != first.get(name))


def must_agree(name: str) -> bool:
    """Whether ranks can't go on with two values of a setting."""
    return any(name == shared or name.startswith(f"{shared}.") for shared in SHARED)
