"""Whole batches over actors in this process, with failures and deaths as a property test draws them."""

import collections
import contextlib
import functools
import json
from collections.abc import AsyncIterator
from typing import ClassVar

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.actors import Actor, RestartPolicy, spawn
from gymrl.config import GymConfig, RolloutConfig
from gymrl.errors import (
    IncompleteStreamError,
    RolloutRedispatchExhausted,
    RolloutStreamError,
    RowIndexValueError,
)
from gymrl.gym.shards import Shard, ShardSet
from gymrl.rollout.instance import Instance
from gymrl.rollout.prepare import GroupSizes
from gymrl.rollout.progress import Progress
from gymrl.rollout.restarts import Restarts
from gymrl.rollout.run import Batch, Run
from gymrl.scoring import ScoringConfig, resolve_scoring
from gymrl.types import Failure, FailureKind, Reward, Row, RowResult, Trajectory, Turn

# What a row does at each of its attempts, by rollout id; the last repeats.
OK, INFRA, DATA, TIMEOUT, DIE, NEVER = "ok", "infra", "data", "timeout", "die", "never"

_FAILURES = {
    INFRA: (FailureKind.INFRA, "GymTransportError"),
    DATA: (FailureKind.DATA, "NoGenerationError"),
    TIMEOUT: (FailureKind.INFRA, "RolloutTimeout"),
}


class Scripted(Actor):
    """A Gym worker that does what the rows' bodies say; its instance ends it where they say so."""

    instances: ClassVar[dict[str, Instance]] = {}

    async def setup(self, label: str) -> None:
        self.label = label

    async def health_check(self) -> None:
        pass

    async def run_rollouts(self, rows: list[Row], timer_prefix: str) -> AsyncIterator[RowResult]:
        for row in rows:
            script = json.loads(row.body)["script"]
            _, _, again = row.rollout_id.partition(".")
            act = script[min(int(again or 0), len(script) - 1)]
            await anyio.lowlevel.checkpoint()
            if act == DIE:
                self.instances[self.label].kill()
                await anyio.sleep_forever()
            if act == NEVER:
                continue
            yield RowResult(index=row.index, agent="a", outcome=self.outcome(row, act))

    def outcome(self, row: Row, act: str) -> Trajectory | Failure:
        if act in _FAILURES:
            kind, error = _FAILURES[act]
            return Failure(kind=kind, error=error, message=act)
        return Trajectory(
            agent="a",
            token_ids=np.array([1, row.index], dtype=np.int32),
            logprobs=np.array([0, -1], dtype=np.float32),
            turns=(Turn(start=0, generation_start=1, end=2),),
            reward=Reward(1.0),
        )


def rows_of(scripts, group):
    return [
        Row(
            index=index,
            task_index=index // group,
            rollout_index=index % group,
            route="a",
            rollout_id=f"r{index}",
            body=json.dumps({"script": script}).encode(),
        )
        for index, script in enumerate(scripts)
    ]


@contextlib.asynccontextmanager
async def open_batch(scripts, *, actor=Scripted, group=1, replicas=1, restarts=100, **options):
    options.setdefault("failure_policy", "mask")
    config = RolloutConfig(
        gym=GymConfig(base_urls=("http://127.0.0.1:2/v1",)), retry_delay_s=0.0, **options
    )
    async with contextlib.AsyncExitStack() as stack:
        budget = Restarts(RestartPolicy(restarts=restarts, backoff_s=0.0, correlation_s=0.0))
        instances = []
        for label in ("s",) if replicas == 1 else tuple(f"s/{n}" for n in range(replicas)):

            async def prepare(worker):
                return None

            start = functools.partial(opened, actor, label)
            instance = Instance(label, start, prepare, budget, start_timeout_s=5)
            Scripted.instances[label] = instance
            stack.push_async_callback(instance.close)
            await instance.open()
            await instance.prepare()
            instances.append(instance)
        shards = ShardSet([Shard("s", instances, ["a"])])
        run = Run(config, shards, Progress())
        sizes = GroupSizes(group=group)
        yield Batch(run, rows_of(scripts, group), sizes, resolve_scoring(ScoringConfig()))


async def opened(actor, label):
    return await spawn(actor, in_process=True, label=label)


async def run(scripts, **options):
    async with open_batch(scripts, **options) as batch:
        with anyio.fail_after(20):
            return [group async for group in batch.groups()], batch.progress


def outcomes_of(groups):
    outcomes = {}
    for group in groups:
        assert [row.index for row in group.rows] == sorted(row.index for row in group.rows)
        for row, sample in zip(group.rows, group.samples, strict=True):
            assert row.index not in outcomes
            outcomes[row.index] = sample
    return outcomes


def expected(script, config_data=2):
    """How a row ends whose infra failures and deaths stay within the budget."""
    return DATA if collections.Counter(script)[DATA] >= config_data else OK


# At most four attempts that the fleet ends, then a good one; a row's own failures anywhere.
acts = st.lists(st.sampled_from([INFRA, DIE, TIMEOUT]), max_size=1).flatmap(
    lambda fleets: st.lists(st.just(DATA), max_size=2).flatmap(
        lambda own: st.permutations(fleets + own)
    )
)


@settings(deadline=None, max_examples=30)
@given(
    scripts=st.lists(acts, min_size=1, max_size=6),
    group=st.sampled_from([1, 2, 3]),
    replicas=st.sampled_from([1, 2, 3]),
    policy=st.sampled_from(["mask", "drop_group"]),
)
async def test_every_row_comes_out_once_whatever_happens(scripts, group, replicas, policy):
    scripts = [[*script, OK] for script in scripts for _ in range(group)]
    deaths = sum(script.count(DIE) for script in scripts)
    groups, progress = await run(
        scripts,
        group=group,
        replicas=replicas,
        failure_policy=policy,
        # A row is under way at the deaths of its company, too.
        max_infra_attempts=10 + 4 * deaths,
        max_data_attempts=2,
    )
    outcomes = outcomes_of(groups)
    failing = {index for index, script in enumerate(scripts) if expected(script) == DATA}
    if policy == "mask":
        assert sorted(outcomes) == list(range(len(scripts)))
        assert {i for i, o in outcomes.items() if isinstance(o, Failure)} <= failing | deadly(
            scripts
        )
    else:
        assert not any(isinstance(outcome, Failure) for outcome in outcomes.values())
    for index, outcome in outcomes.items():
        if isinstance(outcome, Trajectory):
            assert outcome.token_ids.tolist() == [1, index]
    assert progress.rows == len(scripts)
    assert progress.rows_done + progress.rows_failed == len(scripts)
    assert progress.groups_done + progress.groups_dropped == progress.groups
    assert sum(progress.failures.values()) == progress.rows_failed


def deadly(scripts):
    return {index for index, script in enumerate(scripts) if DIE in script}


async def test_one_poisonous_row_of_many_is_the_only_failure():
    scripts = [[OK] for _ in range(20)]
    scripts[11] = [DIE]
    groups, progress = await run(scripts, replicas=2, max_infra_attempts=5, restarts=3)
    failures = {i: o for i, o in outcomes_of(groups).items() if isinstance(o, Failure)}
    assert {index: failure.error for index, failure in failures.items()} == {11: "PoisonError"}
    assert (progress.rows_done, progress.rows_failed) == (19, 1)


async def test_two_poisonous_rows_are_both_found():
    scripts = [[OK] for _ in range(16)]
    scripts[3] = scripts[12] = [DIE]
    groups, _ = await run(scripts, max_infra_attempts=12, restarts=10)
    failures = {i for i, o in outcomes_of(groups).items() if isinstance(o, Failure)}
    assert failures == {3, 12}


async def test_a_worker_that_lives_but_forgets_a_row_is_named():
    with pytest.raises(IncompleteStreamError, match="row 1 at 's'"):
        await run([[OK], [NEVER], [OK]])


async def test_the_infra_budget_is_terminal_and_timeouts_are_not():
    with pytest.raises(RolloutRedispatchExhausted, match="failed 3 times"):
        await run([[INFRA]], max_infra_attempts=3)
    groups, _ = await run([[TIMEOUT], [OK]], max_infra_attempts=3)
    failure = outcomes_of(groups)[0]
    assert (failure.error, failure.attempts) == ("RolloutTimeout", 3)


async def test_what_was_done_before_a_death_is_not_done_again():
    groups, progress = await run([[OK], [OK], [DIE, OK], [OK]])
    assert len(groups) == 4
    assert progress.redispatches == 2
    assert [
        row.rollout_id for group in sorted(groups, key=lambda g: g.index) for row in group.rows
    ] == [
        "r0",
        "r1",
        "r2.1",
        "r3.1",
    ]


class Liar(Scripted):
    """Answers for rows that it was not given."""

    async def run_rollouts(self, rows: list[Row], timer_prefix: str) -> AsyncIterator[RowResult]:
        for row in rows:
            if row.index:
                await anyio.sleep_forever()
            yield RowResult(index=1, agent="a", outcome=self.outcome(row, OK))


async def test_an_answer_for_another_workers_row_is_refused():
    with pytest.raises(RowIndexValueError, match="'s/0': row 1 arrived, but was not asked for"):
        await run([[OK], [OK]], replicas=2, actor=Liar)


async def test_a_spent_restart_budget_ends_the_batch():
    with pytest.raises(RolloutStreamError, match="instance 's' failed"):
        await run([[DIE], [DIE]], restarts=0)
