"""One exchange of the weights of several vLLM servers: paused together, resumed together.

What happens between is a :class:`~gymrl.generation.vllm_deliveries.Delivery`. Where one server can't
take the weights, all go back to those that they had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import anyio

from gymrl.concurrency import gather_bounded
from gymrl.errors import DeadlineExceeded, GenerationError, WeightUpdateError
from gymrl.generation.vllm_orders import Placed, is_gone

if TYPE_CHECKING:
    from gymrl.generation.vllm_deliveries import Delivery, Step
    from gymrl.generation.vllm_servers import KnownServers
    from gymrl.generation.weights import PauseMode

ARRIVAL_TIMEOUT_S = 2.0
"""How long a cancelled update waits for its own pause to reach a server."""


class NothingServesError(WeightUpdateError):
    """No server is left whose weights are known."""


class Round:
    """One update.

    Args:
        servers: All that are known.
        delivery: How the weights reach them.
        serving: Servers that get calls.
        newcomers: Servers that get none, and take part.
    """

    def __init__(
        self,
        servers: KnownServers,
        delivery: Delivery,
        serving: Sequence[str],
        newcomers: Collection[str] = (),
    ) -> None:
        self._servers = servers
        self._orders = servers.orders
        self._delivery = delivery
        self._newcomers = frozenset(newcomers)
        self._alive = [*serving, *newcomers]
        self._former: dict[str, Placed] = {}
        self._gone: dict[str, str] = {}
        self._stays_paused: set[str] = set()

    async def switch(self, pause: PauseMode) -> list[str]:
        """Pause, hand over, resume.

        Returns:
            The newcomers that have the weights now.

        Raises:
            WeightUpdateError: One server could not; all that can are back at what they had.
        """
        self._check(await self._each(self._look), "can't be updated")
        self._delivery.check(self._alive)
        try:
            await self._pause(pause)
            with anyio.CancelScope(shield=True):
                faults = await self._delivery.hand_over(self._each)
                if faults or not self._alive:
                    await self._go_back(faults)
                self._stays_paused.clear()
        finally:
            with anyio.CancelScope(shield=True):
                faults = await self._each(self._orders.resume, but=self._stays_paused)
                for url, reason in faults.items():
                    self._leave_out(url, reason)
        if not self._alive:
            self._check(faults, "can't be resumed")
        return [url for url in self._alive if url in self._newcomers]

    async def _look(self, url: str) -> None:
        if url in self._newcomers and await self._orders.is_paused(url):
            self._stays_paused.add(url)
        self._former[url] = await self._servers.former(url)
        await self._delivery.look(url)

    async def _pause(self, pause: PauseMode) -> None:
        try:
            # The other modes end at once.
            with anyio.CancelScope(shield=pause != "wait"):
                faults = await self._each(lambda url: self._orders.pause(url, pause))
        except anyio.get_cancelled_exc_class():
            # Servers carry on with an order whose caller is gone: it must not overtake the resume.
            with anyio.CancelScope(shield=True):
                await self._each(self._until_paused)
            raise
        self._check(faults, "can't be paused")

    async def _until_paused(self, url: str) -> None:
        with anyio.move_on_after(ARRIVAL_TIMEOUT_S):
            while not await self._orders.is_paused(url):  # noqa: ASYNC110 - in another process
                await anyio.sleep(0.02)

    async def _go_back(self, faults: dict[str, str]) -> NoReturn:
        text = f"vLLM could not load them; {said(self._gone | faults)}"
        lost = await self._each(self._back)
        for url, reason in lost.items():
            await self._servers.strand(url, self._former[url])
            self._leave_out(url, f"its weights are not known since an update failed: {reason}")
        if lost:
            text += f"; nor go back to the ones before: {said(lost)}"
        self._refuse(text)

    async def _back(self, url: str) -> None:
        if not await self._delivery.undo(url):
            return
        former = self._former[url]
        if url in self._newcomers:
            # It gets no calls: whoever puts it back in loads what serves then.
            self._servers.lost_track(url, former)
            return
        if former.directory is None:
            raise WeightUpdateError(
                f"its weights {former.version!r} can't be loaded again: they came from a trainer, "
                "or where they came from is not known here"
            )
        await self._orders.load(url, former, times=2)
        await self._orders.rename(url, former.version)

    async def _each(self, step: Step, but: Collection[str] = ()) -> dict[str, str]:
        """Take a step on every server that is there; what each answered that could not."""
        faults: dict[str, str] = {}

        async def one(url: str) -> None:
            try:
                await step(url)
            except (GenerationError, DeadlineExceeded) as error:
                if not is_gone(error):
                    faults[url] = str(error)
                    return
                self._gone[url] = str(error)
                self._leave_out(url, str(error))

        await gather_bounded(one, [url for url in self._alive if url not in but])
        return faults

    def _leave_out(self, url: str, reason: str) -> None:
        self._alive.remove(url)
        self._servers.leave_out(url, reason, self._former.get(url))

    def _check(self, faults: dict[str, str], what: str) -> None:
        if faults or not self._alive:
            self._refuse(f"{what}: {said(self._gone | faults)}")

    def _refuse(self, what: str) -> NoReturn:
        if any(url not in self._newcomers for url in self._alive):
            raise WeightUpdateError(what)
        raise NothingServesError(f"no vLLM server is left; {what}")


def said(faults: Mapping[str, str]) -> str:
    """Each server's reason, with its URL."""
    return "; ".join(
        reason if url in reason else f"{url}: {reason}" for url, reason in faults.items()
    )
