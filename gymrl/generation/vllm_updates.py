"""New weights for vLLM servers that run elsewhere: every one of them takes them, or none does.

Orders go over vLLM's development routes (``VLLM_SERVER_DEV_MODE=1``); one exchange is a
:class:`~gymrl.generation.vllm_rounds.Round`. A server that is gone is left out, and brought to the
version of the day before it gets calls again; so is one whose weights are not known any more.
Weights that a trainer sent are in the servers alone: one that lost them stays out until the next
update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from gymrl.concurrency import deadline, gather_bounded
from gymrl.errors import (
    DeadlineExceeded,
    GenerationError,
    WeightsLostError,
    WeightUpdateError,
)
from gymrl.generation.vllm_deliveries import FromDirectory, FromTrainer, check_backend
from gymrl.generation.vllm_orders import Placed, ServerOrders
from gymrl.generation.vllm_rounds import NothingServesError, Round, said
from gymrl.generation.vllm_servers import KnownServers, our_name
from gymrl.generation.weight_offers import Offers, check_reach
from gymrl.generation.weights import GLOO_BACKEND, UNNAMED, TransferWeights, check_update

if TYPE_CHECKING:
    from gymrl.config import VllmConfig
    from gymrl.generation.balancer import Balancer, Upstream
    from gymrl.generation.base import WeightSpan
    from gymrl.generation.checkpoints import StagedTensors
    from gymrl.generation.vllm_client import VllmClient
    from gymrl.generation.weights import (
        DirectoryWeights,
        PauseMode,
        TensorWeights,
        WeightSource,
    )

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
"""How long a server that gets no calls may take to say that it is there."""


class ServerFleet:
    """The weights of several servers.

    Args:
        client: Reaches them.
        config: Of the servers; ``update_servers`` allows all this.
        model: Directory of the model that they serve, where it is known: what is offered is held
            against its names and shapes.
        balancer: Knows which of them get calls.
        take_out: Told of a server that must get none, and why.
    """

    def __init__(
        self,
        client: VllmClient,
        config: VllmConfig,
        model: str | None,
        balancer: Balancer,
        take_out: Callable[[Upstream, str], None],
    ) -> None:
        self.orders = ServerOrders(client, config.update_timeout_s)
        self._servers = KnownServers(self.orders, balancer, take_out)
        self._config = config
        self._offers = Offers(model)
        self._turn = anyio.Lock()
        self._staged: StagedTensors | None = None
        self.epoch = 0
        """Counts the updates that were taken."""

    @property
    def version(self) -> str | None:
        """Of the latest update that was taken; None before the first."""
        return None if self._servers.current is None else self._servers.current.version

    def was_restarted(self, spans: Sequence[WeightSpan]) -> bool:
        """Whether an answer comes from a server that has lost the weights it was given."""
        return bool(spans) and spans[-1].version == UNNAMED and self._servers.current is not None

    def renamed(self, spans: list[WeightSpan]) -> list[WeightSpan]:
        """Spans with our name for the weights that a server was started with."""
        if not self._config.update_servers:
            return spans
        return [span._replace(version=our_name(span.version)) for span in spans]

    async def takers(self) -> list[str]:
        """Servers that a transfer can go to, in order; a sender is made for so many engines.

        They are those that get calls, and those that get none but answer that they take transfers.
        """
        newcomers, _ = await self._asked()
        serving = self._servers.serving()
        return [url for url in self._servers.urls if url in newcomers or url in serving]

    async def update(self, source: WeightSource, version: str, pause: PauseMode) -> list[str]:
        """Have the servers that get calls serve `source` from the next token on.

        Updates take turns. Where no server gets calls, those are tried whose weights are not known.
        Cancelling it before the servers load leaves the old weights; afterwards it ends first.

        Args:
            source: A directory that this process and every server see under one path, tensors for
                servers on this host, or a transfer: for as many engines as get calls, or as
                :meth:`takers` names.
            version: Must differ from vLLM's own name for the weights of its start.
            pause: What becomes of the calls in flight.

        Returns:
            Servers that got no calls, and have the weights now.

        Raises:
            WeightUpdateError: They were not taken. Its text names the server, and what to do.
        """
        check_update(version, pause)
        async with self._turn:
            try:
                self._check_allowed(version)
                if isinstance(source, TransferWeights):
                    return await self._transfer(source, version, pause)
                return await self._load(source, version, pause)
            except (GenerationError, DeadlineExceeded) as error:
                raise self._refusal(error, source, version) from error

    async def _load(
        self, source: DirectoryWeights | TensorWeights, version: str, pause: PauseMode
    ) -> list[str]:
        urls = self._servers.serving()
        if not urls and not self._servers.astray:
            raise NothingServesError("no vLLM server answers")
        check_reach(urls or list(self._servers.astray), source)
        with anyio.CancelScope(shield=True):  # a thread can't be cancelled
            directory, staged = await anyio.to_thread.run_sync(self._offers.placed, source)
        placed, brought = Placed(directory, version), []
        try:
            if urls:
                await Round(self._servers, FromDirectory(self.orders, placed), urls).switch(pause)
            else:
                with anyio.CancelScope(shield=True):
                    brought = await self._gather_in(placed)
        except BaseException:
            if staged is not None:
                staged.remove()
            raise
        self._took(placed, urls, staged)
        return brought

    async def _transfer(self, source: TransferWeights, version: str, pause: PauseMode) -> list[str]:
        offered = source.offered()
        if offered is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._offers.check, offered)
        serving, newcomers, unfit = self._servers.serving(), set[str](), dict[str, str]()
        if len(source.engines) != len(serving):
            newcomers, unfit = await self._asked(source.backend)
        urls = [url for url in self._servers.urls if url in serving or url in newcomers]
        if not urls:
            raise NothingServesError(f"no vLLM server takes a transfer; {said(unfit)}")
        if len(source.engines) != len(urls):
            raise _miscounted(source, serving, newcomers, unfit)
        delivery = FromTrainer(
            self.orders,
            {url: source.for_engine(place, len(urls)) for place, url in enumerate(urls)},
            version,
            are_grouped=any(source.engines),
        )
        brought = await Round(self._servers, delivery, serving, newcomers).switch(pause)
        for url in brought:
            self._servers.astray.pop(url, None)
        self._took(delivery.placed, urls, None)
        return brought

    async def _asked(self, backend: str | None = None) -> tuple[set[str], dict[str, str]]:
        """Servers that get no calls: those that can take a transfer, and why the others can't."""
        able: set[str] = set()
        unfit: dict[str, str] = {}

        async def ask(url: str) -> None:
            try:
                with deadline(ASK_TIMEOUT_S, f"an answer of {url}"):
                    has = (await self.orders.taker(url)).backend
                check_backend(url, has, backend or has or GLOO_BACKEND)
            except (GenerationError, DeadlineExceeded) as error:
                unfit[url] = str(error)
            else:
                able.add(url)

        serving = self._servers.serving()
        await gather_bounded(ask, [url for url in self._servers.urls if url not in serving])
        return able, unfit

    async def adopt(self, version: str) -> None:
        """Take servers that name `version` for up to date; the others get no calls.

        Raises:
            WeightsLostError: None of them names it.
            WeightUpdateError: They are not to be updated.
        """
        self._check_allowed(version)
        async with self._turn:
            others: dict[str, str] = {}

            async def ask(url: str) -> None:
                try:
                    named = await self.orders.named_version(url)
                except (GenerationError, DeadlineExceeded) as error:
                    others[url] = str(error)
                else:
                    if named != version:
                        others[url] = f"it has the weights {our_name(named)!r}, not {version!r}"

            serving = self._servers.serving()
            await gather_bounded(ask, serving)
            if len(others) == len(serving):
                raise WeightsLostError(
                    f"no vLLM server has the weights {version!r} any more, which a trainer sent; "
                    f"{said(others)}",
                    version=version,
                )
            self._took(Placed(None, version), serving, None)
            for url, reason in others.items():
                self._servers.take_out(url, reason)

    def _took(self, placed: Placed, urls: Sequence[str], staged: StagedTensors | None) -> None:
        self._servers.current = placed
        self.epoch += 1
        for url in self._servers.serving():
            if url not in urls:
                self._servers.take_out(url, "it came back while weights were exchanged")
        previous, self._staged = self._staged, staged
        if previous is not None:
            previous.remove()

    def _check_allowed(self, version: str) -> None:
        if not self._config.update_servers:
            raise WeightUpdateError(
                "servers named by vllm.base_urls belong to whoever runs them; set "
                "vllm.update_servers: true if their weights are yours to exchange"
            )

    async def _gather_in(self, placed: Placed) -> list[str]:
        """No server gets calls: give the weights to those that went astray; those that took them."""
        urls, faults = list(self._servers.astray), {}
        for url in urls:
            try:
                await self._servers.bring(url, placed)
            except (GenerationError, DeadlineExceeded) as error:
                faults[url] = str(error)
        if len(faults) == len(urls):
            raise NothingServesError(f"no vLLM server takes them; {said(faults)}")
        return [url for url in urls if url not in faults]

    async def catch_up(self, url: str) -> None:
        """Bring a server that gets no calls to the version of the day, if it has another.

        Raises:
            GenerationError: It can't be brought there, or be asked.
            DeadlineExceeded: It takes too long.
        """
        if self._servers.current is None and url not in self._servers.astray:
            async with self._turn:
                # No update has come by, so that whoever paused it is gone.
                if self._config.update_servers and self._servers.current is None:
                    await self._servers.find_left_behind(url)
        if not await self._servers.is_behind(url):
            return
        async with self._turn:
            # Meanwhile an update may have come by.
            if not await self._servers.is_behind(url):
                return
            target = self._servers.current or self._servers.astray[url]
            if target is None or target.directory is None:
                await self.orders.named_version(url)  # else that it can't be reached is the reason
                raise self._servers.not_at_hand(url)
            with anyio.CancelScope(shield=True):
                await self._servers.bring(url, target)
            logger.info("%s has weights %s again", url, target.version)

    def _refusal(
        self, error: GenerationError | DeadlineExceeded, source: WeightSource, version: str
    ) -> WeightUpdateError:
        lost = isinstance(error, NothingServesError) or not self._servers.serving()
        serving = None if lost else self.version or our_name(self._servers.last_seen)
        rest = "nothing serves" if lost else f"version {serving!r} goes on serving"
        return WeightUpdateError(
            f"weights {version!r} from {source} were not taken: {error}; {rest}",
            version=version,
            serving=serving,
            source=str(source),
            num_engines=error.num_engines if isinstance(error, WeightUpdateError) else None,
        )

    def close(self) -> None:
        """Give staged memory back; servers have read it."""
        if self._staged is not None:
            self._staged.remove()


def _miscounted(
    source: TransferWeights, serving: list[str], newcomers: set[str], unfit: dict[str, str]
) -> WeightUpdateError:
    count = len(serving) + len(newcomers)
    text = f"the sender was made for {len(source.engines)} engines; calls go to {len(serving)}"
    if newcomers:
        text += f", and {', '.join(sorted(newcomers))} can come back with them"
    text += f": make it with num_engines={count}"
    if unfit:
        text += f"; not among them: {said(unfit)}"
    return WeightUpdateError(text, num_engines=count)
