"""An agent whose episodes are an environment of the verifiers package.

The environment runs as it is, in a process of its own, under the interpreter that has it
(``verifiers_peer.py`` beside this module): it asks the policy over chat completions, steps, and
scores itself. Tokens come from the policy server's ledger, because nothing of verifiers has to know
about tokens; so the worker's ``token_source`` must be ``ledger``.

Where its rubric scores the attempts at a task against each other, they are played and scored as one
(:mod:`gymrl.gym.embedded.cohorts`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp
import anyio
import msgspec

from gymrl.config import require
from gymrl.errors import ConfigError, ServerStartError
from gymrl.gym.embedded.base import (
    EmbeddedServer,
    InnerServerError,
    Peers,
    RefusedRequest,
    ServerRef,
    ServerSettings,
    json_response,
    missing_field,
    read_fields,
)
from gymrl.gym.embedded.cohorts import Cohorts, Member
from gymrl.gym.policy_key import without_key
from gymrl.gym.processes import GuardedProcess
from gymrl.gym.schema import is_null, plain
from gymrl.token_ledger import rollout_base_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiohttp import web

PEER = Path(__file__).with_name("verifiers_peer.py")
READY_POLL_S = 0.05

_ABSENT = msgspec.Raw(b"")
_PLACE_FIELDS = ("_ng_task_index", "_ng_rollout_index")
_NOT_TOKEN_LIMITS = ("max_turns", "max_turns_reached")


class VerifiersSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the agent.

    Attributes:
        environment: Its name: the module to import, or ``owner/name`` of the Environments Hub.
        arguments: Of ``load_environment``; for a taskset of v1 its settings, and those of the
            environment around it (``agent``, ``timeout``, ...).
        python: The interpreter that has verifiers and the environment; None: gymrl's own.
        model_server: The instance that answers for the policy.
        rollout_timeout_s: Of one episode, scoring included.
        group_size: Attempts at a task that the environment's rubric scores together, where it
            compares them with each other. 1: it scores each on its own.
    """

    environment: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    python: str | None = None
    model_server: ServerRef
    rollout_timeout_s: float = 1800.0
    group_size: int = 1

    def __post_init__(self) -> None:
        require(self.group_size > 0, "group_size", self.group_size, "must be positive")
        value = self.rollout_timeout_s
        require(value > 0, "rollout_timeout_s", value, "must be positive")


class VerifiersAgent(EmbeddedServer):
    """``POST /run`` plays one task; see the module."""

    kind: ClassVar[str] = "responses_api_agents"
    Settings: ClassVar[type[ServerSettings]] = VerifiersSettings

    def __init__(self, instance: str, settings: Mapping[str, Any], peers: Peers) -> None:
        super().__init__(instance, settings, peers)
        if not peers.names_rollouts:
            raise ConfigError(
                f"instance {instance!r}: an environment of verifiers gives no tokens back; set "
                "token_source to 'ledger', so that they come from the policy server",
                setting="token_source",
            )
        self._folder = ""
        self._process: GuardedProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._cohorts: Cohorts[bytes, dict[str, Any]] = Cohorts(
            self.settings.group_size, self._play_together, self.settings.rollout_timeout_s
        )

    async def open(self) -> None:
        """Start the environment's process and wait until it answers.

        Raises:
            ServerStartError: It ended before; with what it said last. The worker's spin-up deadline
                bounds the wait.
        """
        self._folder = tempfile.mkdtemp(prefix="gymrl-verifiers-")
        try:
            await self._start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close()
            raise

    async def _start(self) -> None:
        python = interpreter(self.settings.python)
        request = Path(self._folder, "request.json")
        socket = Path(self._folder, "socket")
        asked = {
            "environment": self.settings.environment,
            "arguments": self.settings.arguments,
            "group_size": self.settings.group_size,
        }
        await anyio.Path(request).write_bytes(msgspec.json.encode(asked))
        process = GuardedProcess(
            self.instance,
            [python, "-P", str(PEER), "serve", str(request), str(socket)],
            cwd=os.getcwd(),
            env=peer_environ(python, self.peers.key_variable),
        )
        self._process = process
        try:
            await process.start()
        except OSError as error:
            raise ServerStartError(
                f"instance {self.instance!r}: {python} could not be started: {error}"
            ) from error
        connector = aiohttp.UnixConnector(path=str(socket), limit=0)
        self._session = aiohttp.ClientSession(connector=connector)
        while not await self._answers(self._session):
            if process.has_ended:
                await process.wait()
                raise ServerStartError(
                    f"instance {self.instance!r}: the environment "
                    f"{self.settings.environment!r} {process.how_it_ended} before it was ready; "
                    f"its last lines:\n{process.last_lines}"
                )
            await anyio.sleep(READY_POLL_S)

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get("http://peer/livez") as answer:
                return answer.status == HTTPStatus.OK
        except aiohttp.ClientError:
            return False

    async def close(self) -> None:
        """Stop the process; nothing of it is left."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            if self._process is not None:
                stack.push_async_callback(self._process.stop)
            if self._session is not None:
                stack.push_async_callback(self._session.close)
        self._process = self._session = None

    def add_routes(self, app: web.Application) -> None:
        """Add ``/run``, plain and under ``/ng-rollout/<id>``."""
        self.add_post(app, "/run", self._run)

    async def _run(self, request: web.Request) -> web.Response:
        row = await read_fields(request)
        params = row.get("responses_create_params", _ABSENT)
        task = row.get("verifiers_task", _ABSENT)
        for name, value in (("responses_create_params", params), ("verifiers_task", task)):
            if is_null(value):
                raise missing_field(name, sorted(row))
        rollout_id = request.match_info.get("rollout_id") or plain(
            row.get("_ng_rollout_id", _ABSENT)
        )
        if not isinstance(rollout_id, str):
            raise missing_field("_ng_rollout_id", sorted(row))
        policy = self.peers.url(self.settings.model_server.name)
        asked = {
            "task": task,
            "base_url": rollout_base_url(f"{policy}/v1", rollout_id),
            "model": self.peers.model_name,
            "sampling": chat_sampling(plain(params)),
            "timeout_s": self.settings.rollout_timeout_s,
        }
        body = msgspec.json.encode(asked)
        if self.settings.group_size == 1:
            played = await self._play("rollout", body)
        else:
            played = await self._cohorts.join(_member(row, rollout_id), body)
        return json_response({**row, **_verdict(played)})

    async def _play_together(self, bodies: Sequence[bytes]) -> list[dict[str, Any]]:
        played: list[dict[str, Any]] = await self._play("group", b"[%s]" % b",".join(bodies))
        return played

    async def _play(self, what: str, body: bytes) -> Any:
        if self._session is None or self._process is None:
            raise InnerServerError("the environment is closed", HTTPStatus.SERVICE_UNAVAILABLE)
        timeout = aiohttp.ClientTimeout(total=self.settings.rollout_timeout_s)
        name = self.settings.environment
        try:
            async with self._session.post(f"http://peer/{what}", data=body, timeout=timeout) as got:
                status, answer = got.status, await got.read()
        except TimeoutError as error:
            raise InnerServerError(
                f"the environment {name!r} took longer than "
                f"rollout_timeout_s={self.settings.rollout_timeout_s:g}",
                HTTPStatus.GATEWAY_TIMEOUT,
            ) from error
        except aiohttp.ClientError as error:
            raise InnerServerError(
                f"the process of the environment {name!r} broke off ({error!r}); its last lines:\n"
                f"{self._process.last_lines}",
                HTTPStatus.BAD_GATEWAY,
            ) from error
        decoded: Any = msgspec.json.decode(answer)
        if status != HTTPStatus.OK:
            raise InnerServerError(str(decoded.get("error")), status)
        return decoded


def _member(row: dict[str, msgspec.Raw], rollout_id: str) -> Member:
    task, place = (plain(row.get(name, _ABSENT)) for name in _PLACE_FIELDS)
    if not isinstance(task, int) or not isinstance(place, int):
        raise missing_field(" or ".join(_PLACE_FIELDS), sorted(row))
    return Member(task, place, rollout_id)


def interpreter(python: str | None) -> str:
    """The interpreter as an absolute path; None is this process's own.

    Raises:
        ConfigError: There is no such program.
    """
    if python is None:
        return sys.executable
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(
            f"python={python!r}: no such program; name the interpreter that has verifiers and the "
            "environment",
            setting="python",
        )
    return os.path.abspath(found)


def peer_environ(python: str, key_variable: str | None = None) -> dict[str, str]:
    """Environment variables of the peer: ours, with its interpreter's programs (uv) found first.

    Args:
        python: The interpreter.
        key_variable: Left out.
    """
    path = os.pathsep.join((os.path.dirname(python), os.environ.get("PATH", os.defpath)))
    return {**without_key(os.environ, key_variable), "PATH": path, "PYTHONUNBUFFERED": "1"}


def chat_sampling(params: dict[str, Any]) -> dict[str, Any]:
    """Sampling options of ``responses_create_params`` as chat completions name them.

    Raises:
        RefusedRequest: ``metadata.extra_body`` is no JSON object as text.
    """
    names = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}
    sampling = {chat: params[name] for name, chat in names.items() if params.get(name) is not None}
    text = (params.get("metadata") or {}).get("extra_body")
    if text is not None:
        try:
            extra = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, TypeError) as error:
            raise RefusedRequest(f"metadata.extra_body is no JSON object: {error}") from error
        if "seed" in extra:
            sampling["seed"] = extra.pop("seed")
        if extra:
            sampling["extra_body"] = extra
    return sampling


def _verdict(played: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ``/run`` answer."""
    limited = played["is_truncated"] and played["stop_condition"] not in _NOT_TOKEN_LIMITS
    response = {
        "output": [item for message in played["messages"] for item in items_of(message)],
        "incomplete_details": {"reason": "max_output_tokens"} if limited else None,
    }
    verdict = {
        "reward": played["reward"],
        "response": response,
        "verifiers_metrics": played["metrics"],
        "verifiers_stop_condition": played["stop_condition"],
    }
    if "reward_components" in played:
        verdict["reward_components"] = played["reward_components"]
    return verdict


def items_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat message as items of the Responses API."""
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        call_id = message.get("tool_call_id")
        return [{"type": "function_call_output", "call_id": call_id, "output": content}]
    if role != "assistant":
        return [{"type": "message", "role": role, "content": content}]
    items: list[dict[str, Any]] = []
    if content:
        parts = [{"type": "output_text", "text": content, "annotations": []}]
        shown = parts if isinstance(content, str) else content
        items.append({"type": "message", "role": "assistant", "content": shown})
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call
        items.append(
            {
                "type": "function_call",
                "call_id": call.get("id"),
                "name": function.get("name"),
                "arguments": function.get("arguments"),
            }
        )
    return items
