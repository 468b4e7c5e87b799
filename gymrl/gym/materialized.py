"""Materialized tasks: rows that an environment server takes as an episode, by their taskset.

Such a row is ``{task_id: {taskset, task_id}, task_input: {...}}``. It names no agent: the
configuration's ``environment_server_routes`` says which environment server has its taskset, and
that takes ``{episode_id, task}`` and answers ``{episode_id, task_id, result}``, where `result` is
what an agent would have answered, or ``failure`` in its place.

In the rollout engine such a row travels flat, as what is in its ``task_input``, with the taskset and
the id beside it, so that a run's stamps, images and records are those of every row. The worker makes
the episode of it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import ConfigError, GymSchemaError
from gymrl.gym.schema import decode_mending

if TYPE_CHECKING:
    from collections.abc import Mapping

_RESERVED = re.compile(r"-a[1-9][0-9]*$")
TASKSET_ROUTE = "taskset:"
"""Begins the routes of materialized rows; the taskset's name follows."""

_STAMP = "_ng_"
_TASKSET, _TASK_ID = "_ng_taskset", "_ng_taskset_task_id"
_STAMPED = ("_rowidx",)
_DEFAULT_FAILURE = "environment_server_failed"


class _Failure(msgspec.Struct):
    failure_reason: str | None = None
    terminal: bool | None = None
    failure_kind: str | None = None
    stage: str | None = None


class _Episode(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw()
    failure: _Failure | None = None


_decoder = msgspec.json.Decoder(_Episode)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def is_materialized(row: Mapping[str, Any]) -> bool:
    """Whether a row is a materialized task, well-formed or not."""
    return "task_input" in row or isinstance(row.get("task_id"), dict)


def taskset_of(row: Mapping[str, Any], index: int) -> str:
    """The taskset that a materialized row is routed by.

    Raises:
        ConfigError: The row is malformed; says how.
    """
    identity = row.get("task_id")
    if isinstance(identity, dict) and isinstance(row.get("task_input"), dict):
        taskset, own = identity.get("taskset"), identity.get("task_id")
        if isinstance(taskset, str) and taskset and isinstance(own, str) and own:
            return taskset
    raise ConfigError(
        f"row {index} is no materialized task: it needs task_id: {{taskset, task_id}} with two texts "
        "and a mapping as task_input",
        setting="rows",
    )


def flat_row(row: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """A row as the rollout engine stamps it: a materialized one flat, another one as it is.

    Args:
        row: Not changed.
        index: Its place, for the error.

    Raises:
        ConfigError: It is materialized and malformed.
    """
    if not is_materialized(row):
        return row
    taskset = taskset_of(row, index)
    stamps = {name: value for name, value in row.items() if name.startswith(_STAMP)}
    own_id = row["task_id"]["task_id"]
    return {**row["task_input"], **stamps, _TASKSET: taskset, _TASK_ID: own_id}


def taskset_route(row: Mapping[str, Any], index: int) -> str | None:
    """The route of a materialized row, flat or not; None: it is another row.

    Raises:
        ConfigError: It is malformed.
    """
    taskset = taskset_of(row, index) if is_materialized(row) else row.get(_TASKSET)
    return f"{TASKSET_ROUTE}{taskset}" if isinstance(taskset, str) else None


def episode_body(body: bytes, rollout_id: str) -> bytes:
    """What an environment server is sent, out of a flat row's body.

    Args:
        body: As the engine has stamped it.
        rollout_id: Of the attempt.

    Raises:
        ConfigError: See :func:`episode_request`.
    """
    fields = _fields.decode(body)
    identity = {"taskset": fields[_TASKSET], "task_id": fields[_TASK_ID]}
    task_input = {
        name: value
        for name, value in fields.items()
        if not name.startswith(_STAMP) and name not in _STAMPED
    }
    row = {"task_id": identity, "task_input": task_input}
    return msgspec.json.encode(episode_request(row, rollout_id))


def episode_request(row: Mapping[str, Any], rollout_id: str) -> dict[str, Any]:
    """What an environment server is sent for one attempt at a materialized task.

    Raises:
        ConfigError: The rollout id ends like that of a second attempt (``-a1``), which environment
            servers refuse.
    """
    if _RESERVED.search(rollout_id):
        raise ConfigError(
            f"rollout_id={rollout_id!r}: environment servers keep the ending '-a<number>' for "
            "attempts; choose another",
            setting="rollout_id",
        )
    return {
        "episode_id": {"rollout_id": rollout_id, "attempt": 0},
        "task": {"task_id": row["task_id"], "task_input": row["task_input"]},
    }


def agents_answer(body: bytes) -> bytes:
    """What an agent would have answered, out of an environment server's answer.

    A failure becomes the fields in which Gym's servers report one.

    Raises:
        GymSchemaError: It is no episode's answer.
    """
    try:
        episode = decode_mending(_decoder, body)[0]
    except (msgspec.DecodeError, RecursionError) as error:
        raise GymSchemaError(
            f"the environment server's answer cannot be read: {error}", path="$"
        ) from error
    if episode.failure is not None:
        failure = episode.failure
        reported = {
            "_ng_failure_class": failure.failure_kind or _DEFAULT_FAILURE,
            "_ng_failure_terminal": bool(failure.terminal),
            "_ng_failure_message": failure.failure_reason or "",
            "_ng_failure_stage": failure.stage,
        }
        return msgspec.json.encode(reported)
    result = bytes(episode.result)
    if result in (b"", b"null"):
        raise GymSchemaError(
            "the environment server's answer has neither result nor failure", path="$.result"
        )
    return result
