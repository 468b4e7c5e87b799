"""Digests by which a run and its tasks are recognised when a run is continued."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from gymrl.config import RolloutConfig

# Settings that change where and how fast a run goes, but not what it would give.
_PLACEMENT = {
    "": ("num_workers", "shards", "in_process", "start_timeout_s", "no_progress_timeout_s"),
    "generation": ("host", "port", "num_threads", "max_body_bytes"),
    "gym": (
        "host",
        "port_range_low",
        "port_range_high",
        "max_connections",
        "spinup_timeout_s",
        "api_key_env",
    ),
}
# Stamped on a row by a run; not part of the task.
_STAMPED_PARAMS = ("temperature", "top_p", "max_output_tokens")
_ROUTING = ("agent_ref", "task_source", "skills_ref", "_rowidx")


def config_digest(config: RolloutConfig) -> str:
    """``sha256:`` of the settings that decide what a run gives.

    Workers, shards, ports, hosts and start-up deadlines may change between a run and its
    continuation.
    """
    settings = config.to_dict()
    for block, names in _PLACEMENT.items():
        part = settings.get(block) if block else settings
        if part is not None:
            for name in names:
                del part[name]
    return _digest(settings)


def task_digest(body: bytes) -> str:
    """``sha256:`` of a row's task: its body without routing, indices and what a run stamps."""
    task = {
        name: value
        for name, value in msgspec.json.decode(body).items()
        if name not in _ROUTING and not name.startswith("_ng_")
    }
    params = task.get("responses_create_params")
    if isinstance(params, dict):
        kept = {name: value for name, value in params.items() if name not in _STAMPED_PARAMS}
        if isinstance(kept.get("metadata"), dict):
            kept["metadata"] = {k: v for k, v in kept["metadata"].items() if k != "extra_body"}
        if not kept.get("metadata"):
            kept.pop("metadata", None)
        task["responses_create_params"] = kept
    return _digest(task)


def _digest(value: Any) -> str:
    canonical = msgspec.json.encode(value, order="deterministic")
    return f"sha256:{hashlib.sha256(canonical).hexdigest()}"
