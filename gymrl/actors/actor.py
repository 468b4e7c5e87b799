"""The base class of what runs in a worker process."""

from __future__ import annotations

from typing import Any, ClassVar

from gymrl.actors.contract import ActorContract, UnresolvedAnnotationError


class Actor:
    """A class whose public async methods can be called from another process.

    Subclass it and write ``async def`` methods with annotations. A method that returns a value is
    a *call*, an async generator is a *stream*. Names with a leading underscore, and methods that
    are not async, stay private to the process. ``setup`` runs once at spawn, and again after
    every restart; ``close`` runs once at the end, unless the process is killed.

    All methods of one actor run in one event loop, concurrently, each call in a task of its own;
    blocking work belongs into a thread.

    Raises:
        EncodeError: When the class is defined: an annotation names a type that cannot travel; the
            text leads to it. An annotation that does not resolve yet (a forward reference) is
            looked at again at spawn.
    """

    _contract: ClassVar[ActorContract | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        try:
            cls._contract = ActorContract.of(cls)
        except UnresolvedAnnotationError:
            cls._contract = None

    async def setup(self, *args: Any, **kwargs: Any) -> None:
        """Open what the actor needs; override it with the parameters that spawn takes."""

    async def close(self) -> None:
        """Close what the actor opened; bounded by `SpawnOptions.close_timeout_s`."""


def contract_of(cls: type[Actor]) -> ActorContract:
    """The contract of an actor class, built now if its annotations did not resolve earlier.

    Raises:
        EncodeError: An annotation cannot travel, or names something that does not exist.
        TypeError: `cls` is no actor class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Actor)):
        raise TypeError(f"{cls!r} is not a subclass of gymrl.actors.Actor")
    contract = cls.__dict__.get("_contract")
    if contract is None:
        contract = ActorContract.of(cls)
        cls._contract = contract
    return contract
