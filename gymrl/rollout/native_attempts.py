"""One attempt at a sample, and how many there may be.

An attempt holds an episode of its own, so that a second one starts from the prompt and fresh
metadata and shares nothing with the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from gymrl.concurrency import growing_pause
from gymrl.errors import (
    GenerationError,
    MediaError,
    NoGenerationError,
    RolloutDataFailure,
    RolloutFailure,
    RolloutInfraFailure,
    RolloutRedispatchExhausted,
)
from gymrl.gym.client import failure_of
from gymrl.rollout.episode import Episode, EpisodeRules
from gymrl.rollout.retry import LONGEST_DELAY_S
from gymrl.types import Failure, FailureKind, Trajectory

if TYPE_CHECKING:
    from gymrl.generation.base import Generated
    from gymrl.rollout.native_images import NativeImageReader, SeenStep
    from gymrl.rollout.native_rows import NativeConfig, NativeSample
    from gymrl.rollout.native_steps import EnvironmentSet, GeneratorPool
    from gymrl.rollout.native_text import TextCodec


@dataclasses.dataclass(frozen=True, slots=True)
class NativeRun:
    """What all episodes of a run share."""

    config: NativeConfig
    rules: EpisodeRules
    codec: TextCodec
    generators: GeneratorPool
    environments: EnvironmentSet
    images: NativeImageReader

    async def step(self, attempts: Sequence[Attempt]) -> list[SeenStep]:
        """One step of every attempt, with the images that it showed.

        Raises:
            EnvironmentContractError: An answer is not what the protocol says, or shows images where
                the codec writes none.
        """
        episodes = [attempt.episode for attempt in attempts]
        return await self.images.read_steps(await self.environments.step(episodes), episodes)


class FailedAttempt(msgspec.Struct, frozen=True):
    """An attempt without a trajectory.

    Attributes:
        failure: As plain data.
        error: What it came from.
        is_certain: Another attempt would end the same way.
    """

    failure: Failure
    error: Exception
    is_certain: bool = False

    def raised(self) -> RolloutFailure:
        """The typed error that ends a run, naming row, turn and environment."""
        failure = self.failure
        place = f"row {failure.row} (environment {failure.agent!r}"
        place += f", turn {failure.turn})" if failure.turn is not None else ")"
        facts = {"row": failure.row, "agent": failure.agent, "turn": failure.turn}
        text = f"{place}: {failure.error}: {failure.message}"
        cls: type[RolloutFailure]
        if isinstance(self.error, RolloutFailure):
            cls = type(self.error)
            facts = {**self.error.fields, **facts}
        else:
            is_infra = failure.kind is FailureKind.INFRA
            cls = RolloutInfraFailure if is_infra else RolloutDataFailure
        error = cls(text, **facts)
        error.attempts = failure.attempts
        error.__cause__ = self.error
        return error


Outcome = Trajectory | FailedAttempt
Finish = Callable[["NativeSample", Outcome], None]
"""Takes a sample's final outcome; may raise, which ends the run."""


class Attempt:
    """One attempt, step by step; what goes wrong becomes its outcome.

    Attributes:
        outcome: None while it runs.
    """

    def __init__(self, sample: NativeSample, run: NativeRun) -> None:
        self.sample = sample
        self.outcome: Outcome | None = None
        self._run = run
        self._episode: Episode | None = None
        try:
            if sample.error is not None:
                raise sample.error
            self._episode = Episode(sample, run.rules, run.codec)
        except (NoGenerationError, MediaError) as error:
            # Whatever is wrong with a prompt will be wrong with it the next time.
            self.fail(error, is_certain=True)

    @property
    def is_running(self) -> bool:
        """Whether there is more to do."""
        return self.outcome is None

    @property
    def episode(self) -> Episode:
        """The episode of a running attempt."""
        assert self._episode is not None
        return self._episode

    def fail(self, error: Exception, *, is_certain: bool = False) -> None:
        """End without a trajectory."""
        row = self.sample.row.index
        failure = failure_of(error, row=row, agent=self.sample.task_name)
        turn = self._episode.turn if self._episode is not None else 0
        failure = msgspec.structs.replace(failure, row=row, turn=turn)
        self.outcome = FailedAttempt(failure, error, is_certain)

    def take_generation(self, generated: Generated | Exception) -> None:
        """Take an answer, or the error in its place."""
        if isinstance(generated, Exception):
            self.fail(generated)
            return
        try:
            self.episode.take_generation(generated)
        except (RolloutFailure, GenerationError) as error:
            self.fail(error)

    def take_step(self, seen: SeenStep) -> None:
        """Take the environment's step, or the error in its place; ends a finished episode."""
        step, images = seen
        if isinstance(step, Exception):
            self.fail(step)
            return
        try:
            self.episode.take_step(step, images)
        except (RolloutFailure, GenerationError) as error:
            self.fail(error)
            return
        if self.episode.is_done:
            worker = self._run.generators.worker_of(self.sample.row.index)
            self.outcome = self.episode.trajectory(worker)


class AttemptBudget:
    """How often one sample may be attempted.

    Args:
        config: The budgets, and the pause between attempts.
    """

    def __init__(self, config: NativeConfig) -> None:
        self._config = config
        self._failures = {FailureKind.INFRA: 0, FailureKind.DATA: 0}

    def retry_after(self, outcome: Outcome) -> float | None:
        """Seconds until the next attempt; None when `outcome` stands.

        Raises:
            RolloutRedispatchExhausted: The fleet failed this sample too often to go on.
        """
        if isinstance(outcome, Trajectory):
            return None
        failure, error = outcome.failure, outcome.error
        self._failures[failure.kind] += 1
        count = self._failures[failure.kind]
        if failure.kind is FailureKind.DATA:
            is_spent = count >= self._config.max_data_attempts
            return None if outcome.is_certain or is_spent else 0.0
        if count >= self._config.max_infra_attempts:
            raise RolloutRedispatchExhausted(
                f"row {failure.row} (environment {failure.agent!r}) failed {count} times by the "
                f"fleet's fault (max_infra_attempts); the last: {failure.error}: "
                f"{failure.message}",
                row=failure.row,
                attempts=count,
            ) from error
        return growing_pause(self._config.retry_delay_s, count, LONGEST_DELAY_S)

    def final(self, outcome: Outcome) -> Outcome:
        """`outcome` with the number of attempts in it."""
        if isinstance(outcome, Trajectory):
            return outcome
        attempts = sum(self._failures.values())
        failure = msgspec.structs.replace(outcome.failure, attempts=attempts)
        return msgspec.structs.replace(outcome, failure=failure)
