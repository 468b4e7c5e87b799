"""Calls that were running when their worker died, told apart by what they carry."""

from __future__ import annotations

import collections
import hashlib
from typing import TYPE_CHECKING

from gymrl.actors.codec import ValueEncoder
from gymrl.errors import PoisonError

if TYPE_CHECKING:
    import msgspec

_REMEMBERED_DEATHS = 4096


class Suspects:
    """How many deaths each call has seen. The last few thousand such calls are remembered.

    Args:
        name: Whose calls they are, for the error.
        poison_after: So many deaths make a call poison.
    """

    def __init__(self, name: str, poison_after: int) -> None:
        self._name = name
        self._poison_after = poison_after
        self._deaths: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._deaths)

    def check(self, label: str, arguments: msgspec.Struct) -> bool:
        """Whether a call with these arguments was running at a death.

        Args:
            label: Of the method.
            arguments: As they would be sent.

        Raises:
            PoisonError: At too many.
        """
        return self._check(_digest(label, arguments), label, None)

    def add_death(self, label: str, arguments: msgspec.Struct, error: Exception) -> None:
        """Count a death at which the call was running.

        Raises:
            PoisonError: It was one too many; `error` is its cause.
        """
        key = _digest(label, arguments)
        self._deaths[key] = self._deaths.get(key, 0) + 1
        while len(self._deaths) > _REMEMBERED_DEATHS:
            self._deaths.popitem(last=False)
        self._check(key, label, error)

    def _check(self, key: bytes, label: str, error: Exception | None) -> bool:
        deaths = self._deaths.get(key, 0)
        if deaths >= self._poison_after:
            raise PoisonError(
                f"{label}: this call was running when its worker died, {deaths} times, and is not "
                f"tried again (RestartPolicy.poison_after); the last death: {error or 'earlier'}",
                actor=self._name,
                deaths=deaths,
            ) from error
        return deaths > 0


def _digest(label: str, arguments: msgspec.Struct) -> bytes:
    payload = bytearray()
    encoder = ValueEncoder()
    encoder.encode_into(arguments, payload, label)
    digest = hashlib.blake2b(payload, digest_size=16, person=b"gymrl")
    for _, array in encoder.arrays:
        digest.update(array.reshape(-1).view("u1").data if array.size else b"")
    return digest.digest() + label.encode()
