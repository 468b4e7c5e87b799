"""What one rank holds: a loop in a thread, its node's workers, and on rank 0 the engine."""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets
import time
from concurrent.futures import FIRST_COMPLETED
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from anyio.from_thread import start_blocking_portal

from gymrl.actors import serve_actor
from gymrl.concurrency import close_within
from gymrl.errors import DeadlineExceeded
from gymrl.rollout.engine import RolloutEngine
from gymrl.torchrun.fleet import NodeAddress, NodeFleet
from gymrl.torchrun.workers import NodeHost, NodeWorkers, offer, withdraw
from gymrl.torchrun.world import GroupWorld, LoneWorld

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from concurrent.futures import Future

    from gymrl.torchrun.config import TorchrunConfig

T = TypeVar("T")

CLOSE_TIMEOUT_S = 60.0
_LOOK_S = 0.2


class Site:
    """See the module. Ranks that are no node's local rank 0 hold nothing.

    Args:
        config: The job's.
        world: The ranks.
        options: Further keywords of the engine.

    Attributes:
        node: The workers of this node, on its local rank 0.
        engine: On rank 0, entered.
    """

    def __init__(
        self, config: TorchrunConfig, world: GroupWorld | LoneWorld, options: dict[str, Any]
    ) -> None:
        self._config = config
        self._world = world
        self._options = options
        self._portal: Any = None
        self._stack = contextlib.ExitStack()
        self._server: Any = None
        self._key = ""
        self.node: NodeWorkers | None = None
        self.engine: RolloutEngine | None = None

    def open(self) -> None:
        """Start what this rank holds. Raises what starting it raises."""
        world = self._world
        secret = secrets.token_bytes(32)
        if isinstance(world, GroupWorld) and len(world.leaders) > 1:
            secret = world.secret()
        if world.rank != world.leaders[world.node]:
            return
        self._portal = self._stack.enter_context(start_blocking_portal("asyncio"))
        self.node = NodeWorkers(self._config)
        if world.rank == 0:
            fleet = NodeFleet(self._config, self.node, self._other_nodes(), secret)
            self.engine = RolloutEngine(self._config.rollout, fleet=fleet, **self._options)
            self.run(self.engine.__aenter__)
        elif isinstance(world, GroupWorld):
            self.run(self._serve, self.node, world, secret)

    async def _serve(self, node: NodeWorkers, world: GroupWorld, secret: bytes) -> None:
        self._key = f"node {world.node} {secrets.token_hex(4)}"
        offer(self._key, node)
        server = serve_actor(NodeHost, secret=secret, host=world.address, key=self._key)
        self._server = await server.__aenter__()
        address = NodeAddress(world.node, self._server.host, self._server.port)
        world.line.put(f"node/{world.node}", msgspec.msgpack.encode(address))

    def _other_nodes(self) -> list[NodeAddress]:
        world = self._world
        if not isinstance(world, GroupWorld):
            return []
        seconds = self._config.rollout.start_timeout_s
        values = [
            world.line.get(
                f"node/{node}", f"the address of node {node}", seconds, "rollout.start_timeout_s"
            )
            for node in range(1, len(world.leaders))
        ]
        return [msgspec.msgpack.decode(value, type=NodeAddress) for value in values]

    def run(
        self, function: Callable[..., Awaitable[T]], *args: Any, seconds: float | None = None
    ) -> T:
        """Run something in the loop's thread; look for bad news meanwhile.

        Raises:
            RankFailedError: The job failed; what ran is cancelled.
            DeadlineExceeded: It took longer than `seconds` (of `collect_timeout_s`); the same.
            Exception: What it raises.
        """
        future = self.start(function, *args)
        try:
            if not self.wait([future], seconds):
                raise DeadlineExceeded(
                    f"a step's rollouts took longer than {seconds:g} s (set by collect_timeout_s)",
                    what="a step's rollouts",
                    seconds=seconds,
                    setting="collect_timeout_s",
                )
            return future.result()
        finally:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], timeout=CLOSE_TIMEOUT_S)

    def start(self, function: Callable[..., Awaitable[T]], *args: Any) -> Future[T]:
        """Begin something in the loop's thread."""
        future: Future[T] = self._portal.start_task_soon(function, *args)
        return future

    def wait(self, futures: Sequence[Future[Any]], seconds: float | None = None) -> bool:
        """Wait until one of them is done; look for bad news meanwhile.

        Returns:
            False: none was, within `seconds`.

        Raises:
            RankFailedError: The job failed.
        """
        ends = None if seconds is None else time.monotonic() + seconds
        while not concurrent.futures.wait(futures, _LOOK_S, FIRST_COMPLETED).done:
            self._world.check()
            if ends is not None and time.monotonic() > ends:
                return False
        return True

    def finish(self, function: Callable[..., Awaitable[Any]]) -> None:
        """Run the end of something, whatever the job's state; nothing where there is no loop."""
        if self._portal is not None:
            self._portal.call(function)

    def close_engine(self) -> None:
        """End the engine and with it every node's workers, bounded. Safe to call twice."""
        engine, self.engine = self.engine, None
        if engine is not None:
            self.finish(lambda: _close(engine.__aexit__(None, None, None), "the engine"))

    def close(self) -> None:
        """End everything here, bounded. Safe to call twice."""
        self.close_engine()
        server, self._server = self._server, None
        if server is not None:
            self.finish(lambda: _close(server.close(), "the link to the driver"))
            withdraw(self._key)
        if self.node is not None:
            self.finish(self.node.close)
        self._portal = None
        self._stack.close()


async def _close(closing: Awaitable[object], what: str) -> None:
    await close_within(closing, CLOSE_TIMEOUT_S, what)
