"""An engine of vLLM, or its servers."""

from __future__ import annotations

from typing import Any

import msgspec

from gymrl.config.checks import require_urls, require_variable
from gymrl.settings import Config, require


class VllmConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM behind a generator: an engine of this process, or servers that run elsewhere.

    Attributes:
        base_urls: vLLM servers, with or without ``/v1``; calls go to the one with the fewest in
            flight. Empty: an engine is started in this process.
        rank: Place among the engines of this node, from 0. Without `devices`, rank r takes GPUs
            ``r * tensor_parallel_size`` and following.
        tensor_parallel_size: GPUs an engine.
        devices: GPUs by index, of those the process may see; empty: chosen by `rank`.
        kv_cache_bytes: Memory of the key-value cache. None: 256 MiB on a CPU, vLLM's own choice
            on a GPU.
        enforce_eager: No compilation, no CUDA graphs. None: only on a CPU.
        engine_args: Further fields of vLLM's ``AsyncEngineArgs``, as they are.
        request_timeout_s: Deadline of one call to a server; None: none.
        probe_interval_s: Seconds between two looks at a server that is out.
        api_key_env: The environment variable, of the process that calls the servers, which holds
            the key that they ask for; it is sent as ``Authorization: Bearer``. The key itself is
            in no configuration, record or log. None: no key.
        update_servers: ``update_weights`` may exchange the weights of the servers in `base_urls`,
            for everybody who calls them; they must run with ``VLLM_SERVER_DEV_MODE=1``.
        update_timeout_s: Deadline of loading weights in one of them, of each step of a transfer to
            one, which is then left out, and of what an engine of this process does together with a
            trainer that sends weights; the engine is ended then.
    """

    base_urls: tuple[str, ...] = ()
    rank: int = 0
    tensor_parallel_size: int = 1
    devices: tuple[int, ...] = ()
    kv_cache_bytes: int | None = None
    enforce_eager: bool | None = None
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    request_timeout_s: float | None = None
    probe_interval_s: float = 5.0
    api_key_env: str | None = None
    update_servers: bool = False
    update_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        require_variable("vllm.api_key_env", self.api_key_env)
        require_urls("vllm.base_urls", self.base_urls)
        require(self.rank >= 0, "vllm.rank", self.rank, "must be 0 or more")
        require(
            self.tensor_parallel_size > 0,
            "vllm.tensor_parallel_size",
            self.tensor_parallel_size,
            "must be positive",
        )
        require(
            len(self.devices) in (0, self.tensor_parallel_size),
            "vllm.devices",
            self.devices,
            f"name as many as tensor_parallel_size={self.tensor_parallel_size}, or none",
        )
        require(
            self.kv_cache_bytes is None or self.kv_cache_bytes > 0,
            "vllm.kv_cache_bytes",
            self.kv_cache_bytes,
            "must be positive, or left out",
        )
        require(
            self.request_timeout_s is None or self.request_timeout_s > 0,
            "vllm.request_timeout_s",
            self.request_timeout_s,
            "must be positive, or left out",
        )
        require(
            self.probe_interval_s > 0,
            "vllm.probe_interval_s",
            self.probe_interval_s,
            "must be positive",
        )
        require(
            self.update_timeout_s > 0,
            "vllm.update_timeout_s",
            self.update_timeout_s,
            "must be positive",
        )
        require(
            not self.update_servers or bool(self.base_urls),
            "vllm.update_servers",
            self.update_servers,
            "is for servers named by vllm.base_urls; an engine of this process always takes weights",
        )
