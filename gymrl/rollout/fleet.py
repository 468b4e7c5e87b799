"""The processes behind an engine: one generator and the Gym workers, started and ended together.

One that dies is started again, within a budget, while the others go on. A Gym worker gets its
tokenizer and its servers anew; the generator its model, the weights that it was given last, and the
port that it had, so that the address which agents know stays good.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import msgspec

from gymrl.actors import RestartPolicy, SpawnOptions, spawn
from gymrl.concurrency import close_within, deadline, gather_bounded, run_to_end
from gymrl.errors import (
    ActorDiedError,
    ActorError,
    DeadlineExceeded,
    GymrlError,
    ServerError,
    UnsupportedOptionError,
)
from gymrl.generation.weights import TransferWeights
from gymrl.gym.shards import PlannedShard, Shard, ShardSet, plan_shards
from gymrl.rollout.instance import Instance
from gymrl.rollout.restarts import Restarts

if TYPE_CHECKING:
    from gymrl.actors import Actor, ActorHandle
    from gymrl.config import GenerationConfig, GymConfig, RolloutConfig
    from gymrl.generation.weights import PauseMode, WeightSource

# No shard can be called so: its name would be refused.
GENERATION = "the generator"
HEALTH_TIMEOUT_S = 30.0
# Rows that a worker may have sent unread. A turn of its loop may complete hundreds at once; what
# the window holds back waits for the next turn.
_STREAM_WINDOW = 512
CLOSE_TIMEOUT_S = 60.0


class Fleet:
    """Starts what a configuration asks for, keeps it running, and ends it.

    Args:
        config: Which workers, and how long they may take to start.
        gym: The worker's actor class; None: :class:`gymrl.gym.service.GymService`.
        generation: The generator's actor class; None:
            :class:`gymrl.generation.service.GenerationService`.
        policy: What happens when processes die; None: `RestartPolicy` with the configuration's
            `worker_restarts`. Its rules about calls have no meaning here.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        gym: type[Actor] | None = None,
        generation: type[Actor] | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._config = config
        self._gym = gym
        self._generation = generation
        self._plan: tuple[PlannedShard, ...] = plan_shards(
            config.gym, config.shards, config.num_workers
        )
        self._policy = policy or RestartPolicy(restarts=config.worker_restarts)
        self._instances: dict[str, Instance] = {}
        self._generation_config: GenerationConfig | None = config.generation
        self._weights: tuple[WeightSource, str] | None = None
        self._updating = anyio.Lock()
        self._waiting: set[str] = set()
        self._shards: ShardSet[Instance] | None = None
        self._max_model_len: int | None = None

    @property
    def shards(self) -> ShardSet[Instance]:
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

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Every process: the Gym workers, and the generator where there is one."""
        return tuple(self._instances.values())

    async def start(self) -> None:
        """Start everything, side by side, under one deadline.

        When anything fails, or this is cancelled, what was started is ended first.

        Raises:
            DeadlineExceeded: Not all was ready within `start_timeout_s`; names what was not.
            GymrlError: What failed to start, its text beginning with who it was.
        """
        if self._instances:
            raise RuntimeError("the engine is open already")
        self._make_instances()
        try:
            await self._start_in_time()
        except BaseException:
            await run_to_end(self.close(), "a fleet that did not start")
            raise

    def _make_instances(self) -> None:
        restarts = Restarts(self._policy)
        seconds = self._config.start_timeout_s
        generator = None
        self._generation_config = self._config.generation
        if self._config.generation is not None:
            generator = Instance(
                GENERATION,
                self._open_generator,
                self._start_generator,
                restarts,
                start_timeout_s=seconds,
            )
        for shard in self._plan:
            for label in shard.labels:
                self._instances[label] = Instance(
                    label,
                    functools.partial(self._open_gym, label, shard.config),
                    functools.partial(self._spin_up, label),
                    restarts,
                    start_timeout_s=seconds,
                    needs=generator,
                )
        if generator is not None:
            self._instances[GENERATION] = generator

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
        self._waiting = set(self._instances)
        await gather_bounded(lambda instance: instance.open(), self.instances)
        if GENERATION in self._instances:
            await self._prepare(GENERATION)
        workers = [label for shard in self._plan for label in shard.labels]
        await gather_bounded(self._prepare, workers)
        # With a deferred model the environments have started meanwhile; now it must be there.
        await self._until_loaded(self._instances.get(GENERATION))
        self._shards = ShardSet([self._started(shard) for shard in self._plan])

    async def _prepare(self, label: str) -> None:
        await self._instances[label].prepare()
        self._waiting.discard(label)

    def _started(self, shard: PlannedShard) -> Shard[Instance]:
        replicas = [self._instances[label] for label in shard.labels]
        return Shard(shard.name, replicas, replicas[0].endpoint.routes)

    # --- how one is started, and started again -----------------------------------------------------

    async def _open_gym(self, label: str, config: GymConfig) -> ActorHandle:
        return await self._spawn(label, self._gym or _gym_service(), config)

    async def _spin_up(self, label: str, worker: ActorHandle) -> Any:
        base_urls, model = list(self._config.gym.base_urls), self._config.gym.model_name
        generator = self._instances.get(GENERATION)
        if generator is not None:
            base_urls, model = [generator.endpoint.base_url], generator.endpoint.model
        return await _asked(label, worker, "spin_up", base_urls, model)

    async def _open_generator(self) -> ActorHandle:
        actor = self._generation or _generation_service()
        return await self._spawn(GENERATION, actor, self._generation_config)

    async def _start_generator(self, worker: ActorHandle) -> Any:
        if self._weights is not None:
            await self._restore_weights(worker, *self._weights)
        endpoint = await _asked(GENERATION, worker, "start")
        self._max_model_len = endpoint.max_model_len
        if self._generation_config is not None:
            # Agents know this address: one that is started again takes the same port.
            port = urlsplit(endpoint.base_url).port or self._generation_config.port
            self._generation_config = msgspec.structs.replace(self._generation_config, port=port)
        if self._shards is not None:  # started again: nothing else is starting meanwhile
            await self._until_loaded(worker)
        return endpoint

    async def _restore_weights(
        self, worker: ActorHandle, source: WeightSource, version: str
    ) -> None:
        if isinstance(source, TransferWeights):
            # The trainer has sent them once.
            await _asked(GENERATION, worker, "adopt_weights", version)
        else:
            await _asked(GENERATION, worker, "update_weights", source, version)

    async def _until_loaded(self, generator: ActorHandle | None) -> None:
        config = self._generation_config
        if generator is not None and config is not None and config.defer_loading:
            await _asked(GENERATION, generator, "wait_ready")

    async def _spawn(self, label: str, actor: type[Actor], settings: Any) -> ActorHandle:
        options = SpawnOptions(
            name=label,
            start_timeout_s=self._config.start_timeout_s,
            stream_window=_STREAM_WINDOW,
            heartbeat_timeout_s=self._config.heartbeat_timeout_s,
        )
        try:
            return await spawn(
                actor, in_process=self._config.in_process, options=options, config=settings
            )
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
            instance = self._instances[label]
            instance.check_running()
            with deadline(HEALTH_TIMEOUT_S, f"the health check of {label}"):
                await _asked(label, instance, "health_check")

        await gather_bounded(check, list(self._instances))

    def _own_generator(self, asked: str) -> Instance:
        generator = self._instances.get(GENERATION)
        if generator is None:
            raise UnsupportedOptionError(
                f"{asked}: the generator is somebody else's server (gym.base_urls); "
                "update it there",
                setting="generation",
            )
        return generator

    async def weight_takers(self) -> list[str]:
        """See :meth:`RolloutEngine.weight_takers`."""
        takers: list[str] = await self._own_generator("weight_takers").call("weight_takers")
        return takers

    async def update_weights(
        self, source: WeightSource, version: str, pause: PauseMode = "keep"
    ) -> None:
        """Hand new weights to the generator; see :meth:`RolloutEngine.update_weights`."""
        generator = self._own_generator("update_weights")
        async with self._updating:
            if isinstance(source, TransferWeights):
                await generator.call("update_weights", source, version, pause)
                self._weights = (source, version)
                return
            former, self._weights = self._weights, (source, version)
            try:
                while True:
                    try:
                        await generator.call("update_weights", source, version, pause)
                    except ActorDiedError:
                        continue  # the next one starts with them, and is asked to make sure
                    return
            except BaseException:
                self._weights = former
                raise

    async def close(self) -> None:
        """End every process: the Gym workers, then the generator they call. Safe to call twice.

        It is bounded, and ends every process also when the caller is cancelled meanwhile; what goes
        wrong is logged.
        """
        await run_to_end(self._close(), "fleet")

    async def _close(self) -> None:
        instances, self._instances, self._shards = self._instances, {}, None
        self._weights = None
        generator = instances.pop(GENERATION, None)

        async def close_one(instance: Instance) -> None:
            await close_within(instance.close(), CLOSE_TIMEOUT_S, instance.name)

        await gather_bounded(close_one, list(instances.values()))
        if generator is not None:
            await close_one(generator)


async def _asked(label: str, worker: ActorHandle, method: str, *args: Any) -> Any:
    try:
        return await worker.call(method, *args)
    except Exception as error:
        raise _named(label, error) from error


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
