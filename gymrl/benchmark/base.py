"""What a benchmark is, and the pieces every shipped one is made of."""

from __future__ import annotations

import contextlib
import hashlib
import random
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gymrl.config import SamplingParams
from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

POLICY_MODEL = "policy_model"
"""The name under which Gym configurations speak of the model that is trained."""


class Benchmark(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks, and the servers that let a model attempt them and grade what it did.

    Attributes:
        name: As it was asked for.
        description: One line.
        rows: One dataset row a task, as plain data: ``task_id``, ``task_source``,
            ``responses_create_params`` and what the verifier needs. JSON can carry every row.
        servers: Server instances in Gym's own shape,
            ``{instance: {type: {impl: {entrypoint, ...}}}}``; fits ``GymConfig.servers``.
        sampling: What its tasks are meant to be sampled with, where the caller has no opinion.
        token_source: Where its agent's tokens come from; fits ``GymConfig.token_source``.
        group_size: Attempts at a task that its verifier compares with each other, and so waits for:
            there must be a multiple of them.
    """

    name: str
    description: str
    rows: tuple[dict[str, Any], ...]
    servers: dict[str, Any]
    sampling: SamplingParams = SamplingParams()
    token_source: Literal["messages", "ledger"] = "messages"
    group_size: int = 1


def instance_name(benchmark: str) -> str:
    """The server instance of a benchmark: its name, safe in a URL and a configuration key."""
    return benchmark.replace("/", "_")


def task_id(benchmark: str, seed: int, index: int) -> str:
    """The stable id of a task: the same for the same benchmark, seed and place."""
    return f"{instance_name(benchmark)}-s{seed}-{index:05d}"


def generator_seed(benchmark: str, seed: int) -> int:
    """A 31-bit seed for task generators, far from that of any other seed.

    Generators commonly draw task `i` from ``seed + i``; fed with 0 and 1 they would give two sets
    that share all tasks but one.
    """
    digest = hashlib.sha256(f"{benchmark}:{seed}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


@contextlib.contextmanager
def global_random(seed: int) -> Iterator[None]:
    """Seed Python's global generator for the block and put its state back after.

    For task generators of others that draw from it.
    """
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def simple_agent_servers(
    instance: str, impl: str, resources: dict[str, Any], max_steps: int
) -> dict[str, Any]:
    """A resources server and the agent in front of it, in Gym's shape.

    Args:
        instance: Name of the resources server; the agent is ``<instance>_simple_agent``.
        impl: Implementation name of the resources server.
        resources: Its settings, ``entrypoint`` among them.
        max_steps: Model calls the agent makes at most.
    """
    agent = {
        "entrypoint": "gymrl.gym.embedded.simple_agent:SimpleAgent",
        "resources_server": {"type": "resources_servers", "name": instance},
        "model_server": {"type": "responses_api_models", "name": POLICY_MODEL},
        "max_steps": max_steps,
    }
    return {
        instance: {"resources_servers": {impl: resources}},
        f"{instance}_simple_agent": {"responses_api_agents": {"simple_agent": agent}},
    }


def require_count(num_tasks: int) -> None:
    """Refuse a number of tasks that is not positive."""
    if num_tasks <= 0:
        raise ConfigError(f"num_tasks={num_tasks}: must be positive", setting="num_tasks")


def refuse_unknown_params(benchmark: str, params: dict[str, Any], known: list[str]) -> None:
    """Refuse parameters outside `known`, with the list of those."""
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise ConfigError(
            f"benchmark {benchmark!r} has no parameter {unknown[0]!r}; "
            f"it has: {', '.join(sorted(known))}",
            setting=unknown[0],
        )
