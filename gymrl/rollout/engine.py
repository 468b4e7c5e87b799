"""``RolloutEngine``: dataset rows in, groups of scored trajectories out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Self

from gymrl.concurrency import run_to_end
from gymrl.rollout.fleet import Fleet
from gymrl.rollout.prepare import GroupSizes, prepare_rows, repeat_rows
from gymrl.rollout.progress import Progress
from gymrl.rollout.run import Batch, Run
from gymrl.scoring import ScoringConfig, resolve_scoring
from gymrl.types import RolloutGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gymrl.config import RolloutConfig, SamplingParams
    from gymrl.generation.weights import PauseMode, WeightSource
    from gymrl.rollout.progress import RolloutObserver
    from gymrl.scoring import ScoringWarning
    from gymrl.types import RowResult

logger = logging.getLogger(__name__)


class RolloutStream(AsyncGenerator[RolloutGroup, None]):
    """The groups of one batch, in completion order.

    Iterate it once; leaving early (:meth:`aclose`, or cancellation of the consumer) ends
    everything in flight.

    Attributes:
        progress: Counters of this stream alone. Its `timings` are there when the last row has
            come, also where the failure policy drops the group that would have carried them;
            `progress.metrics()` counts what went wrong, in dropped groups too.
    """

    def __init__(self, batch: Batch, groups: AsyncGenerator[RolloutGroup, None]) -> None:
        self.progress = batch.progress
        self._groups = groups
        self._readers = 0

    @property
    def is_being_read(self) -> bool:
        """Whether somebody waits for its next group; it can't be closed then, only cancelled."""
        return self._readers > 0

    async def asend(self, value: None) -> RolloutGroup:
        """The next group; `value` has no meaning."""
        self._readers += 1
        try:
            return await self._groups.asend(value)
        finally:
            self._readers -= 1

    async def athrow(self, *error: Any) -> RolloutGroup:
        """End what is in flight, and raise."""
        return await self._groups.athrow(*error)

    async def aclose(self) -> None:
        """End what is in flight, and wait for that. Safe to call twice."""
        await self._groups.aclose()


class RolloutEngine:
    """Starts the generator and the Gym workers, and runs rows through them.

    ::

        async with RolloutEngine(config) as engine:
            async for group in engine.stream(rows, num_generations=8):
                train_on(group)

    Entering starts every process under one deadline; leaving ends them all, also when it is itself
    cancelled. The two may happen in different tasks of one event loop, and any number of streams
    may run at once.

    Args:
        config: What to start, how to sample, what a failed row means.
        scoring: Shaping, penalties and length rules; None: the verifier's reward as it is.
        encode: Text to token ids, without special tokens added; needed by rules that count or
            look for tokens.
        observer: Told of rows and groups as they happen.
        accept: Asked of each row that has a trajectory; where it says False, the row is a failure
            of the class ``RowRejected`` in its group, is not attempted again and does not end the
            run. What it raises does, and so does an answer of None or one to be awaited.
        fleet: The processes to use; None starts what `config` says.

    Attributes:
        config: As given.
        progress: Counters over all streams since the engine was entered.
        fleet: The processes behind it.

    Raises:
        ConfigError: The shards or the scoring can't work.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        scoring: ScoringConfig | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
        observer: RolloutObserver | None = None,
        accept: Callable[[RowResult], bool] | None = None,
        fleet: Fleet | None = None,
    ) -> None:
        self.config = config
        self.progress = Progress()
        self._scoring_config = scoring or ScoringConfig()
        self._encode = encode
        resolve_scoring(self._scoring_config, encode)  # refuses what can't work, before any process
        self._observer = observer
        self._accept = accept
        self.fleet = fleet or Fleet(config)
        self._batches: set[Batch] = set()
        self._has_warned = False
        self._warned: set[ScoringWarning] = set()

    async def __aenter__(self) -> Self:
        await self.fleet.start()
        self.progress = Progress()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run_to_end(self._leave(), "engine")

    async def _leave(self) -> None:
        for batch in list(self._batches):
            await batch.close()
        await self.fleet.close()

    @property
    def routes(self) -> tuple[str, ...]:
        """Every name that a row may route to, sorted.

        Raises:
            RuntimeError: The engine is not entered.
        """
        return self.fleet.shards.routes

    @property
    def max_model_len(self) -> int | None:
        """The generator's context in tokens; None where it is someone else's server."""
        return self.fleet.max_model_len

    def stream(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        num_generations: int = 1,
        sampling: SamplingParams | None = None,
        training: bool = True,
    ) -> RolloutStream:
        """Groups in completion order, while slower ones still run.

        Rows are checked, all of them, before this returns; requests go out with the first group
        asked for. Leaving early (``aclose``, or cancellation of the consumer) ends everything in
        flight.

        Args:
            rows: One dictionary a prompt. Not changed.
            num_generations: Attempts at each prompt; they are one group.
            sampling: The profile to use; None: the configuration's.
            training: False for validation, which stays without the length penalty and may be
                greedy (a temperature of 0).

        Returns:
            One group a prompt. The last one has the timings of all instances, merged; they are in
            the stream's `progress` too, also when that group is dropped.

        Raises:
            RowTypeError, RowValueError: A row is refused; nothing has run.
            UnsupportedOptionError: A sampling option that does not reach the model through Gym.
            RolloutStreamError: An instance failed and no restart was left, or a row failed under
                the policy ``raise``.
            RolloutRedispatchExhausted: A row spent its infra budget.
            IncompleteStreamError: Rows are missing at the end.
            DeadlineExceeded: Nothing arrived for `no_progress_timeout_s`.
            RuntimeError: The engine is not entered.
        """
        repeated = repeat_rows(rows, num_generations)
        return self.stream_repeated(
            repeated, GroupSizes(group=num_generations), sampling=sampling, training=training
        )

    def stream_repeated(
        self,
        rows: Sequence[dict[str, Any]],
        sizes: GroupSizes,
        *,
        sampling: SamplingParams | None = None,
        training: bool = True,
    ) -> RolloutStream:
        """As :meth:`stream`, for rows that are repeated already.

        Args:
            rows: One dictionary an attempt, the attempts at one prompt contiguous.
            sizes: How many are gathered, kept on one instance, and one prompt; they may differ.
            sampling: The profile to use; None: the configuration's.
            training: False for validation.
        """
        shards = self.fleet.shards
        profile = sampling or self.config.sampling
        self._warn_of_limit(profile)
        prepared = prepare_rows(
            rows,
            profile,
            sizes,
            routes=shards.routes or None,
            seed=self.config.seed if profile.seed is None else profile.seed,
            is_training=training,
        )
        scoring = resolve_scoring(
            self._scoring_config,
            self._encode,
            max_total_tokens=self.max_model_len,
            training=training,
        )
        run = Run(self.config, shards, self.progress, self._observer, self._accept, self._warned)
        batch = Batch(run, prepared, sizes, scoring)
        return RolloutStream(batch, self._groups(batch))

    async def _groups(self, batch: Batch) -> AsyncGenerator[RolloutGroup, None]:
        self._batches.add(batch)
        try:
            async with contextlib.aclosing(batch.groups()) as groups:
                async for group in groups:
                    yield group
        finally:
            self._batches.discard(batch)

    async def run(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        num_generations: int = 1,
        sampling: SamplingParams | None = None,
        training: bool = True,
    ) -> list[RolloutGroup]:
        """All groups in the order of `rows`; see :meth:`stream`.

        Groups that the policy ``drop_group`` left out are missing from the list.
        """
        stream = self.stream(
            rows, num_generations=num_generations, sampling=sampling, training=training
        )
        async with contextlib.aclosing(stream) as groups:
            return sorted([group async for group in groups], key=lambda group: group.index)

    async def update_weights(
        self, source: WeightSource, version: str, pause: PauseMode = "keep"
    ) -> None:
        """Have the generator go on with new weights, also while streams run.

        They are kept: a generator that dies comes back with them, not with those of its start. A
        directory must stay, and tensors stay in memory, until the next update. What a trainer sends
        by transfer is in the engine alone: a generator that dies with it is lost, unless vLLM servers
        by URL still have it.

        Args:
            source: A directory that ``save_pretrained`` wrote, tensors by name, or a transfer.
            version: What :attr:`~gymrl.types.Trajectory` and records will call them.
            pause: What becomes of generations in flight: ``keep``, ``wait`` or ``abort``.

        Raises:
            WeightUpdateError: They were not taken; the old ones serve on.
            UnsupportedOptionError: The generator is somebody else's server.
            ActorDiedError: The generator died, and they came by transfer.
            RolloutStreamError: The generator is lost.
        """
        await self.fleet.update_weights(source, version, pause)

    async def weight_takers(self) -> list[str]:
        """Engines that a transfer of weights can go to now; a sender is made for so many.

        Returns:
            See :func:`~gymrl.generation.weights.weight_takers`.

        Raises:
            UnsupportedOptionError: The generator is somebody else's server.
            GenerationError: It does not serve.
            RolloutStreamError: It is lost.
        """
        return await self.fleet.weight_takers()

    async def health_check(self) -> None:
        """Ask every process whether it and its servers are well.

        Raises:
            GymrlError: The first that is not, named.
            DeadlineExceeded: One did not answer.
            RuntimeError: The engine is not entered.
        """
        await self.fleet.health_check()

    def _warn_of_limit(self, sampling: SamplingParams) -> None:
        limit = self.max_model_len
        asked = sampling.max_tokens
        if self._has_warned or limit is None or asked is None or asked <= limit:
            return
        self._has_warned = True
        logger.warning(
            "sampling.max_tokens=%d is above the generator's context of %d tokens; "
            "the context will end generations first",
            asked,
            limit,
        )
