"""Orders to one vLLM server about its weights, over vLLM's development routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from gymrl.concurrency import deadline
from gymrl.errors import (
    DeadlineExceeded,
    GenerationError,
    GenerationTransportError,
    WeightUpdateError,
)
from gymrl.generation.vllm_client import NoRouteError
from gymrl.generation.weights import WORKER_EXTENSION

if TYPE_CHECKING:
    from gymrl.generation.vllm_client import VllmClient
    from gymrl.generation.weights import TransferWeights

ORDER_TIMEOUT_S = 30.0
"""Of an order that moves no weights."""


class Placed(NamedTuple):
    """A version of the weights, and the directory that servers read it from; None: not known."""

    directory: str | None
    version: str


class Taker(NamedTuple):
    """How a server takes weights from a trainer: its backend, None where it is off; its workers."""

    backend: str | None
    num_workers: int


class ServerOrders:
    """Gives orders, and says what came of them.

    Args:
        client: Reaches the servers.
        update_timeout_s: Deadline of loading weights, and of each step of a transfer.
    """

    def __init__(self, client: VllmClient, update_timeout_s: float) -> None:
        self._client = client
        self._update_timeout_s = update_timeout_s
        self._has_extension: dict[str, bool] = {}
        self._met: dict[str, tuple[str, dict[str, Any]]] = {}

    async def order(self, url: str, path: str, body: dict[str, Any] | None) -> object:
        """One order that moves no weights.

        Raises:
            WeightUpdateError: The server has no such route.
            GenerationError: Of the client.
            DeadlineExceeded: It does not answer.
        """
        # A pause that waits takes as long as the calls do.
        seconds = None if "mode=wait" in path else ORDER_TIMEOUT_S
        with deadline(seconds, f"the answer of {url} to {path}"):
            return await self._control(url, path, body)

    async def _control(self, url: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            return await self._client.control(url, path, body)
        except NoRouteError as error:
            raise WeightUpdateError(
                f"{url} has no {path.partition('?')[0]}; start that server with "
                "VLLM_SERVER_DEV_MODE=1, on a network that only you reach: these routes have no "
                "lock of their own"
            ) from error

    async def named_version(self, url: str) -> str:
        """What a server calls the weights that it has."""
        answer = await self.order(url, "/weight_info", None)
        version = answer.get("weight_version") if isinstance(answer, dict) else None
        if not isinstance(version, str):
            raise GenerationTransportError(
                f"{url} does not say which weights it has: {answer!r}; gymrl needs vLLM 0.32 or "
                "later there",
                url=url,
                status=200,
            )
        return version

    async def load(self, url: str, placed: Placed, *, times: int = 1) -> None:
        """Have a paused server load a checkpoint.

        Args:
            url: The server.
            placed: With a directory.
            times: 2 after a load that failed: layers that got a part of their weights then take
                them for parts of the next load, and are whole after the one that follows. A
                server with gymrl's worker extension cleans up at once.

        Raises:
            GenerationError: It could not, or is gone.
            DeadlineExceeded: Of ``vllm.update_timeout_s``.
        """
        directory = placed.directory or ""
        with deadline(
            self._update_timeout_s, f"loading {directory} in {url}", "vllm.update_timeout_s"
        ):
            if self._has_extension.get(url, True):
                try:
                    await self._load(url, "gymrl_load_weights", {"directory": directory})
                except GenerationTransportError as error:
                    if error.status is None or self._has_extension.get(url):
                        raise
                    # The server tells of no other reason; a load that fails is an answer.
                    self._has_extension[url] = False
                else:
                    self._has_extension[url] = True
                    return
            for _ in range(times):
                await self._load(url, "reload_weights", {"weights_path": directory})

    async def _load(self, url: str, method: str, arguments: dict[str, str]) -> None:
        results = await self._rpc(url, method, arguments)
        faults = [str(result) for result in results if result is not None]
        if faults:
            raise WeightUpdateError(f"{url}: {'; '.join(dict.fromkeys(faults))}")

    async def _rpc(self, url: str, method: str, arguments: dict[str, str]) -> list[Any]:
        body = {"method": method, "kwargs": arguments}
        answer = await self._control(url, "/collective_rpc", body)
        return list(answer.get("results", ())) if isinstance(answer, dict) else []

    async def taker(self, url: str) -> Taker:
        """How a server takes what a trainer sends.

        Raises:
            WeightUpdateError: It was started without gymrl's worker extension.
            GenerationError: It can't be asked.
            DeadlineExceeded: It does not answer.
        """
        try:
            with deadline(ORDER_TIMEOUT_S, f"the answer of {url} about its weight transfer"):
                backends = await self._rpc(url, "gymrl_transfer_backend", {})
        except GenerationTransportError as error:
            if error.status is None:
                raise
            raise WeightUpdateError(
                f"{url} takes no weights from a trainer: {error}; start it with "
                f"--worker-extension-cls {WORKER_EXTENSION} and a --weight-transfer-config"
            ) from error
        answer = await self.order(url, "/get_world_size", None)
        num_workers = answer.get("world_size") if isinstance(answer, dict) else None
        return Taker(
            backend=backends[0] if backends else None,
            num_workers=num_workers if isinstance(num_workers, int) else len(backends),
        )

    def has_met(self, url: str, part: TransferWeights) -> bool:
        """Whether a server was last told to meet this trainer, at this place of its group."""
        return self._met.get(url) == part.meeting

    async def meet(self, url: str, part: TransferWeights) -> None:
        """Have a server's workers meet the trainer.

        Raises:
            GenerationError: They could not, or are gone; so for all that follow.
            DeadlineExceeded: Of ``vllm.update_timeout_s``.
        """
        self._met.pop(url, None)
        body = {"init_info": part.init_info}
        await self._with_trainer(url, "/init_weight_transfer_engine", body)
        self._met[url] = part.meeting

    async def begin_transfer(self, url: str) -> None:
        """Have a paused server await weights; a former transfer must be closed."""
        await self._with_trainer(url, "/start_weight_update", {})

    async def receive(self, url: str, update_info: dict[str, Any]) -> None:
        """Have a server take what the trainer sends."""
        await self._with_trainer(url, "/update_weights", {"update_info": update_info})

    async def finish_transfer(self, url: str, version: str) -> None:
        """Have a server serve what it took, and give it its name."""
        await self._with_trainer(url, "/finish_weight_update", {"weight_version": version})
        with deadline(ORDER_TIMEOUT_S, f"the answer of {url}, which is to forget its cache"):
            await self._rpc(url, "gymrl_forget_cache", {})

    async def abandon_transfer(self, url: str) -> bool:
        """Close a transfer that failed.

        Returns:
            Whether the weights that served may be gone.
        """
        with deadline(ORDER_TIMEOUT_S, f"the answer of {url}, which is to abandon a transfer"):
            touched = await self._rpc(url, "gymrl_abandon_transfer", {})
        return any(answer != "False" for answer in touched)

    async def _with_trainer(self, url: str, path: str, body: dict[str, Any]) -> None:
        with deadline(
            self._update_timeout_s, f"the answer of {url} to {path}", "vllm.update_timeout_s"
        ):
            await self._control(url, path, body)

    async def rename(self, url: str, version: str) -> None:
        """Tell a server the version of the weights that it has."""
        await self.order(url, "/update_weight_version", {"new_version": version})

    async def pause(self, url: str, mode: str) -> None:
        """Stop sampling and empty the caches; what is in flight fares as `mode` says."""
        await self.order(url, f"/pause?mode={mode}&clear_cache=true", {})

    async def resume(self, url: str) -> None:
        """Sample again."""
        await self.order(url, "/resume", {})

    async def is_paused(self, url: str) -> bool:
        """Whether a server samples nothing."""
        return await self.order(url, "/is_paused", None) == {"is_paused": True}

    async def root(self, url: str) -> str | None:
        """Where a server loaded its first weights from."""
        return await self._client.model_root(url)

    def forget(self, url: str) -> None:
        """A server may be another one by now."""
        self._has_extension.pop(url, None)
        self._met.pop(url, None)

    def forget_trainers(self) -> None:
        """Whoever sends next is met anew."""
        self._met.clear()


def is_gone(error: GenerationError | DeadlineExceeded) -> bool:
    """Whether a server did not answer, so that nobody knows how far it came."""
    if isinstance(error, GenerationTransportError):
        return error.status is None
    return isinstance(error, DeadlineExceeded)
