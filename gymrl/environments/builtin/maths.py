r"""Mathematics with a known answer, checked by the math-verify package.

The metadata of an episode is ``{"ground_truth": "\\frac{1}{2}"}``. Needs the extra ``maths``.

math-verify keeps its time limits with signals, which work on a process's main thread alone, and a
long native call holds the interpreter beyond any signal. So it runs in worker processes, one answer
at a time each, and a worker that does not come back is killed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Self

import anyio
import msgspec

from gymrl.actors import Actor, ActorHandle, SpawnOptions, spawn
from gymrl.concurrency import deadline, gather_bounded
from gymrl.environments.base import BaseEnvironment, EnvironmentReturn, MessageLog
from gymrl.environments.builtin.task import Task, environment_message
from gymrl.errors import ActorClosedError, ActorDiedError, ConfigError, DeadlineExceeded

logger = logging.getLogger(__name__)

LONGEST_ANSWER = 20_000
"""Characters from the end of an answer that are searched for the result."""


def make_task(question: str, ground_truth: str) -> Task:
    """A question with a known result, which may be LaTeX."""
    hint = "\nPut your final answer in \\boxed{}."
    return Task(
        messages=[{"role": "user", "content": question + hint}],
        metadata={"ground_truth": ground_truth},
    )


class Verdict(msgspec.Struct, frozen=True):
    """What the verifier says.

    Attributes:
        correct: None when the reference itself can't be read.
        answer: The result it found in the answer, as it reads it.
    """

    correct: bool | None
    answer: str | None = None


class MathsVerifier(Actor):
    """math-verify in a process of its own."""

    async def setup(self) -> None:
        """Load the package, all of it: what it loads with its first answer would take that one's time.

        Raises:
            ConfigError: It is not installed.
        """
        try:
            import math_verify  # noqa: PLC0415 - only the worker needs it
        except ImportError as error:
            raise ConfigError(
                f"the maths environment needs the math-verify package ({error}); install it with: "
                "pip install 'gymrl[maths]'"
            ) from error
        self._package: Any = math_verify
        read = [math_verify.parse(text, parsing_timeout=None) for text in (r"$\frac{1}{2}$", "0.5")]
        math_verify.verify(*read, timeout_seconds=None)

    async def verify(self, answer: str, ground_truth: str, seconds: int) -> Verdict:
        """Compare an answer with the reference; blocks this process on purpose.

        Args:
            answer: The model's text.
            ground_truth: The result, LaTeX or plain.
            seconds: For each of reading and comparing.
        """
        package = self._package
        gold = package.parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=seconds)
        if not gold:
            gold = package.parse(ground_truth, parsing_timeout=seconds)
        if not gold:
            return Verdict(None)
        found = package.parse(answer, parsing_timeout=seconds)
        if not found:
            return Verdict(False)
        return Verdict(
            bool(package.verify(gold, found, timeout_seconds=seconds)), str(found[-1])[:1000]
        )


class MathsEnvironment(BaseEnvironment):
    """A right result is a reward of 1, anything else 0; one answer an episode.

    A result that can't be read, or not compared within its seconds (a tower of powers), is not right.

    Use it as ``async with MathsEnvironment() as maths:``. An episode whose reference can't be read,
    or whose answer the verifier did not come back from, can't be scored and fails: it gets no 0.

    Args:
        num_workers: Verifier processes.
        seconds: For reading an answer, and again for comparing it; the verifier is killed well
            after both.
        in_process: No processes: the verifier in this one, for debugging; it needs the main thread.

    Raises:
        ConfigError: A number is not positive.
    """

    def __init__(self, *, num_workers: int = 1, seconds: int = 5, in_process: bool = False) -> None:
        if num_workers <= 0 or seconds <= 0:
            raise ConfigError(
                f"num_workers={num_workers}, seconds={seconds}: must be positive",
                setting="num_workers" if num_workers <= 0 else "seconds",
            )
        self._seconds = seconds
        self._in_process = in_process
        self._num_workers = num_workers
        self._idle: list[ActorHandle] = []
        self._workers: set[ActorHandle] = set()
        self._limiter = anyio.CapacityLimiter(num_workers)

    async def __aenter__(self) -> Self:
        try:
            self._idle = await gather_bounded(self._open, range(self._num_workers))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._close()

    async def _open(self, number: int) -> ActorHandle:
        # A verifier that is busy can't be asked to stop, so there is no point in waiting for it.
        options = SpawnOptions(name=f"maths-verifier-{number}", cancel_timeout_s=0.5)
        worker = await spawn(MathsVerifier, in_process=self._in_process, options=options)
        self._workers.add(worker)
        return worker

    async def _close(self) -> None:
        workers, self._workers = self._workers, set()
        self._idle = []
        with anyio.CancelScope(shield=True):
            await gather_bounded(lambda worker: worker.close(), workers)

    async def step(self, message_logs: list[MessageLog], metadata: list[Any]) -> EnvironmentReturn:
        """See :class:`gymrl.environments.base.Environment`."""

        async def one(index: int) -> Verdict:
            task = metadata[index]
            truth = task.get("ground_truth") if isinstance(task, dict) else None
            if truth is None:
                return Verdict(None)
            return await self._verify(message_logs[index][-1]["content"], str(truth))

        verdicts = await gather_bounded(one, range(len(message_logs)))
        said = {True: "Environment: correct", False: "Environment: incorrect", None: ""}
        return EnvironmentReturn(
            observations=[environment_message(said[verdict.correct]) for verdict in verdicts],
            metadata=[None] * len(verdicts),
            next_stop_strings=[None] * len(verdicts),
            rewards=[None if v.correct is None else float(v.correct) for v in verdicts],
            terminateds=[True] * len(verdicts),
            answers=[verdict.answer for verdict in verdicts],
        )

    async def _verify(self, answer: str, truth: str) -> Verdict:
        async with self._limiter:
            worker = self._idle.pop() if self._idle else await self._open(len(self._workers))
            is_lost = False
            try:
                return await self._ask(worker, answer, truth)
            except (DeadlineExceeded, ActorDiedError, ActorClosedError) as error:
                logger.warning("a verifier is given up on answer %.200r: %s", answer, error)
                is_lost = True
                return Verdict(None)
            finally:
                await self._put_back(worker, is_lost)

    async def _ask(self, worker: ActorHandle, answer: str, truth: str) -> Verdict:
        verdicts: list[Verdict] = []
        # Two readings and a comparison, each within `seconds`.
        with deadline(6.0 * self._seconds, "the verdict of math-verify", "seconds"):
            verdicts.append(
                await worker.call("verify", answer[-LONGEST_ANSWER:], truth, self._seconds)
            )
        return verdicts[0]

    async def _put_back(self, worker: ActorHandle, is_lost: bool) -> None:
        if not is_lost and not worker.closed:
            self._idle.append(worker)
            return
        worker.kill()
        self._workers.discard(worker)
        with anyio.CancelScope(shield=True):
            await worker.close()

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Accuracy and the like; an answer that was cut off counts as wrong.

        ``accuracy``, ``pass@samples_per_prompt`` (of prompts, at least one right),
        ``fraction_of_samples_properly_ended``, ``num_problems_in_batch``, mean
        ``generation_lengths`` and ``prompt_lengths``, and ``correct_solution_generation_lengths``.
        """
        rewards = [
            reward * is_end
            for reward, is_end in zip(batch["rewards"], batch["is_end"], strict=True)
        ]
        if not rewards:
            return batch, {"num_problems_in_batch": 0.0}
        best: dict[int, float] = {}
        for group, reward in zip(batch["group_index"], rewards, strict=True):
            best[group] = max(best.get(group, 0.0), reward)
        lengths: Sequence[int] = batch["generation_lengths"]
        right = [n for n, reward in zip(lengths, rewards, strict=True) if reward > 0]
        return {**batch, "rewards": rewards}, {
            "accuracy": fmean(rewards),
            "pass@samples_per_prompt": fmean([float(value > 0) for value in best.values()]),
            "fraction_of_samples_properly_ended": fmean([float(end) for end in batch["is_end"]]),
            "num_problems_in_batch": float(len(rewards)),
            "generation_lengths": fmean(lengths),
            "prompt_lengths": fmean(batch["prompt_lengths"]),
            "correct_solution_generation_lengths": fmean(right) if right else 0.0,
        }
