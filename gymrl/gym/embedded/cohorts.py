"""Requests that are answered together: all attempts at a task, for a scorer that compares them.

The requests of a cohort wait for each other, are played as one, and end as one: with their answers,
or all with the same error, so that whoever tries again tries with all of them.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Generic, TypeVar

import anyio
import msgspec

from gymrl.gym.embedded.base import InnerServerError, RefusedRequest

MAX_ANSWERED = 1 << 16
"""Attempts that were answered and are remembered."""

_TRIED_AGAIN = re.compile(r"\.\d+$")

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


class Member(msgspec.Struct, frozen=True):
    """Which attempt a request is.

    Attributes:
        task: Number of its task.
        place: Among the attempts at the task, from 0.
        rollout_id: Of the attempt; the same with ``.<number>`` behind it when it is made again.
    """

    task: int
    place: int
    rollout_id: str


class _Cohort(Generic[RequestT, AnswerT]):
    def __init__(self) -> None:
        self.requests: dict[int, RequestT] = {}
        self.rollout_ids: dict[int, str] = {}
        self.answers: dict[int, AnswerT] = {}
        self.error: InnerServerError | RefusedRequest | None = None
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()


class Cohorts(Generic[RequestT, AnswerT]):
    """Gathers requests into cohorts.

    Args:
        size: Attempts of a cohort. Of more attempts at a task each `size` make one.
        play: Answers a whole cohort, its requests by place.
        wait_s: For the others of a cohort.
    """

    def __init__(
        self,
        size: int,
        play: Callable[[Sequence[RequestT]], Awaitable[Sequence[AnswerT]]],
        wait_s: float,
    ) -> None:
        self._size = size
        self._play = play
        self._wait_s = wait_s
        self._open: dict[tuple[int, int], list[_Cohort[RequestT, AnswerT]]] = {}
        self._answered: OrderedDict[str, None] = OrderedDict()

    async def join(self, member: Member, request: RequestT) -> AnswerT:
        """One request's answer, once the others of its cohort are here.

        Cancelled while it waits for others, it leaves and another attempt may take its place.
        Cancelled when all are here, it ends the cohort: the others fail with it.

        Raises:
            RefusedRequest: Its cohort was answered without it: an attempt that is made again alone.
            InnerServerError: The cohort failed, by its own fault or by a member's end; or not all
                of it came in time.
        """
        tried_before = _TRIED_AGAIN.sub("", member.rollout_id)
        if tried_before != member.rollout_id and tried_before in self._answered:
            raise RefusedRequest(
                f"the {self._size} attempts at task {member.task} were scored together, and attempt "
                f"{member.place} can't be made again without the others",
                HTTPStatus.CONFLICT,
            )
        key = (member.task, member.place // self._size)
        cohort = self._with_room(key, member.place)
        cohort.requests[member.place] = request
        cohort.rollout_ids[member.place] = tried_before
        if len(cohort.requests) == self._size:
            self._take(key, cohort)
            await self._run(cohort)
        else:
            await self._wait(key, cohort, member)
        if cohort.error is not None:
            raise type(cohort.error)(str(cohort.error), cohort.error.status)
        return cohort.answers[member.place]

    def _with_room(self, key: tuple[int, int], place: int) -> _Cohort[RequestT, AnswerT]:
        """One that lacks this attempt: two runs at a time may have tasks of one number."""
        cohorts = self._open.setdefault(key, [])
        for cohort in cohorts:
            if place not in cohort.requests:
                return cohort
        cohorts.append(_Cohort())
        return cohorts[-1]

    def _take(self, key: tuple[int, int], cohort: _Cohort[RequestT, AnswerT]) -> None:
        self._open[key].remove(cohort)
        if not self._open[key]:
            del self._open[key]

    async def _wait(
        self, key: tuple[int, int], cohort: _Cohort[RequestT, AnswerT], member: Member
    ) -> None:
        try:
            with anyio.move_on_after(self._wait_s):
                await cohort.ended.wait()
            if len(cohort.requests) == self._size:
                await cohort.ended.wait()
                return
        except anyio.get_cancelled_exc_class():
            if len(cohort.requests) == self._size:
                cohort.scope.cancel()
            else:
                self._leave(key, cohort, member)
            raise
        self._leave(key, cohort, member)
        raise InnerServerError(
            f"{len(cohort.requests) + 1} of {self._size} attempts at task {member.task} came within "
            f"{self._wait_s:g} s, and they are scored together: make a multiple of {self._size} "
            "attempts at each task (num_generations), and let as many rows run at a time",
            HTTPStatus.GATEWAY_TIMEOUT,
        )

    def _leave(
        self, key: tuple[int, int], cohort: _Cohort[RequestT, AnswerT], member: Member
    ) -> None:
        del cohort.requests[member.place]
        if not cohort.requests:
            self._take(key, cohort)

    async def _run(self, cohort: _Cohort[RequestT, AnswerT]) -> None:
        places = sorted(cohort.requests)
        cohort.error = InnerServerError(
            "another attempt at the task ended before all were scored together",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )
        try:
            with cohort.scope:
                answers = await self._play([cohort.requests[place] for place in places])
                cohort.answers = dict(zip(places, answers, strict=True))
                cohort.error = None
        except (InnerServerError, RefusedRequest) as error:
            cohort.error = error
        finally:
            if cohort.error is None:
                self._note(cohort.rollout_ids.values())
            cohort.ended.set()

    def _note(self, rollout_ids: Iterable[str]) -> None:
        self._answered.update(dict.fromkeys(rollout_ids))
        while len(self._answered) > MAX_ANSWERED:
            self._answered.popitem(last=False)
