"""Requests that are answered together, or fail together."""

import anyio
import pytest

from gymrl.gym.embedded.base import InnerServerError, RefusedRequest
from gymrl.gym.embedded.cohorts import Cohorts, Member


class Scorer:
    """Answers each request of a cohort with all of them; fails, or waits, when told to."""

    def __init__(self) -> None:
        self.played: list[list[str]] = []
        self.fails: list[Exception] = []
        self.gate = anyio.Event()
        self.gate.set()
        self.was_cancelled = False

    async def play(self, requests):
        self.played.append(list(requests))
        try:
            await self.gate.wait()
        except anyio.get_cancelled_exc_class():
            self.was_cancelled = True
            raise
        if self.fails:
            raise self.fails.pop()
        return [(request, *requests) for request in requests]


class Room:
    """Cohorts whose members' outcomes are collected by rollout id."""

    def __init__(self, size: int = 3, wait_s: float = 60.0) -> None:
        self.scorer = Scorer()
        self.cohorts = Cohorts(size, self.scorer.play, wait_s)
        self.ended: dict[str, object] = {}

    async def join(
        self, place: int, *, task: int = 5, rollout_id: str = "", text: str = ""
    ) -> None:
        rollout_id = rollout_id or f"r-{task}-{place}"
        member = Member(task, place, rollout_id)
        try:
            self.ended[rollout_id] = await self.cohorts.join(member, text or f"{task}:{place}")
        except (InnerServerError, RefusedRequest) as error:
            self.ended[rollout_id] = error


async def settle() -> None:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


async def test_a_cohort_is_played_once_in_the_order_of_its_places():
    room = Room()
    async with anyio.create_task_group() as tasks:
        for place in (2, 0, 1):
            tasks.start_soon(room.join, place)
    assert room.scorer.played == [["5:0", "5:1", "5:2"]]
    assert room.ended == {f"r-5-{place}": (f"5:{place}", "5:0", "5:1", "5:2") for place in range(3)}


async def test_tasks_and_more_attempts_than_a_cohort_has_are_kept_apart():
    room = Room(size=2)
    async with anyio.create_task_group() as tasks:
        for task in (1, 2):
            for place in (3, 0, 2, 1):
                tasks.start_soon(lambda t=task, p=place: room.join(p, task=t))
    assert sorted(room.scorer.played) == [
        ["1:0", "1:1"], ["1:2", "1:3"], ["2:0", "2:1"], ["2:2", "2:3"],
    ]  # fmt: skip


async def test_two_runs_at_a_time_with_tasks_of_one_number_are_kept_apart():
    room = Room(size=2)
    async with anyio.create_task_group() as tasks:
        for run in ("a", "b"):
            tasks.start_soon(lambda r=run: room.join(0, rollout_id=f"{r}-0", text=r))
        await settle()
        assert room.scorer.played == []
        for run in ("a", "b"):
            tasks.start_soon(lambda r=run: room.join(1, rollout_id=f"{r}-1", text=r))
    assert room.scorer.played == [["a", "a"], ["b", "b"]]


async def test_a_cohort_that_fails_fails_whole_and_may_be_made_again_whole():
    room = Room()
    room.scorer.fails.append(InnerServerError("the scorer broke", 422))
    async with anyio.create_task_group() as tasks:
        for place in range(3):
            tasks.start_soon(room.join, place)
    assert {str(error) for error in room.ended.values()} == {"the scorer broke"}
    assert {error.status for error in room.ended.values()} == {422}
    async with anyio.create_task_group() as tasks:
        for place in range(3):
            tasks.start_soon(lambda p=place: room.join(p, rollout_id=f"r-5-{p}.1"))
    assert room.ended["r-5-1.1"] == ("5:1", "5:0", "5:1", "5:2")


async def test_an_attempt_that_is_made_again_alone_is_refused_at_once():
    """Its row failed after the answer; the others are done, so that it would wait for nobody."""
    room = Room(size=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(room.join, 0)
        tasks.start_soon(room.join, 1)
    await room.join(1, rollout_id="r-5-1.1")
    error = room.ended["r-5-1.1"]
    assert isinstance(error, RefusedRequest)
    assert error.status == 409
    assert "scored together" in error.detail


async def test_who_waits_may_leave_and_another_attempt_takes_its_place():
    room = Room(size=2)
    first = anyio.CancelScope()

    async def join_and_leave() -> None:
        with first:
            await room.join(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(join_and_leave)
        await settle()
        first.cancel()
        await settle()
        tasks.start_soon(lambda: room.join(0, rollout_id="r-5-0.1", text="again"))
        await settle()
        tasks.start_soon(room.join, 1)
    assert room.scorer.played == [["again", "5:1"]]
    assert "r-5-0" not in room.ended


@pytest.mark.parametrize("leaver", [0, 2], ids=["who waits", "who plays"])
async def test_who_leaves_while_all_are_played_ends_the_cohort(leaver):
    room = Room()
    room.scorer.gate = anyio.Event()
    scopes = [anyio.CancelScope() for _ in range(3)]

    async def join(place: int) -> None:
        with scopes[place]:
            await room.join(place)

    async with anyio.create_task_group() as tasks:
        for place in range(3):
            tasks.start_soon(join, place)
            await settle()
        assert len(room.scorer.played) == 1
        scopes[leaver].cancel()
    assert room.scorer.was_cancelled
    assert sorted(room.ended) == [f"r-5-{place}" for place in range(3) if place != leaver]
    assert {error.status for error in room.ended.values()} == {503}


async def test_who_waits_for_nobody_is_told_how_many_came():
    room = Room(size=3, wait_s=0.05)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(room.join, 0)
        tasks.start_soon(room.join, 1)
    told = sorted(str(error) for error in room.ended.values())
    assert told[0].startswith("1 of 3 attempts at task 5 came within 0.05 s")
    assert told[1].startswith("2 of 3 attempts at task 5 came")
    assert {error.status for error in room.ended.values()} == {504}
