"""Orders to one vLLM server about its weights, over vLLM's development routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gymrl.concurrency import deadline
from gymrl.errors import (
    DeadlineExceeded,
    GenerationError,
    GenerationTransportError,
    WeightUpdateError,
)
from gymrl.generation.vllm_client import NoRouteError

if TYPE_CHECKING:
    from gymrl.generation.vllm_client import VllmClient

UNNAMED = "default"
"""What vLLM calls the weights that a server was started with."""

ORDER_TIMEOUT_S = 30.0
"""Of an order that moves no weights."""


class Placed(NamedTuple):
    """A version of the weights, and the directory that servers read it from; None: not known."""

    directory: str | None
    version: str


class ServerOrders:
    """Gives orders, and says what came of them.

    Args:
        client: Reaches the servers.
        update_timeout_s: Deadline of loading weights.
    """

    def __init__(self, client: VllmClient, update_timeout_s: float) -> None:
        self._client = client
        self._update_timeout_s = update_timeout_s
        self._has_extension: dict[str, bool] = {}

    async def order(self, url: str, path: str, body: dict[str, object] | None) -> object:
        """One order that moves no weights.

        Raises:
            WeightUpdateError: The server has no such route.
            GenerationError: Of the client.
            DeadlineExceeded: It does not answer.
        """
        # A pause that waits takes as long as the calls do.
        seconds = None if "mode=wait" in path else ORDER_TIMEOUT_S
        try:
            with deadline(seconds, f"the answer of {url} to {path}"):
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
                    await self._rpc(url, "gymrl_load_weights", {"directory": directory})
                except GenerationTransportError as error:
                    if error.status is None or self._has_extension.get(url):
                        raise
                    # The server tells of no other reason; a load that fails is an answer.
                    self._has_extension[url] = False
                else:
                    self._has_extension[url] = True
                    return
            for _ in range(times):
                await self._rpc(url, "reload_weights", {"weights_path": directory})

    async def _rpc(self, url: str, method: str, arguments: dict[str, str]) -> None:
        body = {"method": method, "kwargs": arguments}
        try:
            answer = await self._client.control(url, "/collective_rpc", body)
        except NoRouteError as error:
            raise WeightUpdateError(f"{url} has no /collective_rpc: {error}") from error
        results = answer.get("results", []) if isinstance(answer, dict) else []
        faults = [str(result) for result in results if result is not None]
        if faults:
            raise WeightUpdateError(f"{url}: {'; '.join(dict.fromkeys(faults))}")

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


def is_gone(error: GenerationError | DeadlineExceeded) -> bool:
    """Whether a server did not answer, so that nobody knows how far it came."""
    if isinstance(error, GenerationTransportError):
        return error.status is None
    return isinstance(error, DeadlineExceeded)
