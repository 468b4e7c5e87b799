"""New weights for vLLM servers that run elsewhere: every one of them takes them, or none does.

Orders go over vLLM's development routes (``VLLM_SERVER_DEV_MODE=1``): every server is paused, loads
the checkpoint, is told its version and resumed. Where one answers that it can't load, all go back
to the weights that they had. A server that is gone is left out, and brought to the version of the
day before it gets calls again. So is one whose weights are not known any more.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from gymrl.concurrency import gather_bounded
from gymrl.errors import DeadlineExceeded, GenerationError, WeightUpdateError
from gymrl.generation.vllm_orders import UNNAMED, Placed, ServerOrders, is_gone
from gymrl.generation.weights import (
    INITIAL_VERSION,
    DirectoryWeights,
    Manifest,
    PauseMode,
    TensorWeights,
    TransferWeights,
    WeightSource,
    check_pause,
    describe,
)

if TYPE_CHECKING:
    from gymrl.config import VllmConfig
    from gymrl.generation.balancer import Balancer, Upstream
    from gymrl.generation.base import WeightSpan
    from gymrl.generation.checkpoints import StagedTensors
    from gymrl.generation.vllm_client import VllmClient

logger = logging.getLogger(__name__)

ARRIVAL_TIMEOUT_S = 2.0
"""How long a cancelled update waits for its own pause to reach a server."""


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
        self._upstreams = {upstream.url: upstream for upstream in balancer.upstreams}
        self._config = config
        self._model = model
        self._manifest: Manifest | None = None
        self._take_out = take_out
        self._turn = anyio.Lock()
        self._current: Placed | None = None
        self._astray: dict[str, Placed | None] = {}
        self._staged: StagedTensors | None = None
        self._last_seen = UNNAMED
        self.epoch = 0
        """Counts the updates that were taken."""

    @property
    def version(self) -> str | None:
        """Of the latest update that was taken; None before the first."""
        return None if self._current is None else self._current.version

    def was_restarted(self, spans: Sequence[WeightSpan]) -> bool:
        """Whether an answer comes from a server that has lost the weights it was given."""
        return bool(spans) and spans[-1].version == UNNAMED and self._current is not None

    def renamed(self, spans: list[WeightSpan]) -> list[WeightSpan]:
        """Spans with our name for the weights that a server was started with."""
        if not self._config.update_servers:
            return spans
        return [span._replace(version=_ours(span.version)) for span in spans]

    async def update(self, source: WeightSource, version: str, pause: PauseMode) -> None:
        """Have the servers that get calls serve `source` from the next token on.

        Updates take turns. Where no server gets calls, those are tried whose weights are not known.
        Cancelling it before the servers load leaves the old weights; afterwards it ends first.

        Args:
            source: A directory that this process and every server see under one path, or tensors
                for servers on this host.
            version: Must differ from vLLM's own name for the weights of its start.
            pause: What becomes of the calls in flight.

        Raises:
            WeightUpdateError: They were not taken. Its text names the server, and what to do.
        """
        check_pause(pause)
        async with self._turn:
            try:
                await self._update(source, version, pause)
            except (GenerationError, DeadlineExceeded) as error:
                raise self._refusal(error, source, version) from error

    async def _update(self, source: WeightSource, version: str, pause: PauseMode) -> None:
        urls = [url for url, upstream in self._upstreams.items() if upstream.out_because is None]
        checked = self._checked(urls or list(self._astray), source, version)
        with anyio.CancelScope(shield=True):  # a thread can't be cancelled
            directory, staged = await anyio.to_thread.run_sync(self._prepared, checked)
        placed = Placed(directory, version)
        try:
            if urls:
                await _Round(self, urls).switch(placed, pause)
            else:
                with anyio.CancelScope(shield=True):
                    await self._gather_in(placed)
        except BaseException:
            if staged is not None:
                staged.remove()
            raise
        self._current = placed
        self.epoch += 1
        for url, upstream in self._upstreams.items():
            if upstream.out_because is None and url not in urls:
                self._take_out(upstream, "it came back while weights were exchanged")
        previous, self._staged = self._staged, staged
        if previous is not None:
            previous.remove()

    def _checked(
        self, urls: Sequence[str], source: WeightSource, version: str
    ) -> DirectoryWeights | TensorWeights:
        if not self._config.update_servers:
            raise WeightUpdateError(
                "servers named by vllm.base_urls belong to whoever runs them; set "
                "vllm.update_servers: true if their weights are yours to exchange"
            )
        if version == UNNAMED:
            raise WeightUpdateError(
                f"a server that is started again calls its weights {UNNAMED!r}, and could not be "
                "told from one that has these; use another version"
            )
        if not urls:
            raise NothingServesError("no vLLM server answers")
        if isinstance(source, TransferWeights):
            raise WeightUpdateError(
                "a transfer goes to an engine of this process; give servers DirectoryWeights"
            )
        if not isinstance(source, DirectoryWeights):
            distant = [url for url in urls if not is_on_this_host(url)]
            if distant:
                raise WeightUpdateError(
                    f"{', '.join(distant)}: tensors are handed over in this host's shared memory, "
                    "which a server elsewhere does not see; save them to a directory that both "
                    "see, and give DirectoryWeights"
                )
        return source

    def _prepared(
        self, source: DirectoryWeights | TensorWeights
    ) -> tuple[str, StagedTensors | None]:
        """Where servers find the weights, now that they are known to be whole."""
        # It brings torch, which only whoever hands out weights needs.
        from gymrl.generation.checkpoints import (  # noqa: PLC0415
            StagedTensors,
            checkpoint_entries,
            directory_manifest,
            sweep_staged,
        )

        if isinstance(source, DirectoryWeights):
            offered = checkpoint_entries(source.path)
        else:
            offered = describe(source.tensors)
        if self._manifest is None and self._model and any_weights(self._model):
            self._manifest = directory_manifest(self._model)
        shapes = {name: shape for name, (shape, _) in offered.items()}
        (self._manifest or Manifest(shapes=shapes)).check(offered)
        if isinstance(source, DirectoryWeights):
            return os.path.abspath(source.path), None
        sweep_staged()
        staged = StagedTensors(source.tensors)
        return str(staged.path), staged

    async def _gather_in(self, placed: Placed) -> None:
        """No server gets calls: give the weights to those that went astray."""
        urls, faults = list(self._astray), {}
        for url in urls:
            try:
                await self._bring(url, placed)
            except (GenerationError, DeadlineExceeded) as error:
                faults[url] = str(error)
        if len(faults) == len(urls):
            raise NothingServesError(f"no vLLM server takes them; {_said(faults)}")

    async def catch_up(self, url: str) -> None:
        """Bring a server that gets no calls to the version of the day, if it has another.

        Raises:
            GenerationError: It can't be brought there, or be asked.
            DeadlineExceeded: It takes too long.
        """
        if self._current is None and url not in self._astray:
            return
        if not await self._is_behind(url):
            return
        async with self._turn:
            # Meanwhile an update may have come by.
            if not await self._is_behind(url):
                return
            target = self._current or self._astray[url]
            if target is None or target.directory is None:
                raise WeightUpdateError(
                    f"{url} holds weights that nobody knows since an update failed; update them "
                    "again, or start it again",
                )
            with anyio.CancelScope(shield=True):
                await self._bring(url, target)
            logger.info("%s has weights %s again", url, target.version)

    async def _is_behind(self, url: str) -> bool:
        if url in self._astray:
            return True
        return (
            self._current is not None
            and await self.orders.named_version(url) != self._current.version
        )

    async def _bring(self, url: str, target: Placed) -> None:
        """Have one server load `target`; what went wrong before is undone first."""
        former = self._astray.setdefault(url, None)
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
        del self._astray[url]

    async def strand(self, url: str, former: Placed | None) -> None:
        """Note that a server's weights are not known; what it was sampling ends with ``abort``."""
        self._astray[url] = former
        try:
            await self.orders.pause(url, "abort")
        except (GenerationError, DeadlineExceeded) as error:
            logger.warning("%s could not be told to stop: %s", url, error)

    async def former(self, url: str) -> Placed:
        """What a server has now, and where that can be loaded from."""
        self._last_seen = version = await self.orders.named_version(url)
        if self._current is not None and version == self._current.version:
            return self._current
        root = await self.orders.root(url) if version == UNNAMED else None
        return Placed(root, version)

    def leave_out(self, url: str, reason: str, former: Placed | None) -> None:
        """A server gets no calls until it was brought to the version of the day."""
        self._astray[url] = former
        self._take_out(self._upstreams[url], reason)

    def _refusal(
        self, error: GenerationError | DeadlineExceeded, source: WeightSource, version: str
    ) -> WeightUpdateError:
        lost = isinstance(error, NothingServesError)
        serving = None if lost else self.version or _ours(self._last_seen)
        rest = "nothing serves" if lost else f"version {serving!r} goes on serving"
        return WeightUpdateError(
            f"weights {version!r} from {source} were not taken: {error}; {rest}",
            version=version,
            serving=serving,
            source=str(source),
        )

    def close(self) -> None:
        """Give staged memory back; servers have read it."""
        if self._staged is not None:
            self._staged.remove()


class NothingServesError(WeightUpdateError):
    """No server is left whose weights are known."""


class _Round:
    """One update of the servers that get calls.

    Args:
        fleet: Gives the orders.
        urls: The servers.
    """

    def __init__(self, fleet: ServerFleet, urls: Sequence[str]) -> None:
        self._fleet = fleet
        self._orders = fleet.orders
        self._alive = list(urls)
        self._former: dict[str, Placed] = {}
        self._gone: dict[str, str] = {}

    async def switch(self, placed: Placed, pause: PauseMode) -> None:
        """Pause, load, name, resume.

        Raises:
            WeightUpdateError: One server could not; all that can are back at what they had.
        """
        self._raise(await self._each(self._look), "can't be updated")
        try:
            await self._pause(pause)
            with anyio.CancelScope(shield=True):
                faults = await self._each(lambda url: self._orders.load(url, placed))
                rename = self._orders.rename
                faults |= await self._each(lambda url: rename(url, placed.version), but=faults)
                if faults:
                    await self._go_back(faults)
        finally:
            with anyio.CancelScope(shield=True):
                faults = await self._each(self._orders.resume)
                for url, reason in faults.items():
                    self._fleet.leave_out(url, reason, self._former.get(url))
                    self._alive.remove(url)
        self._raise({}, "can't be resumed")

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
        self._raise(faults, "can't be paused")

    async def _until_paused(self, url: str) -> None:
        with anyio.move_on_after(ARRIVAL_TIMEOUT_S):
            while not await self._orders.is_paused(url):  # noqa: ASYNC110 - in another process
                await anyio.sleep(0.02)

    async def _look(self, url: str) -> None:
        await self._orders.is_paused(url)  # the route is there
        self._former[url] = await self._fleet.former(url)

    async def _go_back(self, faults: dict[str, str]) -> None:
        text = f"vLLM could not load them; {_said(faults)}"

        async def back(url: str) -> None:
            former = self._former[url]
            if former.directory is None:
                raise WeightUpdateError(
                    f"where its weights {former.version!r} came from is not known here"
                )
            await self._orders.load(url, former, times=2)
            await self._orders.rename(url, former.version)

        lost = await self._each(back)
        for url, reason in lost.items():
            self._alive.remove(url)
            await self._fleet.strand(url, self._former[url])
            why = f"its weights are not known since an update failed: {reason}"
            self._fleet.leave_out(url, why, self._former[url])
        if lost:
            text += f"; nor go back to the ones before: {_said(lost)}"
        self._raise({}, text)
        raise WeightUpdateError(text)

    async def _each(
        self, step: Callable[[str], Awaitable[None]], but: dict[str, str] | None = None
    ) -> dict[str, str]:
        """Take a step on every server that is there; what each answered that could not."""
        faults: dict[str, str] = {}

        async def one(url: str) -> None:
            try:
                await step(url)
            except (GenerationError, DeadlineExceeded) as error:
                if not is_gone(error):
                    faults[url] = str(error)
                    return
                self._alive.remove(url)
                self._gone[url] = str(error)
                self._fleet.leave_out(url, str(error), self._former.get(url))

        await gather_bounded(one, [url for url in self._alive if url not in (but or {})])
        return faults

    def _raise(self, faults: dict[str, str], what: str) -> None:
        if faults:
            raise WeightUpdateError(f"{what}: {_said(faults)}")
        if not self._alive:
            raise NothingServesError(f"no vLLM server is left; {what}; {_said(self._gone)}")


def _ours(version: str) -> str:
    return INITIAL_VERSION if version == UNNAMED else version


def _said(faults: dict[str, str]) -> str:
    return "; ".join(
        reason if url in reason else f"{url}: {reason}" for url, reason in faults.items()
    )


def any_weights(directory: str) -> bool:
    """Whether a directory holds a checkpoint; one may have been given for its tokenizer alone."""
    return os.path.isdir(directory) and any(
        name.endswith(".safetensors") for name in os.listdir(directory)
    )


def is_on_this_host(url: str) -> bool:
    """Whether a URL is a loopback address: whoever listens there shares our memory."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
