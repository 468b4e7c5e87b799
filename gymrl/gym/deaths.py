"""What is under way when a server dies: it ends at once, with the server's name.

Nobody who waits for an answer would learn of a death otherwise: Gym's agents try a refused
connection again without end.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import anyio

from gymrl.errors import RolloutInfraFailure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gymrl.errors import ServerDiedError


class DeathWatch:
    """Ends blocks of code when a server dies."""

    def __init__(self) -> None:
        self._death: ServerDiedError | None = None
        self._scopes: set[anyio.CancelScope] = set()

    def report(self, death: ServerDiedError) -> None:
        """A server is gone: end every block, and refuse new ones. The first death is kept."""
        if self._death is None:
            self._death = death
            for scope in tuple(self._scopes):
                scope.cancel()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A block that a death ends.

        Raises:
            RolloutInfraFailure: A server died, before or meanwhile; names it, with its last lines.
        """
        if self._death is not None:
            raise failure_of_death(self._death)
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught and self._death is not None:
            raise failure_of_death(self._death)


def failure_of_death(death: ServerDiedError) -> RolloutInfraFailure:
    """A server's death as what it is for a rollout that needed it."""
    failure = RolloutInfraFailure(death.message, instance=death.instance, url=death.url)
    failure.__cause__ = death
    return failure
