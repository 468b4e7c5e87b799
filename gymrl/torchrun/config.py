"""What a torchrun-launched job needs beside the rollouts' own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymrl.config import Config, RolloutConfig, require
from gymrl.errors import ConfigError
from gymrl.generation.weight_transfer import BACKENDS, Transfer


class PerNode(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Worker processes of one node.

    Attributes:
        generators: Generators. A vLLM engine gets its place among them as its `rank`, and so its
            GPUs.
        gym_workers: Gym workers (replicas of each shard); they share the node's generators out
            among themselves, so there must be a whole number of them a generator.
    """

    generators: int = 1
    gym_workers: int = 1

    def __post_init__(self) -> None:
        require(self.generators > 0, "per_node.generators", self.generators, "must be positive")
        require(
            self.gym_workers > 0 and self.gym_workers % self.generators == 0,
            "per_node.gym_workers",
            self.gym_workers,
            f"must be a positive multiple of per_node.generators={self.generators}",
        )


class TorchrunConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rollouts over the ranks of a job.

    Attributes:
        rollout: The engine's configuration. Its `num_workers` must be 1: `per_node` says how many
            there are.
        per_node: What each node runs.
        weight_transfer: How new weights reach vLLM engines that the job starts: ``gloo``, ``nccl``
            or ``ipc`` (see :mod:`gymrl.generation.weight_transfer`), tensor by tensor, from each
            node's local rank 0. The engines are started for it. None: as copies of the whole model
            in each node's memory, for any generator.
        address: This node's address, for links between nodes; None: the one from which
            ``MASTER_ADDR`` is reached. Loopback where there is one node.
        heartbeat_timeout_s: A rank that shows nothing for so long is gone, and the job ends.
        transfer_timeout_s: Deadline of moving a step's tokens to the ranks, of gathering the
            parameters, of any collective in the groups that are made here, and, with
            `weight_transfer`, of trainer and engines waiting for each other.
        collect_timeout_s: Deadline of one :meth:`~gymrl.torchrun.session.Rollouts.collect`, the time in
            which rank 0 generates included; None: the rollouts' own deadlines alone.
        barrier_timeout_s: How long ranks wait for each other at a weight update and at the end of
            the block.
        close_timeout_s: Deadline for ending one worker.
    """

    rollout: RolloutConfig
    per_node: PerNode = PerNode()
    weight_transfer: Transfer | None = None
    address: str | None = None
    heartbeat_timeout_s: float = 20.0
    transfer_timeout_s: float = 300.0
    collect_timeout_s: float | None = None
    barrier_timeout_s: float = 1800.0
    close_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.rollout.num_workers != 1:
            raise ConfigError(
                f"rollout.num_workers={self.rollout.num_workers}: set per_node.gym_workers instead",
                setting="rollout.num_workers",
            )
        if self.rollout.in_process and self.per_node != PerNode():
            raise ConfigError(
                "rollout.in_process: one process has one generator and one worker; "
                "leave per_node out",
                setting="rollout.in_process",
            )
        if self.weight_transfer is not None:
            self._check_transfer(self.weight_transfer)
        for setting in (
            "heartbeat_timeout_s",
            "transfer_timeout_s",
            "barrier_timeout_s",
            "close_timeout_s",
        ):
            value = getattr(self, setting)
            require(value > 0, setting, value, "must be positive")
        require(
            self.collect_timeout_s is None or self.collect_timeout_s > 0,
            "collect_timeout_s",
            self.collect_timeout_s,
            "must be positive, or left out",
        )

    def _check_transfer(self, transfer: Transfer) -> None:
        generation = self.rollout.generation
        if generation is None or generation.backend != "vllm" or generation.vllm.base_urls:
            raise ConfigError(
                f"weight_transfer={transfer!r}: only vLLM engines that the job starts take weights "
                "so; set rollout.generation.backend: vllm, without vllm.base_urls, or leave it out",
                setting="weight_transfer",
            )
        transfer_arguments(transfer, generation.vllm.engine_args)


def transfer_arguments(transfer: Transfer, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's arguments, with what it needs for taking weights by a transfer.

    Raises:
        ConfigError: They ask for another one.
    """
    name = "weight_transfer_config"
    given, backend = engine_args.get(name) or {}, BACKENDS[transfer]
    if not isinstance(given, Mapping) or given.get("backend", backend) != backend:
        raise ConfigError(
            f"vllm.engine_args.{name}={given!r} contradicts weight_transfer={transfer!r}, which "
            f"sets its backend to {backend!r}; leave one of the two out",
            setting=f"vllm.engine_args.{name}",
        )
    return {**engine_args, name: {**given, "backend": backend}}
