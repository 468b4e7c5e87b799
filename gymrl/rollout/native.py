"""Native rollouts: episodes in environments that gymrl steps itself.

:func:`run_native_rollout` returns all groups in input order; :func:`stream_native_rollout` yields
each as it completes. Both play the same episodes (:mod:`gymrl.rollout.episode`), with either
scheduler.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.concurrency import OwnedTasks
from gymrl.rollout.episode import EpisodeRules
from gymrl.rollout.groups import CompletedGroup, GroupAccumulator
from gymrl.rollout.native_attempts import FailedAttempt, NativeRun, Outcome
from gymrl.rollout.native_images import NativeImageReader, format_of
from gymrl.rollout.native_rows import (
    NativeConfig,
    NativePrompt,
    NativeSample,
    check_prompts,
    prepare_samples,
)
from gymrl.rollout.native_schedulers import run_in_lockstep, run_independently
from gymrl.rollout.native_steps import EnvironmentSet, GeneratorPool
from gymrl.scoring.answer import Answer
from gymrl.scoring.native_metrics import native_group_stats, native_histograms, native_scalars
from gymrl.scoring.stats import GroupStats
from gymrl.telemetry import RateLimitedLog
from gymrl.types import RolloutGroup, RowResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.generation.base import Generator
    from gymrl.rollout.native_text import TextCodec

logger = logging.getLogger(__name__)
_failures = RateLimitedLog(logger)


class NativeRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A whole batch.

    Attributes:
        groups: In input order, each with its own metrics. With ``drop_group`` some are missing.
        stats: The values behind all metrics, of dropped groups their failures.
        metrics: Numbers over all groups, by name; those of environments as
            ``<task name>/<metric>``.
        num_dropped: Groups that were left out.
    """

    groups: tuple[RolloutGroup, ...]
    stats: GroupStats
    metrics: dict[str, float]
    num_dropped: int = 0

    def histograms(self) -> dict[str, list[float]]:
        """See :func:`gymrl.scoring.native_metrics.native_histograms`."""
        return native_histograms(self.stats)


async def run_native_rollout(
    prompts: Sequence[NativePrompt],
    generator: Generator | Sequence[Generator],
    environments: Mapping[str, Any],
    *,
    codec: TextCodec,
    config: NativeConfig | None = None,
    num_generations: int = 1,
) -> NativeRollout:
    """Play `num_generations` episodes of every prompt.

    The images of all prompts are read before anything is sampled; a broken one fails the rows of
    its prompt, as any failure does.

    Args:
        prompts: At least one. Nothing of them is changed.
        generator: One, or several that take turns over the rows.
        environments: By task name: anything with a ``step`` (see
            :class:`gymrl.environments.base.Environment`), or an actor's handle.
        codec: Text to tokens and back: :class:`gymrl.rollout.native_text.ChatText` or
            :class:`~gymrl.rollout.native_text.RawText`.
        config: Limits, sampling, scheduler, failure policy.
        num_generations: Attempts at each prompt; they make up its group.

    Cancelling it cancels the generate call and the environment step of every episode and returns
    when they have ended.

    Raises:
        ConfigError: Prompts show images, and a generator takes none. Nothing ran.
        RowTypeError: A prompt has the wrong type. Nothing ran.
        RowValueError: A task name is unknown, or a prompt can't be used. Nothing ran.
        RolloutFailure: With the policy ``raise``: the first row that failed for good, by type;
            the text names row, environment and turn.
        RolloutRedispatchExhausted: The fleet failed one row `max_infra_attempts` times.
        EnvironmentContractError: An environment's answer is not what the protocol says.
    """
    batch = _Batch(generator, environments, codec, config)
    await batch.prepare(prompts, num_generations)
    await batch.play()
    return await batch.rollout()


async def stream_native_rollout(
    prompts: Sequence[NativePrompt],
    generator: Generator | Sequence[Generator],
    environments: Mapping[str, Any],
    *,
    codec: TextCodec,
    config: NativeConfig | None = None,
    num_generations: int = 1,
) -> AsyncIterator[RolloutGroup]:
    """As :func:`run_native_rollout`, but yield each group as soon as its last row has ended.

    A group that the policy ``drop_group`` leaves out is logged. Leaving the iterator early
    (``aclose``) cancels what is under way and waits for its end; groups that were complete but not
    taken are lost.

    Raises:
        Exception: What :func:`run_native_rollout` raises; groups before it were yielded.
    """
    batch = _Batch(generator, environments, codec, config)
    await batch.prepare(prompts, num_generations)
    send, receive = anyio.create_memory_object_stream[RolloutGroup](math.inf)
    errors: list[BaseException] = []
    tasks = OwnedTasks("native-rollout", on_error=errors.append)

    async def play() -> None:
        with send:
            await batch.play(send.send_nowait)

    try:
        task = tasks.start(play(), "episodes")
        async for group in receive:
            yield group
        await task
    finally:
        with anyio.CancelScope(shield=True):
            await tasks.close()
        receive.close()


class _Batch:
    """One batch from prompts to groups."""

    def __init__(
        self,
        generator: Generator | Sequence[Generator],
        environments: Mapping[str, Any],
        codec: TextCodec,
        config: NativeConfig | None,
    ) -> None:
        self._config = config = config or NativeConfig()
        generators = generator if isinstance(generator, Sequence) else [generator]
        pool = GeneratorPool(generators, config.generation_timeout_s)
        opened = EnvironmentSet(environments, config.environment_timeout_s, config.max_threads)
        limit = pool.max_model_len
        if config.max_seq_len is not None:
            limit = min(limit, config.max_seq_len)
        rules = EpisodeRules(
            max_seq_len=limit,
            max_turns=config.max_turns,
            sampling=config.profile,
            require_routed_experts=config.require_routed_experts,
        )
        reader = NativeImageReader(format_of(codec), config.media)
        self._run = NativeRun(config, rules, codec, pool, opened, reader)
        self._groups: dict[int, RolloutGroup] = {}
        self._parts: dict[int, GroupStats] = {}
        self._num_dropped = 0
        self._on_group: Callable[[RolloutGroup], None] | None = None

    async def prepare(self, prompts: Sequence[NativePrompt], num_generations: int) -> None:
        """Check and encode the prompts, their images read first.

        Raises:
            GymrlError: See :func:`run_native_rollout`.
        """
        run = self._run
        task_names = run.environments.task_names
        check_prompts(prompts, num_generations, task_names)
        images = await run.images.read_prompts(prompts, num_generations, self._config)
        if any(read.images for read in images):
            run.generators.check_images()
        self._samples = prepare_samples(
            prompts, num_generations, task_names, run.codec, self._config.seed, images
        )
        rows = [sample.row for sample in self._samples]
        self._accumulator = GroupAccumulator(rows, num_generations)

    async def play(self, on_group: Callable[[RolloutGroup], None] | None = None) -> None:
        """Run every episode; `on_group` gets each group as it completes, instead of keeping it."""
        self._on_group = on_group
        batched = self._config.scheduler == "batched"
        schedule = run_in_lockstep if batched else run_independently
        await schedule(self._samples, self._run, self._finish)
        self._accumulator.finish()

    def _finish(self, sample: NativeSample, outcome: Outcome) -> None:
        if isinstance(outcome, FailedAttempt):
            if self._config.failure_policy == "raise":
                raise outcome.raised()
            _failures.log(outcome.failure.error, logging.WARNING, "%s", outcome.raised())
            settled: Any = outcome.failure
        else:
            settled = outcome
        result = RowResult(index=sample.row.index, agent=sample.task_name, outcome=settled)
        complete = self._accumulator.add(result)
        if complete is not None:
            self._complete(complete)

    def _complete(self, complete: CompletedGroup) -> None:
        group = RolloutGroup(
            index=complete.index,
            task_index=complete.rows[0].task_index,
            rows=complete.rows,
            samples=tuple(result.outcome for result in complete.results),
        )
        stats = native_group_stats(group)
        group = msgspec.structs.replace(group, metrics=native_scalars(stats))
        if group.failures and self._config.failure_policy == "drop_group":
            self._num_dropped += 1
            failures = {k: v for k, v in stats.counts.items() if k.startswith("rollout_failures/")}
            self._parts[group.index] = GroupStats(counts=failures)
            logger.warning(
                "group %d is left out: %d of %d rows failed",
                group.index,
                len(group.failures),
                len(group.rows),
            )
            return
        if self._on_group is not None:
            self._on_group(group)
            return
        self._groups[group.index] = group
        self._parts[group.index] = stats

    async def rollout(self) -> NativeRollout:
        """Everything together, after :meth:`play`."""
        groups = tuple(self._groups[index] for index in sorted(self._groups))
        stats = GroupStats.merged(self._parts[index] for index in sorted(self._parts))
        metrics = native_scalars(stats)
        if self._num_dropped:
            metrics["dropped_groups"] = float(self._num_dropped)
        for name, columns in environment_batches(groups).items():
            metrics.update(await self._run.environments.metrics(name, columns))
        return NativeRollout(
            groups=groups, stats=stats, metrics=metrics, num_dropped=self._num_dropped
        )


def environment_batches(groups: Sequence[RolloutGroup]) -> dict[str, dict[str, list[Any]]]:
    """By task name the columns that ``global_post_process_and_metrics`` gets; see there."""
    batches: dict[str, dict[str, list[Any]]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            columns = batches.setdefault(trajectory.agent, {name: [] for name in _COLUMNS})
            answer = Answer(trajectory.result)
            values = (
                next((i.text for i in reversed(answer.items) if i.is_model_message), ""),
                trajectory.reward.total,
                answer.value("terminated") is True and answer.value("truncated") is not True,
                answer.value("answer"),
                trajectory.turns[0].generation_start,
                trajectory.num_generated,
                group.index,
            )
            for name, value in zip(_COLUMNS, values, strict=True):
                columns[name].append(value)
    return batches


_COLUMNS = (
    "text",
    "rewards",
    "is_end",
    "answers",
    "prompt_lengths",
    "generation_lengths",
    "group_index",
)

__all__ = [
    "NativeConfig",
    "NativePrompt",
    "NativeRollout",
    "environment_batches",
    "run_native_rollout",
    "stream_native_rollout",
]
