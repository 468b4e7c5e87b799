"""``spawn``: the way in."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from gymrl.actors.actor import Actor, contract_of
from gymrl.actors.codec import RoundTrip
from gymrl.actors.inprocess import InProcessHandle
from gymrl.actors.loading import locate, refuse_while_loading
from gymrl.actors.options import SpawnOptions
from gymrl.actors.remote import ProcessHandle

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import TracebackType

    from gymrl.actors.handle import ActorHandle

_numbers = itertools.count(1)


def spawn(
    cls: type[Actor], *, in_process: bool = False, options: SpawnOptions | None = None, **setup: Any
) -> Spawning:
    """Start an actor in a worker process of its own.

    Use it as ``async with spawn(Counter, start=3) as counter:``, which also closes it; or
    ``counter = await spawn(...)``, and close it yourself.

    Args:
        cls: The actor's class. A worker imports it by its module and name.
        in_process: Run it in this loop instead: the same handle and rules, and breakpoints work.
        options: Name, deadlines, limits.
        **setup: Arguments of the actor's ``setup``, checked now.

    Raises:
        TypeError: `cls` is no actor class, or set-up arguments are missing or unknown.
        EncodeError: A set-up argument or an annotation of the class cannot travel.
        ActorStartError: A worker process cannot find the class.
    """
    chosen = options or SpawnOptions()
    contract = contract_of(cls)
    contract.setup.bind((), setup, RoundTrip())
    name = chosen.name or f"{cls.__name__}-{next(_numbers)}"
    if not in_process:
        locate(cls, name)
    return Spawning(cls, name, in_process, chosen, setup)


class Spawning:
    """An actor that is about to start; see :func:`spawn`."""

    def __init__(
        self,
        cls: type[Actor],
        name: str,
        in_process: bool,
        options: SpawnOptions,
        setup: dict[str, Any],
    ) -> None:
        self._cls = cls
        self._name = name
        self._in_process = in_process
        self._options = options
        self._setup = setup
        self._handle: ActorHandle | None = None

    async def open(self) -> ActorHandle:
        """Start the actor and wait until its set-up is done.

        Cancelling this ends what was started.

        Raises:
            ActorStartError: The class does not import, or the process does not come up.
            Exception: What the set-up raised.
        """
        refuse_while_loading(self._name)
        handle: InProcessHandle | ProcessHandle
        if self._in_process:
            handle = InProcessHandle(self._cls, self._name, self._options)
        else:
            handle = ProcessHandle(self._cls, self._name, self._options)
        await handle.open(self._setup)
        self._handle = handle
        return handle

    def __await__(self) -> Generator[Any, None, ActorHandle]:
        return self.open().__await__()

    async def __aenter__(self) -> ActorHandle:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            await self._handle.__aexit__(kind, error, trace)
