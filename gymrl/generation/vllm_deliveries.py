"""How new weights reach vLLM servers that are paused: from a directory, or from a trainer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from gymrl.errors import WeightUpdateError
from gymrl.generation.vllm_orders import Placed, ServerOrders
from gymrl.generation.weights import WORKER_EXTENSION

if TYPE_CHECKING:
    from gymrl.generation.weights import TransferWeights

Step = Callable[[str], Awaitable[None]]
Each = Callable[[Step], Awaitable[dict[str, str]]]
"""Takes a step on every server that is there, and says what each answered that could not."""


class Delivery(Protocol):
    """How new weights reach servers that are paused."""

    placed: Placed
    """What they are, and where they can be loaded from again."""

    async def look(self, url: str) -> None:
        """Ask a server that samples on whether it can take them.

        Raises:
            GenerationError: It can't.
            DeadlineExceeded: It does not answer.
        """
        ...

    def check(self, urls: Sequence[str]) -> None:
        """Whether these servers can take them together; the last check before they are paused.

        Raises:
            WeightUpdateError: They can't.
        """
        ...

    async def hand_over(self, each: Each) -> dict[str, str]:
        """Have every server take them, and name them; what went wrong, by server."""
        ...

    async def undo(self, url: str) -> bool:
        """Close what is half done; whether the weights that served may be gone."""
        ...


class FromDirectory:
    """The servers read a checkpoint.

    Args:
        orders: Reach the servers.
        placed: With a directory that they see.
    """

    def __init__(self, orders: ServerOrders, placed: Placed) -> None:
        self._orders = orders
        self.placed = placed

    async def look(self, url: str) -> None:
        """See :class:`Delivery`; what every update asks is enough."""

    def check(self, urls: Sequence[str]) -> None:
        """See :class:`Delivery`."""

    async def hand_over(self, each: Each) -> dict[str, str]:
        """See :class:`Delivery`."""
        faults = await each(lambda url: self._orders.load(url, self.placed))
        if not faults:
            faults = await each(lambda url: self._orders.rename(url, self.placed.version))
        return faults

    async def undo(self, url: str) -> bool:
        """See :class:`Delivery`; loading again cleans up."""
        return True


class FromTrainer:
    """A trainer sends to all of the servers at once.

    Args:
        orders: Reach the servers.
        parts: What each of them is told, by URL.
        version: Of the weights.
        are_grouped: They and the trainer form a group: all of them meet it, or none.
    """

    def __init__(
        self,
        orders: ServerOrders,
        parts: Mapping[str, TransferWeights],
        version: str,
        *,
        are_grouped: bool,
    ) -> None:
        self._orders = orders
        self._parts = parts
        self._are_grouped = are_grouped
        self._num_workers: dict[str, int] = {}
        self._have_met = False
        self._has_begun = False
        self.placed = Placed(None, version)

    async def look(self, url: str) -> None:
        """See :class:`Delivery`; a server that has met this trainer was asked then."""
        if self._orders.has_met(url, self._parts[url]):
            return
        taker = await self._orders.taker(url)
        check_backend(url, taker.backend, self._parts[url].backend)
        self._num_workers[url] = taker.num_workers

    def check(self, urls: Sequence[str]) -> None:
        """See :class:`Delivery`."""
        made_for, count = len(self._parts), len(urls)
        if count != made_for:
            raise WeightUpdateError(
                f"the sender was made for {made_for} engines, and {count} are left; make another "
                f"one, with num_engines={count}",
                num_engines=count,
            )
        strangers = [url for url in urls if not self._orders.has_met(url, self._parts[url])]
        self._have_met = not strangers
        self._check_size(strangers)
        if self._are_grouped and 0 < len(strangers) < count:
            raise WeightUpdateError(
                f"{', '.join(strangers)} did not meet this trainer together with the others: "
                "started again since, or left out until now; make another sender",
                num_engines=count,
            )

    def _check_size(self, urls: Sequence[str]) -> None:
        world_size = next(iter(self._parts.values())).init_info.get("world_size")
        if len(urls) < len(self._parts) or world_size is None:
            return
        num_workers = [self._num_workers[url] for url in urls]
        if world_size != 1 + sum(num_workers):
            raise WeightUpdateError(
                f"the sender was made for {world_size - 1} workers in {len(urls)} engines, and "
                f"these have {num_workers}; make it with num_workers={num_workers[0]}, and have "
                "all engines of one size"
            )

    async def hand_over(self, each: Each) -> dict[str, str]:
        """See :class:`Delivery`."""
        orders, parts, version = self._orders, self._parts, self.placed.version
        faults: dict[str, str] = {}
        if not self._have_met:
            # A trainer or a generator before us may have died and left one open.
            faults = await each(self._close_former)
        if not faults and not self._have_met:
            faults = await each(lambda url: orders.meet(url, parts[url]))
        if not faults:
            self._has_begun = True
            faults = await each(orders.begin_transfer)
        if not faults:
            faults = await each(lambda url: orders.receive(url, parts[url].update_info))
        if not faults:
            faults = await each(lambda url: orders.finish_transfer(url, version))
        if faults:
            orders.forget_trainers()
        return faults

    async def _close_former(self, url: str) -> None:
        await self._orders.abandon_transfer(url)

    async def undo(self, url: str) -> bool:
        """See :class:`Delivery`."""
        return self._has_begun and await self._orders.abandon_transfer(url)


def check_backend(url: str, has: str | None, wants: str) -> None:
    """Refuse a server whose weight transfer is another one than the sender's.

    Raises:
        WeightUpdateError: With the arguments that it must be started with.
    """
    if has != wants:
        raise WeightUpdateError(
            f"{url}: its weight transfer is {has or 'off'}; start it with --weight-transfer-config "
            f'\'{{"backend": "{wants}"}}\' --worker-extension-cls {WORKER_EXTENSION}'
        )
