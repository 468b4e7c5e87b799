"""Which weights each of several vLLM servers has, and how one is brought to the version of the day."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from gymrl.errors import DeadlineExceeded, GenerationError, WeightUpdateError
from gymrl.generation.vllm_orders import Placed, ServerOrders, is_gone
from gymrl.generation.weights import INITIAL_VERSION, UNNAMED

if TYPE_CHECKING:
    from gymrl.generation.balancer import Balancer, Upstream

logger = logging.getLogger(__name__)


class KnownServers:
    """The servers, and what is known of their weights.

    Args:
        orders: Reach them.
        balancer: Knows which of them get calls.
        take_out: Told of a server that must get none, and why.

    Attributes:
        current: The version of the day; None before the first update.
        astray: Servers whose weights are not known, and what they had before.
        last_seen: What the server that was asked last called its weights.
    """

    def __init__(
        self,
        orders: ServerOrders,
        balancer: Balancer,
        take_out: Callable[[Upstream, str], None],
    ) -> None:
        self.orders = orders
        self.current: Placed | None = None
        self.astray: dict[str, Placed | None] = {}
        self.last_seen = UNNAMED
        self._upstreams = {upstream.url: upstream for upstream in balancer.upstreams}
        self._take_out = take_out

    @property
    def urls(self) -> list[str]:
        """Of all of them, in the order of the configuration."""
        return list(self._upstreams)

    def gets_calls(self, url: str) -> bool:
        """Whether a server gets calls."""
        return self._upstreams[url].out_because is None

    def serving(self) -> list[str]:
        """Those that get calls."""
        return [url for url in self._upstreams if self.gets_calls(url)]

    def take_out(self, url: str, reason: str) -> None:
        """A server gets no calls until it has the version of the day."""
        self._take_out(self._upstreams[url], reason)

    async def find_left_behind(self, url: str) -> None:
        """Whoever updated a server before us may have died, and left it paused with weights of any kind.

        Raises:
            GenerationError: It can't be asked.
            DeadlineExceeded: It does not answer.
        """
        try:
            is_paused = await self.orders.is_paused(url)
        except WeightUpdateError:
            return  # it has no such routes, which an update will say
        if is_paused:
            root = await self.orders.root(url)
            self.astray[url] = None if root is None else Placed(root, UNNAMED)
            logger.warning(
                "%s was left in the middle of an update; it goes back to the weights of its start",
                url,
            )

    def not_at_hand(self, url: str) -> WeightUpdateError:
        """Why a server that is behind can't be brought to the version of the day."""
        if self.current is None:
            return WeightUpdateError(
                f"{url} holds weights that nobody knows since an update failed; update them "
                "again, or start it again"
            )
        return WeightUpdateError(
            f"{url} has not the weights {self.current.version!r}: they came from a trainer, and "
            "are nowhere else; the next update brings it back, by transfer when the sender is "
            "made for this server too"
        )

    async def is_behind(self, url: str) -> bool:
        """Whether a server has not the version of the day, or nobody knows.

        Raises:
            GenerationError: It can't be asked.
            DeadlineExceeded: It does not answer.
        """
        if url in self.astray:
            return True
        return (
            self.current is not None
            and await self.orders.named_version(url) != self.current.version
        )

    async def bring(self, url: str, target: Placed) -> None:
        """Have one server load `target`; what went wrong before is undone first.

        Raises:
            GenerationError: It could not; it is then stranded, unless it is gone.
            DeadlineExceeded: It takes too long.
        """
        former = self.astray.setdefault(url, None)
        self.orders.forget(url)
        try:
            await self.orders.pause(url, "keep")
            await self.orders.load(url, target, times=2)
            await self.orders.rename(url, target.version)
            await self.orders.resume(url)
        except (GenerationError, DeadlineExceeded) as error:
            if not is_gone(error):
                await self.strand(url, former)
            raise
        del self.astray[url]

    async def strand(self, url: str, former: Placed | None) -> None:
        """Note that a server's weights are not known; what it was sampling ends with ``abort``."""
        self.astray[url] = former
        try:
            await self.orders.pause(url, "abort")
        except (GenerationError, DeadlineExceeded) as error:
            logger.warning("%s could not be told to stop: %s", url, error)

    async def former(self, url: str) -> Placed:
        """What a server has now, and where that can be loaded from.

        Raises:
            GenerationError: It can't be asked.
            DeadlineExceeded: It does not answer.
        """
        version = await self.orders.named_version(url)
        if version == UNNAMED:
            self.orders.forget(url)
        if url in self.astray:
            return self.astray[url] or Placed(None, version)
        if self.gets_calls(url):
            self.last_seen = version
        if self.current is not None and version == self.current.version:
            return self.current
        root = await self.orders.root(url) if version == UNNAMED else None
        return Placed(root, version)

    def lost_track(self, url: str, former: Placed) -> None:
        """The weights of a server that gets no calls are not known any more."""
        self.astray[url] = former

    def leave_out(self, url: str, reason: str, former: Placed | None) -> None:
        """A server gets no calls until it was brought to the version of the day."""
        self.astray[url] = former
        self.take_out(url, reason)


def our_name(version: str) -> str:
    """Of weights that a server was started with: ours."""
    return INITIAL_VERSION if version == UNNAMED else version
