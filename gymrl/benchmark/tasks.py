"""``TaskRunner``: single tasks of collated rows against Gym servers that are running."""

from __future__ import annotations

import functools
import re
import uuid
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import msgspec

from gymrl.benchmark.plan import require_task_ids, task_input
from gymrl.concurrency import OwnedTasks, gather_bounded
from gymrl.errors import (
    ConfigError,
    GymRequestError,
    GymSchemaError,
    GymTransportError,
    RolloutFailure,
    ServerError,
)
from gymrl.gym.client import GymClient, HttpPool
from gymrl.gym.deaths import DeathWatch, failure_of_death
from gymrl.gym.health import reported_death
from gymrl.gym.materialized import (
    agents_answer,
    episode_request,
    is_materialized,
    taskset_of,
)
from gymrl.gym.registry import read_registry
from gymrl.gym.rewards import raise_reported_failure, read_reward
from gymrl.gym.schema import decode_answer, decode_mending
from gymrl.gym.shards import row_route
from gymrl.types import Row

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from gymrl.errors import ServerDiedError
    from gymrl.gym.registry import RouteTable

ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHOWN_IDS = 10
_DEATHS_EVERY_S = 2.0

_results = msgspec.json.Decoder(dict[str, Any])

Outcome: TypeAlias = tuple[float, dict[str, Any]]


class BaseServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Its address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class TaskResult(msgspec.Struct, frozen=True):
    """One task's rollouts.

    Attributes:
        task_id: The task.
        rewards: One a repeat.
        results: Gym's raw ``/run`` answers in the same order. Their keys may change: depend on
            `rewards`, and use these to see what happened.
    """

    task_id: str
    rewards: list[float]
    results: list[dict[str, Any]]


class TaskRunner:
    """Runs single tasks.

    ::

        runner = TaskRunner(planned.rows, registry_server=BaseServerConfig("127.0.0.1", 11000))
        result = await runner.run_task("task-3", num_repeats=4)

    Concurrent calls in one event loop are supported. Nothing stays open between calls.

    A server of the benchmark that dies ends the calls under way with its name, where the registry is
    gymrl's, which knows.

    Args:
        rows: Collated rows; a task's repeats may be among them. Materialized ones
            (``task_id: {taskset, task_id}, task_input``) go to the environment server of their
            taskset.
        registry_server: Tells where the servers are.
        row_timeout_s: Deadline of one rollout.

    Raises:
        ConfigError: A row without a task id, or different rows that share one.
        RowTypeError, RowValueError: A flat row does not say where it goes.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        registry_server: BaseServerConfig,
        *,
        row_timeout_s: float = 1800.0,
    ) -> None:
        if row_timeout_s <= 0:
            raise ConfigError(
                f"row_timeout_s={row_timeout_s!r}: must be positive", setting="row_timeout_s"
            )
        self._registry_server = registry_server
        self._row_timeout_s = row_timeout_s
        self._rows = _first_row_of_each_task(rows)
        self._numbers = {task_id: number for number, task_id in enumerate(self._rows)}
        self._active: set[str] = set()
        self._table: RouteTable | None = None

    def task_ids(self) -> list[str]:
        """Every task's id, in the order of the rows."""
        return list(self._rows)

    async def run_task(
        self, task_id: str, num_repeats: int = 1, rollout_id: str | None = None
    ) -> TaskResult:
        """Run `num_repeats` rollouts of one task, all at once.

        Cancelling it closes the connections, so that the servers stop working on them.

        Args:
            task_id: One of :meth:`task_ids`.
            num_repeats: How many.
            rollout_id: Names the rollouts towards the servers; repeats are
                ``<rollout_id>-r<n>``, from 0. None: a fresh one.

        Raises:
            ConfigError: An unknown task, a number of repeats that is not positive, or a rollout id
                that is malformed or in use by another call.
            RolloutFailure: A rollout failed; the others are cancelled. Never a reward of 0.
            RowValueError: The registry knows no server for the task's row.
            ServerError: The registry's answer is malformed.
        """
        row = self._rows.get(task_id)
        if row is None:
            shown = ", ".join(list(self._rows)[:_SHOWN_IDS]) or "none"
            more = ", ..." if len(self._rows) > _SHOWN_IDS else ""
            raise ConfigError(
                f"No input rows for task ids {[task_id]!r}; there are {len(self._rows)}: "
                f"{shown}{more}",
                setting="task_id",
            )
        if isinstance(num_repeats, bool) or not isinstance(num_repeats, int) or num_repeats < 1:
            raise ConfigError(
                f"num_repeats={num_repeats!r}: must be a positive integer", setting="num_repeats"
            )
        chosen = self._claim(rollout_id)
        try:
            async with HttpPool(reuses_connections=False) as pool:
                table = await self._routes(pool)
                attempts = [
                    self._attempt(task_id, row, index, chosen, num_repeats)
                    for index in range(num_repeats)
                ]
                run = functools.partial(self._run, pool, table, task_id)
                outcomes = await self._run_all(pool, run, attempts)
        finally:
            self._active.discard(chosen)
        rewards, results = zip(*outcomes, strict=True)
        return TaskResult(task_id, list(rewards), list(results))

    def _claim(self, rollout_id: str | None) -> str:
        if rollout_id is None:
            rollout_id = uuid.uuid4().hex
        elif not isinstance(rollout_id, str) or not ROLLOUT_ID.fullmatch(rollout_id):
            raise ConfigError(
                f"rollout_id={rollout_id!r}: must match {ROLLOUT_ID.pattern}", setting="rollout_id"
            )
        elif rollout_id in self._active:
            raise ConfigError(
                f"rollout_id={rollout_id!r} is in use by another call; concurrent calls need "
                "different ones",
                setting="rollout_id",
            )
        self._active.add(rollout_id)
        return rollout_id

    async def _routes(self, pool: HttpPool) -> RouteTable:
        if self._table is None:
            self._table = await read_registry(pool, self._registry_server.url)
        return self._table

    async def health_check(self) -> None:
        """Ask the registry how its servers fare.

        Raises:
            ServerDiedError: One is gone; names it, with what it wrote last.
            ServerError: The registry itself does not answer.
        """
        url = self._registry_server.url
        async with HttpPool() as pool:
            try:
                death = await reported_death(pool, url)
            except (GymTransportError, GymRequestError) as error:
                raise ServerError(f"the registry is gone: {error.message}", url=url) from error
        if death is not None:
            raise death

    async def _run_all(
        self, pool: HttpPool, run: Callable[[Row], Awaitable[Outcome]], attempts: list[Row]
    ) -> list[Outcome]:
        """All attempts; a server's death ends them, since its agent would wait for it for ever."""
        watch = DeathWatch()
        watching = OwnedTasks("benchmark deaths")
        try:
            _ = watching.start(self._report_deaths(pool, watch), "watch")
            with watch.watching():
                return await gather_bounded(run, attempts)
        except GymTransportError as error:
            death = await self._death(pool)
            if death is None:
                raise
            raise failure_of_death(death) from error
        finally:
            await watching.close()

    async def _report_deaths(self, pool: HttpPool, watch: DeathWatch) -> None:
        while True:
            await anyio.sleep(_DEATHS_EVERY_S)
            death = await self._death(pool)
            if death is not None:
                watch.report(death)
                return

    async def _death(self, pool: HttpPool) -> ServerDiedError | None:
        try:
            return await reported_death(pool, self._registry_server.url)
        except (GymTransportError, GymRequestError):
            return None  # a registry may leave while its servers go on

    def _attempt(
        self, task_id: str, row: Mapping[str, Any], index: int, rollout_id: str, num_repeats: int
    ) -> Row:
        own_id = rollout_id if num_repeats == 1 else f"{rollout_id}-r{index}"
        number = self._numbers[task_id]
        if is_materialized(row):
            body, route = episode_request(row, own_id), taskset_of(row, index)
        else:
            body = {
                **row,
                "_ng_task_index": number,
                "_ng_rollout_index": index,
                "_ng_rollout_id": own_id,
            }
            if num_repeats > 1:  # a verifier may compare them
                body |= {"_ng_group_id": rollout_id, "_ng_group_attempt": 0}
            route = row_route(body, index)
        return Row(
            index=index,
            task_index=number,
            rollout_index=index,
            route=route,
            rollout_id=own_id,
            body=msgspec.json.encode(body),
        )

    async def _run(self, pool: HttpPool, table: RouteTable, task_id: str, attempt: Row) -> Outcome:
        is_episode = is_materialized(self._rows[task_id])
        if is_episode:
            agent = table.taskset_server(attempt.route)
            url = f"{table.url_of(agent)}/run"
        else:
            agent, url = table.agent_of(attempt.route), table.run_url(attempt.route)
        client = GymClient(pool, self._row_timeout_s, setting="row_timeout_s")
        try:
            body = await client.run(url, attempt, agent)
            return _verdict(agents_answer(body) if is_episode else body)
        except RolloutFailure as error:
            if isinstance(error, GymTransportError) and error.was_sent is False:
                self._table = None  # the servers may have moved: ask the registry again next time
            known = {"row": attempt.index, "agent": agent, **error.fields}
            raise type(error)(
                f"task {task_id!r}, repeat {attempt.rollout_index}: {error.message}", **known
            ) from error


def _verdict(body: bytes) -> Outcome:
    answer = decode_answer(body).answer
    raise_reported_failure(answer)
    reward = read_reward(answer).total
    try:
        return reward, decode_mending(_results, body)[0]
    except (msgspec.DecodeError, RecursionError) as error:
        raise GymSchemaError(f"the answer cannot be read: {error}", path="$") from error


def _first_row_of_each_task(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Mapping[str, Any]]:
    first: dict[str, Mapping[str, Any]] = {}
    for index, (task_id, row) in enumerate(zip(require_task_ids(rows, "rows"), rows, strict=True)):
        if is_materialized(row):
            taskset_of(row, index)
        else:
            row_route(dict(row), index)
        known = first.setdefault(task_id, row)
        if known is not row and task_input(known) != task_input(row):
            raise ConfigError(
                f"different rows share a task id: row {index} is not the first row of {task_id!r}",
                setting="rows",
            )
    return first
