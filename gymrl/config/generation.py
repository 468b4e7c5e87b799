"""The policy: which model, on which backend, served how."""

from __future__ import annotations

from typing import Literal

from gymrl.config.media import MediaConfig
from gymrl.config.vllm import VllmConfig
from gymrl.settings import Config, require

LogprobsMode = Literal["processed", "raw"]

RoutesDtype = Literal["int8", "int16", "int32"]


class GenerationConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One embedded generator and the HTTP server in front of it.

    Attributes:
        model: A directory, a hub id, or ``smollm2``.
        backend: ``transformers``, or ``vllm`` where it is installed.
        vllm: Settings of that backend.
        defer_loading: Give out the URL at once and load the model behind it; until it is there,
            ``/health`` and calls get HTTP 503.
        served_model_name: What ``/v1/models`` says and requests may name.
        dtype: Of the weights: ``float32``, ``bfloat16``, ``float16``; ``auto`` is the checkpoint's.
        device: ``auto`` takes a GPU when there is one.
        max_batch_size: Sequences decoded together. 1 makes tokens independent of load.
        max_model_len: Context in tokens; None is the model's own, or that of `vllm.base_urls`.
        num_threads: Torch's intra-op threads; None is torch's default.
        logprobs_mode: ``processed``: of the sampling distribution (after temperature and top-p,
            top-k). ``raw``: of the model's own, at temperature 1.
        tool_parser: ``hermes``, ``llama_json``, ``none``, or the name of a tool parser of vLLM's where
            that is installed; ``auto`` reads it off the template.
        reasoning_parser: ``think``, ``none``, or the name of a reasoning parser of vLLM's; ``auto``
            reads it off the template.
        on_rewrite: When the template rewrites history: ``error``, or start a new ``segment``.
        host: Address the server listens on.
        port: 0 takes a free one.
        max_body_bytes: Larger request bodies get HTTP 413.
        media: Where images of requests may come from, and how large and how many they may be.
        ledger_max_bytes: Memory for what was served to rollouts that name themselves; the one that
            was quiet the longest is evicted first. 0 keeps nothing.
        ledger_max_age_s: A rollout that was quiet for so long is evicted.
        return_routed_experts: Of a mixture-of-experts model, return with every call the experts
            that each token went through (:mod:`gymrl.routed_experts`).
    """

    model: str
    backend: Literal["transformers", "vllm"] = "transformers"
    vllm: VllmConfig = VllmConfig()
    defer_loading: bool = False
    served_model_name: str = "policy"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_batch_size: int = 16
    max_model_len: int | None = None
    num_threads: int | None = None
    logprobs_mode: LogprobsMode = "processed"
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    on_rewrite: Literal["error", "segment"] = "error"
    host: str = "127.0.0.1"
    port: int = 0
    max_body_bytes: int = 256 << 20
    media: MediaConfig = MediaConfig()
    ledger_max_bytes: int = 256 << 20
    ledger_max_age_s: float = 7200.0
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        require(self.ledger_max_bytes >= 0, "ledger_max_bytes", self.ledger_max_bytes, "0 or more")
        require(
            self.ledger_max_age_s > 0, "ledger_max_age_s", self.ledger_max_age_s, "must be positive"
        )
        require(
            self.backend == "vllm" or not self.vllm.base_urls,
            "vllm.base_urls",
            list(self.vllm.base_urls),
            f"backend={self.backend!r} loads the model itself and asks no server; set backend: vllm",
        )
        require(bool(self.model), "model", self.model, "name a directory, a hub id or smollm2")
        require(self.max_batch_size > 0, "max_batch_size", self.max_batch_size, "must be positive")
        require(
            self.max_model_len is None or self.max_model_len > 0,
            "max_model_len",
            self.max_model_len,
            "must be positive, or left out",
        )
        require(
            self.num_threads is None or self.num_threads > 0,
            "num_threads",
            self.num_threads,
            "must be positive, or left out",
        )
        require(0 <= self.port < 65536, "port", self.port, "must be a port, or 0 for a free one")
