"""A burst of calls of one row each to a worker that holds its tokenizer."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from benchmarks.comparison import Comparison, Measure, take_turns
from benchmarks.rollout.answers import Shape, prepared_row
from benchmarks.rollout.stub_agent import StubAgent
from gymrl.actors import ActorHandle, SpawnOptions, spawn
from gymrl.concurrency import OwnedTasks
from gymrl.config import GymConfig
from gymrl.gym.service import GymService
from gymrl.types import Failure, Row, Trajectory

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.peers.process import Peer


class Size(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        calls: At once, of one row each.
        handed: Calls that hand a Ray actor its tokenizer, a bounded number.
        rounds: Turns.
        shape: Of each rollout.
    """

    calls: int = 1024
    handed: int = 16
    rounds: int = 4
    shape: Shape = Shape()


TINY = Size(calls=4, handed=1, rounds=1)

FORMS = {
    "Ray": (
        "stream",
        "Ray: a streaming generator and aiohttp's own json(), as it is mostly written",
    ),
    "Ray, fastest form": ("list", "Ray: one call that returns a list, and answers read by msgspec"),
}


async def measure(size: Size, tokenizer: Path, ray: Peer | None) -> list[Comparison]:
    """The burst, and the bytes of its calls."""
    async with (
        spawn(StubAgent, options=SpawnOptions(name="agent"), shape=size.shape) as agent,
        spawn(
            GymService,
            config=GymConfig(
                registry_url=await agent.call("registry_url"), tokenizer=str(tokenizer)
            ),
        ) as worker,
    ):
        await worker.call("spin_up", [], "policy")
        if ray is not None:
            url = await agent.call("run_url")
            await ray.ask("prepare_gym", url=url, tokenizer=str(tokenizer))
        return [
            *await _bursts(size, worker, tokenizer, ray),
            *await _bytes(size, worker),
        ]


async def _bursts(
    size: Size, worker: ActorHandle, tokenizer: Path, ray: Peer | None
) -> list[Comparison]:
    rows = [prepared_row(index) for index in range(size.calls)]

    async def burst() -> float:
        tasks = OwnedTasks("burst")
        began = time.perf_counter()
        calls = [tasks.start(_one(worker, row, size.shape), "call") for row in rows]
        await asyncio.wait(calls)
        seconds = time.perf_counter() - began
        await tasks.close()
        return seconds

    async def ours() -> float:
        await burst()  # the agent's connections are open in the one that counts, as they are in Ray
        return await burst()

    others: dict[str, Measure] = {}
    handed = None
    if ray is not None:
        body = rows[0].body.decode()
        for name, (form, _) in FORMS.items():
            others[name] = partial(ray.seconds, "admission", calls=size.calls, body=body, form=form)
        handed = await ray.seconds(
            "admission", calls=size.handed, body=body, form="stream", tokenizer=str(tokenizer)
        )
    turns = await take_turns(ours, others, size.rounds)
    shown = {name: 1000 * value / size.calls for name, value in turns.medians().items()}
    if handed is not None:
        shown[f"Ray, handed the tokenizer ({size.handed} calls)"] = 1000 * handed / size.handed
    return [
        Comparison(
            name=f"admission: {size.calls:,} calls of one row at once",
            unit="ms a call",
            sides=shown,
            ratio=f"{name} / gymrl",
            value=turns.times_faster(name),
            best=turns.best_faster(name),
            target=4.0,
            at_least=True,
            note=FORMS[name][1],
        )
        for name in FORMS
    ]


async def _one(worker: ActorHandle, row: Row, shape: Shape) -> None:
    async for result in worker.stream("run_rollouts", [row]):
        match result.outcome:
            case Failure(message=message):
                raise RuntimeError(f"row {row.index}: {message}")
            case Trajectory() as outcome:
                _check(outcome, shape)


def _check(outcome: Trajectory, shape: Shape) -> None:
    if outcome.num_tokens != shape.tokens or outcome.turns[0].generation_text is None:
        raise RuntimeError("a row came back incomplete")


async def _bytes(size: Size, worker: ActorHandle) -> list[Comparison]:
    beyond: list[int] = []
    for index in range(min(size.calls, 64)):
        row = prepared_row(index)
        before = worker.bytes_sent
        await _one(worker, row, size.shape)
        beyond.append(worker.bytes_sent - before - len(row.body))
    return [
        Comparison(
            name="bytes of a call beyond its row",
            unit="bytes",
            sides={"least": min(beyond), "most": max(beyond)},
            ratio="most",
            value=max(beyond),
            target=2000,
            at_least=False,
            note="the tokenizer is sent never; its path is, once, at spawn",
        ),
        Comparison(
            name="bytes of a call beyond its row",
            unit="bytes",
            sides={"least": min(beyond), "most": max(beyond)},
            ratio="most - least",
            value=max(beyond) - min(beyond),
            target=16,
            at_least=False,
            note="numbers take one to five bytes: an index of 200 takes a byte more than one of 100",
        ),
    ]
