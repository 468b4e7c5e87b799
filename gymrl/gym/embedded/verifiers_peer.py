"""Runs in the interpreter that has the verifiers package: lists tasks, plays rollouts.

Started as a script; gymrl is not imported here, nor is verifiers in gymrl's own processes, so that
neither has to agree with the other's dependencies. What is needed of verifiers is loaded by name.
Requests and answers are JSON.

Two generations of the package have little in common but the name. Environments of the *classic* one
are modules with ``load_environment`` (verifiers from 0.1.14 to 0.3); those of the *v1* one are
modules whose ``__all__`` has a taskset (verifiers from 0.4).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

API_KEY_VARIABLE = "GYMRL_POLICY_API_KEY"
MAX_BODY_BYTES = 1 << 30
_MODEL_SIDE = frozenset(
    {"ModelError", "ProviderError", "InterceptionError", "TunnelError", "InfraError"}
)
"""Classes of verifiers' errors that say: the policy's server, or the way to it, failed."""


class RolloutError(Exception):
    """A rollout that ended in an error. It has no reward, whatever verifiers wrote down."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Environment(Protocol):
    """An environment of either generation."""

    def tasks(self, split: str, count: int) -> list[dict[str, Any]]:
        """The first `count` tasks as JSON: ``task``, what :meth:`rollout` takes, and ``prompt``."""
        ...

    async def rollout(self, request: dict[str, Any]) -> dict[str, Any]:
        """Play one task against the policy at ``base_url``."""
        ...

    async def group(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Play all attempts at a task, and score them together."""
        ...

    async def open(self) -> None:
        """Bring up what rollouts share."""
        ...

    async def close(self) -> None:
        """Take it down."""
        ...


_scoring_errors: ContextVar[list[str]] = ContextVar("scoring_errors")


class _ScoringErrors(logging.Handler):
    """Gives what rubrics log as errors to the rollout that they belong to.

    A rubric logs a reward function that raised, and goes on with 0 in its place.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it for the rollout in whose context it was logged."""
        failed = _scoring_errors.get(None)
        if failed is not None and ".rubrics." in record.name:
            failed.append(record.getMessage())


@contextlib.contextmanager
def _noting_scoring_errors() -> Iterator[None]:
    """Fail afterwards where a rubric went on with 0 in place of a score."""
    failed: list[str] = []
    _scoring_errors.set(failed)
    yield
    if failed:
        raise RolloutError(f"verifiers scored 0 where scoring failed: {'; '.join(failed)}", 422)


class Classic:
    """An environment of verifiers before 0.4."""

    def __init__(self, name: str, arguments: dict[str, Any], group_size: int) -> None:
        self._package = importlib.import_module("verifiers")
        self._clients = importlib.import_module("verifiers.clients")
        self._types = importlib.import_module("verifiers.types")
        self._env = self._package.load_environment(name, **arguments)
        logging.getLogger("verifiers").addHandler(_ScoringErrors(logging.ERROR))
        if _compares(self._env) != (group_size > 1):
            raise RuntimeError(
                f"{name!r} scores each rollout on its own: leave group_size out"
                if group_size > 1
                else f"{name!r} scores the rollouts of a group against each other: say how many with "
                "group_size, and make as many attempts at each task"
            )
        wanted = ("input", "client", "model", "sampling_args")
        known = inspect.signature(self._env.run_rollout).parameters
        if any(parameter not in known for parameter in wanted):
            raise RuntimeError(
                f"verifiers {importlib.metadata.version('verifiers')} is too old: "
                "run_rollout(input, client, model, sampling_args) came with 0.1.14"
            )

    def tasks(self, split: str, count: int) -> list[dict[str, Any]]:
        """Rows of the dataset, or of the evaluation dataset where `split` is ``eval``."""
        load = self._env.get_eval_dataset if split == "eval" else self._env.get_dataset
        rows = load(n=count)
        return [
            {"task": dict(row), "prompt": _chat(row["prompt"])}
            for row in (rows[place] for place in range(min(count, len(rows))))
        ]

    async def rollout(self, request: dict[str, Any]) -> dict[str, Any]:
        """One rollout, scored by the environment's rubric."""
        with _noting_scoring_errors():
            output = await self._asking(self._env.run_rollout, request)
            _require_no_error(output)
        return _classic_verdict(output)

    async def group(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """All rollouts of a group, scored together by the environment's rubric.

        As its own ``run_group`` does, but that each rollout asks the policy under a URL of its own,
        and that none is scored where one ended in an error.
        """
        with _noting_scoring_errors():
            played = (self._asking(self._env.rollout, request) for request in requests)
            # Every rollout ends before anything is raised: none goes on behind its group's back.
            states: list[Any] = await asyncio.gather(*played, return_exceptions=True)  # noqa: TID251 - gymrl is not imported here
            await score_group(self._env.rubric, states)
        return [_classic_verdict(state) for state in states]

    async def _asking(self, play: Any, request: dict[str, Any]) -> Any:
        """What a method of the environment gives for a request, which has its own way to the policy."""
        client = self._clients.resolve_client(
            self._types.ClientConfig(
                client_type="openai_chat_completions",
                api_key_var=API_KEY_VARIABLE,
                api_base_url=request["base_url"],
                timeout=request["timeout_s"],
                # The row is tried again by whoever asked, with a rollout id of its own.
                max_retries=0,
            )
        )
        try:
            return await play(request["task"], client, request["model"], dict(request["sampling"]))
        finally:
            await client.close()

    async def open(self) -> None:
        """Nothing is shared before the first rollout."""

    async def close(self) -> None:
        """Run the environment's teardown handlers."""
        await self._env._teardown()


async def score_group(rubric: Any, played: list[Any]) -> None:
    """Let a rubric score all rollouts of a group, and clean up behind each.

    Args:
        rubric: Of the environment.
        played: The state of each rollout, or what it raised.

    Raises:
        RolloutError: A rollout ended in an error, so that none is scored; or the rubric raised. That
            is its own code, and the same the next time: no fault of the fleet's.
        BaseException: What a rollout raised.
    """
    try:
        for state in played:
            if isinstance(state, BaseException):
                raise state
            _require_no_error(state)
        try:
            await rubric.score_group(played)
        except Exception as error:
            raise RolloutError(f"the rubric failed on a whole group: {error!r}", 422) from error
    finally:
        for state in played:
            if not isinstance(state, BaseException):
                await rubric.cleanup(state)


def _compares(env: Any) -> bool:
    """Whether an environment, or one of those it is made of, scores rollouts against each other."""
    inner = getattr(env, "env_map", {}).values()
    return getattr(env, "requires_group_rollouts", False) or any(map(_compares, inner))


def _require_no_error(state: dict[str, Any]) -> None:
    if state.get("error"):
        raise _classic_error(state["error"])


def _classic_verdict(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "reward": _finite(state["reward"], "reward"),
        "metrics": _numbers(state.get("metrics") or {}),
        "is_truncated": bool(state.get("is_truncated")),
        "stop_condition": state.get("stop_condition"),
        "messages": [_plain(message) for message in state.get("completion") or []],
    }


class V1:
    """A taskset of verifiers from 0.4 on, with the environment and the harness it comes with."""

    def __init__(self, name: str, arguments: dict[str, Any], group_size: int) -> None:
        if group_size > 1:
            raise RuntimeError(
                f"{name!r}: tasks of a taskset score each episode on its own: leave group_size out"
            )
        self._package = importlib.import_module("verifiers.v1")
        settings = {key: value for key, value in arguments.items() if key not in _ENV_KEYS}
        env = {key: value for key, value in arguments.items() if key in _ENV_KEYS}
        taskset = {**settings, "id": name}
        kind = self._package.env_config_type(name, str(env.get("id", "")))
        roles = [
            role
            for role, field in kind.model_fields.items()
            if isinstance(field.default, self._package.AgentConfig)
        ]
        given = {role: self._role(name, role, dict(env.get(role, {}))) for role in roles}
        self._env = self._package.load_environment(
            kind.model_validate({**env, **given, "taskset": taskset})
        )
        self._task_class = type(self._env.taskset).task_type()
        self._data_class = _data_class(self._package, self._task_class)
        self._context = importlib.import_module("verifiers.v1.clients").ModelContext
        configs = importlib.import_module("verifiers.v1.configs.client")
        self._client_config = configs.EvalClientConfig
        self._sampling_config = importlib.import_module("verifiers.v1.types").SamplingConfig
        self._serving: Any = None

    def _role(self, taskset: str, role: str, spec: dict[str, Any]) -> dict[str, Any]:
        """A role's settings, with a runtime and a harness that are safe where none were chosen.

        The package's own choices are a sandbox of its makers' service, and a harness with a shell.
        """
        harness = dict(spec.get("harness") or {"id": self._package.default_harness_id(taskset)})
        if "harness" not in spec and harness["id"] == "bash":
            harness = {"id": "null"}
        config = self._package.harness_config_type(harness["id"]).model_validate(harness)
        runs_code = self._package.load_harness(config).EXECUTES_CODE
        if runs_code and "runtime" not in spec:
            raise RuntimeError(
                f"the harness {harness['id']!r} of {role!r} runs what the model writes; say where: "
                f"arguments.{role}.runtime.type (docker, ...; 'subprocess' is this machine, unguarded)"
            )
        return {"runtime": {"type": "subprocess"}, **spec, "harness": harness}

    def tasks(self, split: str, count: int) -> list[dict[str, Any]]:
        """The first tasks of the taskset, which may be endless."""
        if split != "train":
            raise ValueError(f"split={split!r}: a taskset has one split; leave it at 'train'")
        tasks = list(self._env.taskset.take(count))
        return [
            {
                "task": task.data.model_dump(mode="json", exclude_defaults=True),
                "prompt": _chat(_plain(task.data.prompt) if task.data.prompt else ""),
            }
            for task in tasks
        ]

    async def rollout(self, request: dict[str, Any]) -> dict[str, Any]:
        """One episode, scored by the task's rewards."""
        data = self._data_class.model_validate(request["task"])
        task = self._task_class(data, self._env.config.taskset.task)
        client = self._client_config(base_url=request["base_url"], api_key_var=API_KEY_VARIABLE)
        sampling = self._sampling_config.model_validate(request["sampling"])
        context = self._context(model=request["model"], client=client, sampling=sampling)
        episode = await self._env.run_episode(task, context)
        if not episode.ok:
            raise _v1_error(episode)
        played = [trace for trace in episode.traces if trace.agent.trainable]
        if len(played) != 1:
            raise RolloutError(
                f"the episode has {len(played)} agents that are trained; exactly one can be", 422
            )
        trace = played[0]
        components = {
            name: _finite(reward.value, name)
            for name, reward in trace.rewards.items()
            if reward is not None
        }
        if not components:
            raise RolloutError("no reward of the task was computed", 422)
        return {
            "reward": math.fsum(components.values()),
            "reward_components": components,
            "metrics": _numbers(trace.metrics),
            "is_truncated": trace.is_truncated,
            "stop_condition": trace.stop_condition,
            "messages": [
                message.model_dump(mode="json", exclude_none=True) for message in trace.messages
            ],
        }

    async def group(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """There are no groups here; ``group_size`` was refused."""
        raise NotImplementedError

    async def open(self) -> None:
        """Bring up shared tool servers and the way by which harnesses reach the policy."""
        self._serving = self._env.serving()
        await self._serving.__aenter__()

    async def close(self) -> None:
        """Take them down."""
        await self._serving.__aexit__(None, None, None)


_ENV_KEYS = frozenset(
    {"id", "agent", "timeout", "retries", "interception", "max_concurrent_agents"}
)


def _data_class(package: Any, task_class: Any) -> Any:
    generic = importlib.import_module("verifiers.v1.utils.generic")
    return generic.concrete_type(task_class, package.TaskData, origin=package.Task) or (
        package.TaskData
    )


def load(request: dict[str, Any]) -> Environment:
    """The environment of a request, by whichever generation its module is written for.

    Raises:
        RuntimeError: The module and the installed verifiers are of different generations, or it
            scores otherwise than ``group_size`` says.
    """
    name, arguments, group_size = (
        request[field] for field in ("environment", "arguments", "group_size")
    )
    short = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    verifiers = importlib.import_module("verifiers")
    if importlib.util.find_spec(short) is not None:
        module = importlib.import_module(short)
        if hasattr(module, "load_environment"):
            if not hasattr(verifiers, "load_environment"):
                raise RuntimeError(
                    f"{name!r} has load_environment, which verifiers "
                    f"{importlib.metadata.version('verifiers')} no longer knows; put "
                    "'verifiers<0.4' into the interpreter that has the environment"
                )
            return Classic(name, arguments, group_size)
    return V1(name, arguments, group_size)


def _classic_error(error: Any) -> RolloutError:
    text = error if isinstance(error, str) else json.dumps(_plain(error), default=str)
    names = set(_words(text))
    return RolloutError(f"verifiers: {text}", 502 if names & _MODEL_SIDE else 500)


def _v1_error(episode: Any) -> RolloutError:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not errors:
        return RolloutError("verifiers: the episode did not end well and says not why", 500)
    last = errors[-1]
    message = f"verifiers: {last.type}: {last.message}"
    if last.status_code is not None and last.type == "ProviderError":
        return RolloutError(message, last.status_code)
    return RolloutError(message, 502 if last.type in _MODEL_SIDE else 500)


def _words(text: str) -> list[str]:
    return "".join(char if char.isalnum() else " " for char in text).split()


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RolloutError(f"{name} is {value!r}, no finite number", 422)
    return float(value)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {
        str(name): float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _plain(value: Any) -> Any:
    """Plain data of what may be a model of pydantic's, or a list of them."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _chat(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{k: v for k, v in dict(_plain(m)).items() if v is not None} for m in prompt]


def list_tasks(request: dict[str, Any]) -> dict[str, Any]:
    """The tasks of an environment; what goes wrong is part of the answer."""
    try:
        environment = load(request)
        tasks = environment.tasks(request["split"], request["count"])
        return {"tasks": tasks, "version": importlib.metadata.version("verifiers")}
    except Exception as error:  # noqa: BLE001 - told to the process that asked
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


async def serve(request: dict[str, Any], path: str) -> None:
    """Answer ``POST /rollout`` and ``/group`` on a Unix socket until the process is told to end."""
    web = importlib.import_module("aiohttp.web")
    environment = load(request)
    await environment.open()
    ways: dict[str, Any] = {"/rollout": environment.rollout, "/group": environment.group}

    async def play(incoming: Any) -> Any:
        try:
            answer = await ways[incoming.path](json.loads(await incoming.read()))
        except RolloutError as error:
            return web.json_response({"error": str(error)}, status=error.status)
        except Exception as error:  # noqa: BLE001 - the row fails, the environment goes on
            text = "".join(traceback.format_exception(error))
            return web.json_response({"error": text}, status=500)
        return web.json_response(answer)

    async def health(_: Any) -> Any:
        return web.json_response({"version": importlib.metadata.version("verifiers")})

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    for way in ways:
        app.router.add_post(way, play)
    app.router.add_get("/livez", health)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.UnixSite(runner, path).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
        await environment.close()


def main(mode: str, request_path: str, target: str) -> None:
    """``tasks REQUEST ANSWER`` or ``serve REQUEST SOCKET``; paths of JSON files and of a socket."""
    # Clients of verifiers demand a key; the policy's server asks for none.
    os.environ.setdefault(API_KEY_VARIABLE, "none")
    sys.path.append(os.getcwd())
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    if mode == "tasks":
        answer = json.dumps(list_tasks(request))
        with open(target, "w", encoding="utf-8") as file:
            file.write(answer)
    else:
        asyncio.run(serve(request, target))


if __name__ == "__main__":
    main(*sys.argv[1:])
