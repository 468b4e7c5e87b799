"""The processes behind an engine: one generator and the Gym workers, started and ended together."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anyio

from gymrl.actors import ActorHandle, SpawnOptions, spawn
from gymrl.concurrency import close_within, deadline, gather_bounded
from gymrl.errors import ActorError, DeadlineExceeded, GymrlError, ServerError
from gymrl.gym.shards import PlannedShard, Shard, ShardSet, plan_shards

if TYPE_CHECKING:
    from gymrl.actors import Actor
    from gymrl.config import RolloutConfig

logger = logging.getLogger(__name__)

# No shard can be called so: its name would be refused.
GENERATION = "the generator"
HEALTH_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 30.0


class Fleet:
    """Starts what a configuration asks for, and ends it.

    Args:
        config: Which workers, and how long they may take to start.
        gym: The worker's actor class; None: :class:`gymrl.gym.service.GymService`.
        generation: The generator's actor class; None:
            :class:`gymrl.generation.service.GenerationService`.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        gym: type[Actor] | None = None,
        generation: type[Actor] | None = None,
    ) -> None:
        self._config = config
        self._gym = gym
        self._generation = generation
        self._plan: tuple[PlannedShard, ...] = plan_shards(
            config.gym, config.shards, config.num_workers
        )
        self._handles: dict[str, ActorHandle] = {}
        self._waiting: set[str] = set()
        self._shards: ShardSet[ActorHandle] | None = None
        self._max_model_len: int | None = None

    @property
    def shards(self) -> ShardSet[ActorHandle]:
        """Who serves what.

        Raises:
            RuntimeError: The fleet is not started.
        """
        if self._shards is None:
            raise RuntimeError("the engine is not open: use it inside `async with`")
        return self._shards

    @property
    def max_model_len(self) -> int | None:
        """The generator's context in tokens; None where it is someone else's server."""
        return self._max_model_len

    async def start(self) -> None:
        """Start everything, side by side, under one deadline.

        When anything fails, or this is cancelled, what was started is ended first.

        Raises:
            DeadlineExceeded: Not all was ready within `start_timeout_s`; names what was not.
            GymrlError: What failed to start, its text beginning with who it was.
        """
        if self._handles:
            raise RuntimeError("the engine is open already")
        try:
            await self._start_in_time()
        except BaseException:
            await self.close()
            raise

    async def _start_in_time(self) -> None:
        seconds = self._config.start_timeout_s
        with anyio.move_on_after(seconds):
            return await self._start()
        late = ", ".join(sorted(self._waiting))
        raise DeadlineExceeded(
            f"not ready within {seconds:g} s (set by start_timeout_s): {late}",
            what=late,
            seconds=seconds,
            setting="start_timeout_s",
        )

    async def _start(self) -> None:
        workers = [(label, shard) for shard in self._plan for label in shard.labels]
        gym = self._gym or _gym_service()
        spawns: list[tuple[str, type[Actor], Any]] = [
            (label, gym, shard.config) for label, shard in workers
        ]
        if self._config.generation is not None:
            actor = self._generation or _generation_service()
            spawns.append((GENERATION, actor, self._config.generation))
        self._waiting = {label for label, _, _ in spawns}
        await gather_bounded(self._spawn, spawns)
        base_urls, model = await self._generation_address()
        routes: dict[str, tuple[str, ...]] = {}

        async def spin_up(worker: tuple[str, PlannedShard]) -> None:
            label, shard = worker
            endpoint = await self._ask(label, "spin_up", base_urls, model)
            routes.setdefault(shard.name, tuple(endpoint.routes))
            self._waiting.discard(label)

        await gather_bounded(spin_up, workers)
        self._shards = ShardSet(
            [
                Shard(
                    shard.name, [self._handles[label] for label in shard.labels], routes[shard.name]
                )
                for shard in self._plan
            ]
        )

    async def _spawn(self, item: tuple[str, type[Actor], Any]) -> None:
        label, actor, settings = item
        options = SpawnOptions(name=label, start_timeout_s=self._config.start_timeout_s)
        try:
            self._handles[label] = await spawn(
                actor, in_process=self._config.in_process, options=options, config=settings
            )
        except Exception as error:
            raise _named(label, error) from error

    async def _generation_address(self) -> tuple[list[str], str]:
        gym = self._config.gym
        if self._config.generation is None:
            return list(gym.base_urls), gym.model_name
        endpoint = await self._ask(GENERATION, "start")
        self._waiting.discard(GENERATION)
        self._max_model_len = endpoint.max_model_len
        return [endpoint.base_url], endpoint.model

    async def _ask(self, label: str, method: str, *args: Any) -> Any:
        try:
            return await self._handles[label].call(method, *args)
        except Exception as error:
            raise _named(label, error) from error

    async def health_check(self) -> None:
        """Ask every process, side by side, whether it and its servers are well.

        Raises:
            GymrlError: The first that is not, its text beginning with who it was.
            DeadlineExceeded: One did not answer within thirty seconds.
            RuntimeError: The fleet is not started.
        """
        _ = self.shards

        async def check(label: str) -> None:
            with deadline(HEALTH_TIMEOUT_S, f"the health check of {label}"):
                await self._ask(label, "health_check")

        await gather_bounded(check, list(self._handles))

    async def close(self) -> None:
        """End every process: the Gym workers, then the generator they call. Safe to call twice.

        It is shielded from cancellation and bounded; what goes wrong is logged.
        """
        handles, self._handles, self._shards = self._handles, {}, None
        generation = handles.pop(GENERATION, None)

        async def close_one(item: tuple[str, ActorHandle]) -> None:
            await close_within(item[1].close(), CLOSE_TIMEOUT_S, item[0])

        with anyio.CancelScope(shield=True):
            await gather_bounded(close_one, list(handles.items()))
            if generation is not None:
                await close_one((GENERATION, generation))


def _named(label: str, error: Exception) -> GymrlError:
    """The same error, its text beginning with who raised it."""
    who = label if label == GENERATION else f"gym worker {label!r}"
    if not isinstance(error, GymrlError):
        return ActorError(f"{who}: {type(error).__name__}: {error}", actor=label)
    fields = dict(error.fields)
    if isinstance(error, ServerError):
        fields.setdefault("instance", label)
    return type(error).rebuild(f"{who}: {error}", fields)


def _gym_service() -> type[Actor]:
    from gymrl.gym.service import GymService  # noqa: PLC0415  # loads aiohttp: only where it is used

    service: type[Actor] = GymService
    return service


def _generation_service() -> type[Actor]:
    from gymrl.generation.service import (  # noqa: PLC0415  # loads torch: only where it is used
        GenerationService,
    )

    service: type[Actor] = GenerationService
    return service
