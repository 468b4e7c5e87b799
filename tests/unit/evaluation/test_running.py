"""What a run does with attempts that are compared with each other, when the fleet fails them."""

import msgspec
import pytest

from gymrl.errors import GymTransportError, RolloutRedispatchExhausted
from gymrl.evaluation import RunOptions, read_evaluation
from gymrl.evaluation.asking import Asked
from gymrl.evaluation.journal import Journal
from gymrl.evaluation.outcomes import tried_again
from gymrl.evaluation.running import RowRunner
from gymrl.types import FailureKind, RolloutGroup

DOWN = {"error": "RolloutTimeout"}
REFUSED_CONNECTION = {"error": "GymTransportError", "failure_fields": {"was_sent": False}}


class Killed(BaseException):
    """The process ends here."""


class Asker:
    """Attempts that end as a script says: None is a result, else what fails one of them.

    Attributes:
        asked: What was made, in order.
    """

    def __init__(self, make_record, script, is_down=False):
        self.asked = []
        self._make_record, self._script, self._is_down = make_record, script, is_down

    async def ask(self, pending):
        task = pending[0].task
        first = pending[0].repeat
        faults = self._script.get((task.task_id, first), [])
        times = pending[0].tries
        self.asked.append((task.task_id, [row.repeat for row in pending]))
        fault = faults[times] if times < len(faults) else None
        if fault is Killed:
            raise Killed
        records = []
        for place, row in enumerate(pending):
            fields = {} if fault is None else dict(fault)
            if fault is not None and place:
                fields = {"error": "CohortIncomplete"}
            records.append(
                self._make_record(
                    task,
                    row.repeat,
                    1.0 if fault is None else None,
                    rollout_id=f"{task.task_id}-{row.repeat}-{row.tries}",
                    cohort=f"{first}-{times}",
                    **fields,
                )
            )
        outage = RolloutRedispatchExhausted("down", attempts=5) if self._is_down else None
        group = RolloutGroup(index=0, task_index=0, rows=(), samples=())
        return Asked(records=records, group=group, outage=outage)


class Observer:
    def __init__(self):
        self.rows = []

    def row(self, record):
        self.rows.append((record.task_id, record.rollout_index, record.failure is None))


@pytest.fixture
def plan(make_plan):
    return make_plan(tasks=("t1", "t2"), repeats=2, group_size=2)


@pytest.fixture
def run(tmp_path, plan, make_record):
    """One run over the directory; who was asked for what."""

    async def run(script, *, is_down=False, observer=None, **options):
        asker = Asker(make_record, script, is_down)
        with Journal(tmp_path, plan) as journal:
            chosen = RunOptions(**options)
            runner = RowRunner(asker, journal, chosen, observer)
            await runner.work(journal.pending(chosen.max_tries))
        return asker.asked

    return run


async def test_a_cohort_that_failed_by_the_fleets_fault_is_made_again_when_all_others_were(
    run, tmp_path
):
    observer = Observer()
    asked = await run({("t1", 0): [DOWN, DOWN]}, observer=observer)
    assert asked == [("t1", [0, 1]), ("t2", [0, 1]), ("t1", [0, 1]), ("t1", [0, 1])]
    first, second = read_evaluation(tmp_path).tasks
    assert (first.rewards, second.rewards) == ([1.0, 1.0], [1.0, 1.0])
    assert len((tmp_path / "rollouts.jsonl").read_text().splitlines()) == 1 + 4 * 2
    # What is made again has not ended.
    assert observer.rows == [("t2", 0, True), ("t2", 1, True), ("t1", 0, True), ("t1", 1, True)]


async def test_it_fails_as_often_as_a_row_may_over_all_runs(run, tmp_path):
    asked = await run({("t1", 0): [DOWN] * 9}, max_tries=2)
    assert asked.count(("t1", [0, 1])) == 2
    assert [each.tries for each in read_evaluation(tmp_path).tasks[0].failed.values()] == [2, 2]
    assert await run({("t1", 0): [DOWN] * 9}, max_tries=2) == []
    assert await run({("t1", 0): [DOWN] * 2}, max_tries=3) == [("t1", [0, 1])]
    assert read_evaluation(tmp_path).tasks[0].rewards == [1.0, 1.0]


@pytest.mark.parametrize("killed_at", [0, 1, 2])
async def test_a_run_that_is_killed_between_tries_ends_as_an_unbroken_one(run, tmp_path, killed_at):
    with pytest.raises(Killed):
        await run({("t1", 0): [DOWN] * killed_at + [Killed]})
    await run({("t1", 0): [DOWN, DOWN]})
    lines = [
        line for line in (tmp_path / "rollouts.jsonl").read_text().splitlines() if "t1" in line
    ]
    failed = ['"failure":{' in line for line in lines]
    # Killed before its first try it has all of them left, later those that are not in the file.
    assert failed == [True] * 4 + [False] * 2
    assert [each.rewards for each in read_evaluation(tmp_path).tasks] == [[1.0, 1.0]] * 2


async def test_a_fleet_that_is_down_ends_the_run_as_ever(run):
    with pytest.raises(RolloutRedispatchExhausted, match="2 rows, one after the other"):
        await run({("t1", 0): [DOWN] * 9, ("t2", 0): [DOWN] * 9}, is_down=True, max_outages=2)


async def test_what_reached_no_server_or_was_its_own_fault_waits_for_the_next_run(run, plan):
    assert len(await run({("t1", 0): [REFUSED_CONNECTION]})) == 2


def test_an_attempts_own_fault_is_not_the_fleets(plan, make_record, tmp_path):
    with Journal(tmp_path, plan) as journal:
        (rows, _) = journal.pending(3)
    infra = [make_record(row.task, row.repeat, None) for row in rows]
    assert [row.tries for row in tried_again(rows, infra, 3)] == [1, 1]
    own = msgspec.structs.replace(infra[0].failure, kind=FailureKind.DATA)
    assert tried_again(rows, [msgspec.structs.replace(infra[0], failure=own), infra[1]], 3) == ()


def test_a_row_alone_is_not_made_again_by_the_run(make_plan, make_record, tmp_path):
    with Journal(tmp_path, make_plan(tasks=("t1",), repeats=1)) as journal:
        (rows,) = journal.pending(3)
    error = GymTransportError.__name__
    assert tried_again(rows, [make_record(rows[0].task, 0, None, error=error)], 3) == ()
