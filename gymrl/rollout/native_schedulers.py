"""Two ways to drive the same episodes: each at its own pace, or all in lock-step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from gymrl.concurrency import gather_bounded
from gymrl.rollout.native_attempts import Attempt, AttemptBudget, Finish, NativeRun, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.rollout.native_rows import NativeSample


async def run_independently(
    samples: Sequence[NativeSample], run: NativeRun, finish: Finish
) -> None:
    """Every sample at its own pace; `finish` is called as each ends.

    Cancelling it cancels the generate call or environment step of each sample, and returns when
    they have ended. An error that `finish` raises does the same to the other samples.
    """

    async def one(sample: NativeSample) -> None:
        budget = AttemptBudget(run.config)
        outcome = await attempt_once(sample, run)
        while (pause := budget.retry_after(outcome)) is not None:
            await anyio.sleep(pause)
            outcome = await attempt_once(sample, run)
        finish(sample, budget.final(outcome))

    await gather_bounded(one, samples, run.config.max_concurrency)


async def attempt_once(sample: NativeSample, run: NativeRun) -> Outcome:
    """One whole episode of one sample."""
    attempt = Attempt(sample, run)
    while attempt.outcome is None:
        request = attempt.episode.next_request()
        assert request is not None
        attempt.take_generation(await run.generators.generate(sample.row.index, request))
        if attempt.is_running:
            [step] = await run.step([attempt])
            attempt.take_step(step)
    return attempt.outcome


async def run_in_lockstep(samples: Sequence[NativeSample], run: NativeRun, finish: Finish) -> None:
    """All samples together: one batch of generations, then one step an environment, and again.

    Samples that failed and may be tried again make up the next batch, after this one has ended.
    Cancelling it cancels the batch under way, and returns when all its calls have ended.
    """
    budgets = {sample.row.index: AttemptBudget(run.config) for sample in samples}
    pending = list(samples)
    while pending:
        batch = _Batch(pending, run, budgets, finish)
        await batch.play()
        pending = batch.again
        await anyio.sleep(batch.pause)


class _Batch:
    """One attempt at each of many samples.

    Attributes:
        again: Samples that failed and may be tried again.
        pause: Seconds to wait before that.
    """

    def __init__(
        self,
        samples: Sequence[NativeSample],
        run: NativeRun,
        budgets: dict[int, AttemptBudget],
        finish: Finish,
    ) -> None:
        self.again: list[NativeSample] = []
        self.pause = 0.0
        self._run = run
        self._budgets = budgets
        self._finish = finish
        self._running = [Attempt(sample, run) for sample in samples]

    async def play(self) -> None:
        """Turn by turn until no attempt runs."""
        while self._running:
            for attempt in self._running:
                if attempt.outcome is not None:
                    self._settle(attempt.sample, attempt.outcome)
            self._running = [attempt for attempt in self._running if attempt.is_running]
            if self._running:
                await _turn(self._running, self._run)

    def _settle(self, sample: NativeSample, outcome: Outcome) -> None:
        budget = self._budgets[sample.row.index]
        pause = budget.retry_after(outcome)
        if pause is None:
            self._finish(sample, budget.final(outcome))
        else:
            self.again.append(sample)
            self.pause = max(self.pause, pause)


async def _turn(attempts: Sequence[Attempt], run: NativeRun) -> None:
    """One turn of every attempt."""
    requests = [attempt.episode.next_request() for attempt in attempts]
    answers = await run.generators.generate_all(
        [attempt.sample.row.index for attempt in attempts],
        [request for request in requests if request is not None],
    )
    for attempt, answer in zip(attempts, answers, strict=True):
        attempt.take_generation(answer)
    answered = [attempt for attempt in attempts if attempt.is_running]
    steps = await run.step(answered)
    for attempt, step in zip(answered, steps, strict=True):
        attempt.take_step(step)
