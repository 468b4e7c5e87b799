"""Environments of the verifiers package as benchmarks: ``verifiers/<environment>``.

The tasks are the environment's own, listed by the interpreter that has it; nothing of verifiers is
loaded here. The environment is the agent as well, and scores itself.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from gymrl.benchmark.base import (
    POLICY_MODEL,
    Benchmark,
    instance_name,
    refuse_unknown_params,
    require_count,
    task_id,
)
from gymrl.config import SamplingParams
from gymrl.errors import ConfigError
from gymrl.gym.embedded.verifiers import PEER, interpreter, peer_environ

FAMILY = "verifiers/"
PARAMS = ("arguments", "python", "split", "rollout_timeout_s", "group_size")

_LIST_TIMEOUT_S = 600.0
_LAST_CHARS = 2000


class _Task(msgspec.Struct, frozen=True):
    task: msgspec.Raw
    prompt: msgspec.Raw


class _Answer(msgspec.Struct, frozen=True):
    tasks: list[_Task] = []
    version: str = ""
    error: str | None = None
    traceback: str = ""


def load_verifiers(name: str, *, num_tasks: int, seed: int, params: dict[str, Any]) -> Benchmark:
    """The first tasks of an environment, and the agent that plays them.

    Args:
        name: ``verifiers/<environment>``: the name that verifiers loads it by, ``owner/name`` of
            the Environments Hub included; it must be installed where `python` finds it, or lie in
            the working directory.
        num_tasks: How many tasks at most; an environment may have fewer.
        seed: Part of the task ids; the order of tasks is the environment's.
        params: ``arguments`` (a mapping: of ``load_environment``, or a taskset's settings),
            ``python`` (the interpreter that has verifiers; None: this one), ``split`` (``train`` or
            ``eval``), ``rollout_timeout_s``, ``group_size`` (attempts at a task that the
            environment's rubric compares with each other).

    Raises:
        ConfigError: An unknown parameter, no such environment, or one that cannot be loaded, with
            what it said.
    """
    require_count(num_tasks)
    refuse_unknown_params(name, params, list(PARAMS))
    environment = name.removeprefix(FAMILY)
    arguments = params.get("arguments") or {}
    if not isinstance(arguments, dict):
        raise ConfigError(f"arguments={arguments!r}: must be a mapping", setting="arguments")
    split = params.get("split", "train")
    if split not in ("train", "eval"):
        raise ConfigError(f"split={split!r}: must be 'train' or 'eval'", setting="split")
    group_size = params.get("group_size", 1)
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise ConfigError(f"group_size={group_size!r}: must be positive", setting="group_size")
    python = interpreter(params.get("python"))
    asked = {
        "environment": environment,
        "arguments": arguments,
        "split": split,
        "count": num_tasks,
        "group_size": group_size,
    }
    instance = instance_name(name)
    rows = [
        {
            "task_id": task_id(name, seed, index),
            "task_source": instance,
            "responses_create_params": {"input": msgspec.json.decode(listed.prompt)},
            "verifiers_task": msgspec.json.decode(listed.task),
        }
        for index, listed in enumerate(_list(name, python, asked))
    ]
    agent = {
        "entrypoint": "gymrl.gym.embedded.verifiers:VerifiersAgent",
        "environment": environment,
        "arguments": arguments,
        "python": python,
        "group_size": group_size,
        "model_server": {"type": "responses_api_models", "name": POLICY_MODEL},
    }
    if "rollout_timeout_s" in params:
        agent["rollout_timeout_s"] = params["rollout_timeout_s"]
    return Benchmark(
        name=name,
        description=f"the environment {environment} of verifiers",
        rows=tuple(rows),
        servers={instance: {"responses_api_agents": {"verifiers": agent}}},
        sampling=SamplingParams(max_tokens=512),
        token_source="ledger",
        group_size=group_size,
    )


def _list(name: str, python: str, asked: dict[str, Any]) -> list[_Task]:
    with tempfile.TemporaryDirectory(prefix="gymrl-verifiers-") as folder:
        request, target = Path(folder, "request.json"), Path(folder, "answer.json")
        request.write_bytes(msgspec.json.encode(asked))
        try:
            done = subprocess.run(
                [python, "-P", str(PEER), "tasks", str(request), str(target)],
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=_LIST_TIMEOUT_S,
                cwd=os.getcwd(),
                stdin=subprocess.DEVNULL,
                env=peer_environ(python),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(
                f"benchmark {name!r}: {python} could not list its tasks: {error}", setting="python"
            ) from error
        if not target.is_file():
            raise ConfigError(
                f"benchmark {name!r}: {python} ended with exit code {done.returncode} instead of "
                f"listing tasks; it said last:\n{done.stderr[-_LAST_CHARS:]}",
                setting="python",
            )
        answer = msgspec.json.decode(target.read_bytes(), type=_Answer)
    if answer.error is not None:
        raise ConfigError(
            f"benchmark {name!r}: verifiers could not give its tasks: {answer.error}. Is the "
            f"environment installed for {python}? Param python names another interpreter.\n"
            f"{answer.traceback[-_LAST_CHARS:]}",
            setting="benchmark",
        )
    if not answer.tasks:
        raise ConfigError(
            f"benchmark {name!r}: split {asked['split']!r} has no tasks", setting="split"
        )
    return answer.tasks
