"""A whole run: generation, shards of Gym workers, failures, scoring."""

from __future__ import annotations

from typing import Literal

import msgspec

from gymrl.config.generation import GenerationConfig  # noqa: TC001 - msgspec reads annotations
from gymrl.config.gym import GymConfig  # noqa: TC001 - msgspec reads annotations
from gymrl.config.sampling import SamplingParams
from gymrl.settings import Config, require

FailurePolicy = Literal["raise", "mask", "drop_group"]


class ShardConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named slice of the Gym servers that has workers of its own.

    Attributes:
        servers: Instances of `gym.servers` that live here. Model servers need not be listed:
            every shard has its own copy of them.
        replicas: Workers that each run the slice; whole groups take turns over them.
    """

    servers: tuple[str, ...]
    replicas: int = 1

    def __post_init__(self) -> None:
        require(bool(self.servers), "servers", self.servers, "a shard needs at least one server")
        require(self.replicas > 0, "replicas", self.replicas, "must be positive")


class RolloutConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rollout engine: who generates, how many Gym workers, what a failed row means.

    Attributes:
        generation: The embedded generator; None when `gym.base_urls` names servers, or
            `gym.registry_url` names Gym servers that know their policy.
        gym: Every Gym worker's configuration.
        num_workers: Gym workers (replicas); whole groups take turns over them.
        shards: Slices of `gym.servers` by name, each with its own workers. Empty: one slice,
            `num_workers` replicas.
        in_process: Everything in this process, so that breakpoints stop.
        sampling: Of training rollouts; a call may pass another.
        failure_policy: ``raise`` ends the run at the first failed row; ``mask`` keeps the failure
            in its group's place; ``drop_group`` leaves the group out and counts it.
        seed: Row seeds derive from it, the task index and the rollout index; None: unseeded.
        start_timeout_s: Deadline for workers and servers to be ready, all together.
        no_progress_timeout_s: Longest silence of the whole stream; None: no watchdog.
        group_timeout_s: Deadline of a group, from the moment the stream begins, the consumer's own
            time not counted. Then the group's unfinished rows are timeouts and `failure_policy`
            decides. None: none.
        max_infra_attempts: Dispatches of a row whose failures are the fleet's, the first included;
            a row that spends them ends the run. Connections that were refused have as many of
            their own.
        max_data_attempts: Dispatches of a row whose failures are its own, the first included;
            then `failure_policy` decides.
        retry_delay_s: Pause before a row that failed by the fleet's fault is dispatched again;
            doubles each time up to 30 s, jittered. A server's ``Retry-After`` makes it longer.
        worker_restarts: Deaths of worker processes that are answered with a restart. Workers that
            die together cost one, and a restarted worker that finishes a row gives back what its
            deaths have cost. 0: the first death ends the run.
        heartbeat_timeout_s: A worker process that lives, but whose event loop shows nothing for so
            long (it is stopped, or stuck in a call that blocks), is killed and counts as dead. One
            that computes is given four times as long. None: it is waited for.
    """

    generation: GenerationConfig | None = None
    gym: GymConfig
    num_workers: int = 1
    shards: dict[str, ShardConfig] = msgspec.field(default_factory=dict)
    in_process: bool = False
    sampling: SamplingParams = SamplingParams()
    failure_policy: FailurePolicy = "raise"
    seed: int | None = None
    start_timeout_s: float = 300.0
    no_progress_timeout_s: float | None = None
    group_timeout_s: float | None = None
    max_infra_attempts: int = 5
    max_data_attempts: int = 2
    retry_delay_s: float = 0.5
    worker_restarts: int = 3
    heartbeat_timeout_s: float | None = 300.0

    def __post_init__(self) -> None:
        require(self.num_workers > 0, "num_workers", self.num_workers, "must be positive")
        require(
            (self.generation is None) == bool(self.gym.base_urls)
            or (self.generation is None and self.gym.registry_url is not None),
            "generation",
            self.generation,
            "give either a generation block or gym.base_urls of servers that run",
        )
        require(
            self.gym.api_key_env is None or bool(self.gym.base_urls),
            "gym.api_key_env",
            self.gym.api_key_env,
            "is for the policy servers of gym.base_urls; servers behind a generation block have "
            "generation.vllm.api_key_env",
        )
        if self.generation is not None:
            _check_router_replay(self.generation, self.gym)
        require(
            not (self.in_process and self.num_workers > 1),
            "in_process",
            self.in_process,
            "one process has one worker: set num_workers to 1",
        )
        require(
            self.start_timeout_s > 0, "start_timeout_s", self.start_timeout_s, "must be positive"
        )
        require(
            not self.shards or self.num_workers == 1,
            "num_workers",
            self.num_workers,
            "with shards, set each shard's replicas instead",
        )
        require(
            not (self.in_process and sum(s.replicas for s in self.shards.values()) > 1),
            "in_process",
            self.in_process,
            "one process has one worker: use one shard with one replica",
        )
        for setting in ("no_progress_timeout_s", "group_timeout_s", "heartbeat_timeout_s"):
            seconds = getattr(self, setting)
            require(
                seconds is None or seconds > 0, setting, seconds, "must be positive, or left out"
            )
        require(
            self.worker_restarts >= 0,
            "worker_restarts",
            self.worker_restarts,
            "must not be negative; 0 restarts nothing",
        )
        require(
            self.retry_delay_s >= 0, "retry_delay_s", self.retry_delay_s, "must not be negative"
        )
        for setting in ("max_infra_attempts", "max_data_attempts"):
            value = getattr(self, setting)
            require(value > 0, setting, value, "must be positive; 1 never dispatches again")


def _check_router_replay(generation: GenerationConfig, gym: GymConfig) -> None:
    require(
        generation.return_routed_experts or not gym.require_routed_experts,
        "generation.return_routed_experts",
        generation.return_routed_experts,
        "gym.require_routed_experts needs it: set it to true",
    )
    require(
        not (generation.return_routed_experts and gym.on_broken_prefix == "truncate"),
        "gym.on_broken_prefix",
        gym.on_broken_prefix,
        "router replay needs every turn; use 'error', or leave "
        "generation.return_routed_experts out",
    )
