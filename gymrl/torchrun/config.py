"""What a torchrun-launched job needs beside the rollouts' own configuration."""

from __future__ import annotations

from gymrl.config import Config, RolloutConfig, require
from gymrl.errors import ConfigError


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
        address: This node's address, for links between nodes; None: the one from which
            ``MASTER_ADDR`` is reached. Loopback where there is one node.
        heartbeat_timeout_s: A rank that shows nothing for so long is gone, and the job ends.
        transfer_timeout_s: Deadline of moving a step's tokens to the ranks, of gathering the
            parameters, and of any collective in the groups that are made here.
        collect_timeout_s: Deadline of one :meth:`~gymrl.torchrun.session.Rollouts.collect`, the time in
            which rank 0 generates included; None: the rollouts' own deadlines alone.
        barrier_timeout_s: How long ranks wait for each other at a weight update and at the end of
            the block.
        close_timeout_s: Deadline for ending one worker.
    """

    rollout: RolloutConfig
    per_node: PerNode = PerNode()
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
