"""Runs the Python that the model writes, and says what came of it.

The model writes a fenced block; its last one is run. The metadata of an episode has one of

``{"stdin", "expected_output"}``
    The program reads and writes; the output must be equal, white space at line ends aside. The
    judge is outside of the program.
``{"tests"}``
    Assertions that run after the program, in its process, so a program can read them and deceive
    them. Use it where that is acceptable.

and ``max_attempts``. Programs run in :mod:`gymrl.environments.builtin.python_sandbox`; read there
what holds on your machine before you run what a model wrote.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import anyio

from gymrl.concurrency import gather_bounded
from gymrl.environments.base import BaseEnvironment, EnvironmentReturn, MessageLog
from gymrl.environments.builtin.answers import last_code_block
from gymrl.environments.builtin.python_sandbox import Execution, PythonLimits, run_python
from gymrl.environments.builtin.task import Task, environment_message

_HINT = "\n\nWrite the program in one fenced block that starts with ```python."


def make_task(
    question: str,
    *,
    tests: str | None = None,
    stdin: str = "",
    expected_output: str | None = None,
    max_attempts: int = 1,
) -> Task:
    """A programming task.

    Args:
        question: What the program is to do.
        tests: Assertions about it; or
        stdin: what it reads, and
        expected_output: what it must write.
        max_attempts: Programs of an episode.

    Raises:
        ValueError: There is neither a test nor an expected output, or both.
    """
    if (tests is None) == (expected_output is None):
        raise ValueError("give either tests or expected_output")
    judged = {"tests": tests} if tests is not None else {"expected_output": expected_output}
    return Task(
        messages=[{"role": "user", "content": question + _HINT}],
        metadata={**judged, "stdin": stdin, "max_attempts": max_attempts, "attempts": 0},
    )


class PythonCodeEnvironment(BaseEnvironment):
    """A program that does what was asked is a reward of 1 and ends the episode.

    Args:
        limits: Of every program.
        max_parallel: Programs at a time; None: as many as there are cores.
        max_observation_chars: Of stdout and stderr each, as the model is shown them.
    """

    def __init__(
        self,
        limits: PythonLimits | None = None,
        *,
        max_parallel: int | None = None,
        max_observation_chars: int = 2000,
    ) -> None:
        self._limits = limits or PythonLimits()
        self._limiter = anyio.CapacityLimiter(max_parallel or os.cpu_count() or 1)
        self._shown = max_observation_chars

    async def step(self, message_logs: list[MessageLog], metadata: list[Any]) -> EnvironmentReturn:
        """See :class:`gymrl.environments.base.Environment`. Cancelling it ends the programs."""
        programs = [last_code_block(log[-1]["content"]) for log in message_logs]

        async def one(index: int) -> tuple[str, bool]:
            return await self._judge(programs[index], metadata[index])

        judged = await gather_bounded(one, range(len(programs)))
        tasks = [{**task, "attempts": task.get("attempts", 0) + 1} for task in metadata]
        return EnvironmentReturn(
            observations=[environment_message(text) for text, _ in judged],
            metadata=tasks,
            next_stop_strings=[None] * len(tasks),
            rewards=[float(passed) for _, passed in judged],
            terminateds=[
                passed or task["attempts"] >= task.get("max_attempts", 1)
                for (_, passed), task in zip(judged, tasks, strict=True)
            ],
            answers=programs,
        )

    async def _judge(self, program: str | None, task: dict[str, Any]) -> tuple[str, bool]:
        """What the model is told, and whether the program did what was asked."""
        if program is None:
            return "I found no program. Write it in a fenced block that starts with ```python.\n", (
                False
            )
        expected = task.get("expected_output")
        # Its own end is the only one that counts: a program that exits before the tests fails them.
        sign = secrets.token_hex(16)
        if expected is None:
            program += f"\n{task['tests']}\nprint({sign!r})\n"
        async with self._limiter:
            run = await run_python(program, stdin=task.get("stdin", ""), limits=self._limits)
        if expected is None:
            output, found, _ = run.stdout.rpartition(f"{sign}\n")
            return self._told(run, output if found else run.stdout), run.ok and bool(found)
        return self._told(run, run.stdout), run.ok and _lines(run.stdout) == _lines(expected)

    def _told(self, run: Execution, stdout: str) -> str:
        if run.outcome == "exited" and run.exit_code is not None:
            parts = [f"The program ended with exit code {run.exit_code}."]
        elif run.outcome == "exited":
            parts = [f"The program was ended by signal {run.signal}."]
        else:
            reasons = {
                "timeout": f"it took longer than {self._limits.wall_time_s:g} s",
                "output_limit": f"it wrote more than {self._limits.output_bytes} bytes",
                "process_limit": f"it had more than {self._limits.max_processes} processes",
            }
            parts = [f"The program was stopped: {reasons.get(run.outcome, 'from outside')}."]
        for name, text in (("stdout", stdout), ("stderr", run.stderr)):
            if text.strip():
                shown = text[-self._shown :].rstrip("\n")
                left_out = f" (last {self._shown} characters)" if len(text) > self._shown else ""
                parts.append(f"{name}{left_out}:\n{shown}")
        return "\n".join(parts) + "\n"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]
