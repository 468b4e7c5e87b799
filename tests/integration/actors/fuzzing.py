"""A seeded fuzzer of links: broken frames into both of their sides.

Each case is a few sound frames, broken in a few places, given in pieces to one of three targets: a
bare reader, a caller (what a hostile worker could send) and a service (what a hostile peer could
send). Every case must end with a typed error or none at all, in little time and little memory.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import resource
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gymrl.actors import Actor, SpawnOptions, messages
from gymrl.actors.actor import contract_of
from gymrl.actors.channel import Channel
from gymrl.actors.codec import ValueDecoder
from gymrl.actors.failures import describe
from gymrl.actors.frames import HEADER, MAGIC, SEGMENT, FrameReader, FrameWriter
from gymrl.actors.link import Caller
from gymrl.actors.service import ActorService
from gymrl.errors import ProtocolError

LIMIT = 1 << 20
OPTIONS = SpawnOptions(max_frame_bytes=LIMIT, cancel_timeout_s=0.1)
SIZES = (0, 1, 2**16 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
# Heads of containers and extensions that announce far more than follows.
ANNOUNCEMENTS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x91" * 2000,
    b"\x81\xa1k" * 2000,
    b"\xc7\x13\x01" + bytes(8) + b"\x03\x01|S0" + b"\xff" * 6,
)


class Item(msgspec.Struct):
    token_ids: npt.NDArray[np.int32]
    text: str = ""
    body: bytes = b""


class Target(Actor):
    async def any(self, value: Any = None) -> Any:
        return value

    async def items(self, items: list[Item], number: int = 0) -> list[Item]:
        return items

    async def wait(self) -> None:
        await asyncio.sleep(60)

    async def count(self, n: int) -> AsyncIterator[int]:
        for number in range(min(n, 1000)):
            yield number


class Sink(asyncio.Transport):
    """A transport that keeps nothing of what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: Any) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    close = abort


def sound_frames() -> list[bytes]:
    """Frames of every kind of message, with every kind of payload."""
    rng = np.random.default_rng(0)
    items = [Item(rng.integers(0, 9, n).astype(np.int32), "t" * n, bytes(n)) for n in (0, 5, 300)]
    payloads = (
        {"value": {"a": [1, 2.5, None, True, b"x", "y"], "n": np.arange(7, dtype=np.float32)}},
        {"items": items, "number": 3},
        {"n": 20},
        {},
        items,
        describe(ValueError("what", 1)),
        describe(ExceptionGroup("many", [KeyError("a"), OSError(2, "none", "file")])),
        np.zeros((3, 4, 5), np.uint16),
        [1, [2, [3, [4]]]],
    )
    heads: list[messages.Message] = [
        messages.Hello(1, 2),
        messages.Start("m", "Target", None, False, "n"),
        messages.Ready(),
        messages.Credit(1, 2),
        messages.Credit(3, 2**40),
        messages.Cancel(1),
        messages.Cancel(3),
        messages.End(3),
        messages.Cancelled(2),
        messages.Close(1.5),
        messages.Closed(),
        messages.Ping(1),
        messages.Pong(1),
        messages.Release([1, 2]),
        messages.Forget([1]),
    ]
    with_payload: list[messages.Message] = [
        messages.Call(1, "any"),
        messages.Call(2, "items"),
        messages.Call(3, "wait"),
        messages.Call(4, "count"),
        messages.Open(5, "count", 4, 1000),
        messages.Open(6, "count", -1, -(2**62)),
        messages.Open(7, "any", 2**62, 2**62),
        messages.Result(1),
        messages.Result(2),
        messages.Item(3),
        messages.Failed(1),
        messages.Failed(3),
        messages.Refused(),
        messages.Closed(),
    ]
    frames = []
    for head in heads:
        writer = FrameWriter(LIMIT)
        writer.write(head)
        frames.append(b"".join(writer.take()))
    for head in with_payload:
        for payload in payloads:
            writer = FrameWriter(LIMIT)
            writer.write(head, payload)
            frames.append(b"".join(writer.take()))
    return frames


class Report(msgspec.Struct):
    """What became of a run.

    Attributes:
        cases: Cases that were run.
        outcomes: How they ended, by target and error.
        slowest_s: The most time of a processor that one case took.
        traced_peak_bytes: The most memory that one traced case held.
        rss_growth_bytes: Growth of the process's highest resident size over the run.
    """

    cases: int = 0
    outcomes: dict[str, int] = {}
    slowest_s: float = 0.0
    traced_peak_bytes: int = 0
    rss_growth_bytes: int = 0


class Fuzzer:
    """Runs cases from one seed; a case can be run again alone by its number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._frames = sound_frames()
        self._contract = contract_of(Target)
        self._outcomes: collections.Counter[str] = collections.Counter()
        self._report = Report()
        self._decoder = ValueDecoder()
        kinds = (Any, list[Item], dict[str, Any], Item)
        self._compiled = [self._decoder.compile(kind) for kind in kinds]

    async def run(self, cases: int, seconds: float, trace_every: int = 50) -> Report:
        """Run up to so many cases, but no longer than `seconds`."""
        began = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(cases):
            if time.monotonic() - began > seconds:
                break
            await self.case(number, traced=number % trace_every == 0)
            self._report.cases += 1
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._report.rss_growth_bytes = (after - before) << 10
        self._report.outcomes = dict(self._outcomes)
        return self._report

    async def case(self, number: int, traced: bool = False) -> None:
        """One case; raises what no case may raise."""
        rng = random.Random(f"{self._seed}/{number}")
        data = self.broken(rng)
        # The reader comes first on every link, and is the quickest to try.
        target = (self._call, self._serve)[number % 2] if number % 8 < 2 else self._read
        if traced:
            tracemalloc.start()
        began = time.process_time()
        try:
            outcome = await target(data, rng)
        except Exception as error:
            error.add_note(f"fuzz case {number} of seed {self._seed}: {data[:200].hex()}")
            raise
        finally:
            took = time.process_time() - began
            if traced:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                self._report.traced_peak_bytes = max(self._report.traced_peak_bytes, peak)
        self._report.slowest_s = max(self._report.slowest_s, took)
        self._outcomes[f"{target.__name__[1:]}: {outcome}"] += 1

    def broken(self, rng: random.Random) -> bytes:
        """A few frames, broken in a few places."""
        data = bytearray(b"".join(rng.choices(self._frames, k=rng.randint(1, 4))))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
            self._break(data, rng)
        if rng.random() < 0.15:
            del data[rng.randrange(len(data) + 1) :]
        return bytes(data)

    @staticmethod
    def _break(data: bytearray, rng: random.Random) -> None:
        place = rng.randrange(len(data)) if data else 0
        match rng.randrange(8):
            case 0 if data:
                data[place] = rng.randrange(256)
            case 1 if data:
                data[place] ^= 1 << rng.randrange(8)
            case 2:
                data[place:place] = rng.randbytes(rng.randint(1, 20))
            case 3:
                del data[place : place + rng.randint(1, 40)]
            case 4:
                data[place:place] = data[place : place + rng.randint(1, 60)]
            case 5:
                data[place : place + 6] = rng.choice(ANNOUNCEMENTS)
            case 6 if len(data) >= HEADER.size:
                flags = rng.choice((0, SEGMENT, 2, 0xFFFF))
                HEADER.pack_into(
                    data,
                    0,
                    rng.choice((MAGIC, MAGIC, MAGIC, 0)),
                    flags if rng.random() < 0.5 else 0,
                    rng.choice((0, 2, 3, 4, 2**16, 2**32 - 1)),
                    rng.choice((*range(40), *SIZES)),
                    rng.choice((0, 0, 0, *SIZES)),
                )
            case _ if data:
                size = rng.choice((1, 2, 4, 8))
                value = rng.choice(SIZES) % 256**size
                data[place : place + size] = value.to_bytes(size, rng.choice(("big", "little")))

    # --- targets ---------------------------------------------------------------------------------

    @staticmethod
    def _feed(get_buffer: Any, advance: Any, data: bytes, rng: random.Random) -> None:
        piece = rng.choice((1 << 20, 1 << 20, max(37, len(data) // 20), max(1, len(data) // 100)))
        view = memoryview(data)
        while view:
            buffer = get_buffer()
            count = min(len(buffer), len(view), piece)
            assert count > 0
            buffer[:count] = view[:count]
            advance(count)
            view = view[count:]

    async def _read(self, data: bytes, rng: random.Random) -> str:
        decoder, compiled = self._decoder, rng.choice(self._compiled)

        def deliver(head: Any, payload: memoryview, region: Any, size: int) -> None:
            if payload:
                decoder.decode(payload, region, compiled)

        reader = FrameReader({}, deliver, LIMIT)
        try:
            self._feed(reader.get_buffer, reader.advance, data, rng)
            torn = reader.end()
        except (ProtocolError, msgspec.ValidationError) as error:
            return type(error).__name__
        return "whole" if torn is None else type(torn).__name__

    def _channel(self) -> tuple[Channel, Sink, list[Exception | None]]:
        lost: list[Exception | None] = []

        def otherwise(head: Any, payload: memoryview, region: Any, size: int) -> None:
            pass

        channel = Channel(OPTIONS, None, otherwise, lost.append)
        sink = Sink()
        channel.connection_made(sink)
        return channel, sink, lost

    def _push(self, channel: Channel, sink: Sink, data: bytes, rng: random.Random) -> None:
        def advance(count: int) -> None:
            channel.buffer_updated(count)
            if sink.aborted:
                raise ConnectionAbortedError

        with contextlib.suppress(ConnectionAbortedError):
            self._feed(lambda: channel.get_buffer(-1), advance, data, rng)

    async def _call(self, data: bytes, rng: random.Random) -> str:
        """A caller with calls and a stream under way hears the broken frames."""
        channel, sink, lost = self._channel()
        caller = Caller("fuzzed", self._contract, OPTIONS)
        caller.channel = channel
        channel.handlers.update(caller.handlers)
        loop = asyncio.get_running_loop()
        calls = [
            loop.create_task(caller.call("any", (1,), {})),
            loop.create_task(caller.call("items", ([],), {})),
        ]
        stream = caller.stream("count", (5,), {})
        calls.append(loop.create_task(_first(stream)))
        await asyncio.sleep(0)
        self._push(channel, sink, data, rng)
        await asyncio.sleep(0)
        channel.connection_lost(None)
        assert len(lost) == 1
        caller.end(lambda: ProtocolError("the fuzzed link ended"))
        await asyncio.wait(calls)
        for call in calls:
            assert isinstance(call.exception(), (Exception, type(None)))
        await stream.aclose()
        assert caller.in_flight == 0
        return type(lost[0]).__name__

    async def _serve(self, data: bytes, rng: random.Random) -> str:
        """A service hears the broken frames, and stops with nothing running."""
        channel, sink, lost = self._channel()
        service = ActorService(Target(), self._contract, channel, "fuzzed")
        channel.handlers.update(service.handlers)
        self._push(channel, sink, data, rng)
        await asyncio.sleep(0)
        channel.connection_lost(None)
        await service.stop()
        assert not service._running
        return type(lost[0]).__name__


async def _first(stream: Any) -> Any:
    async for item in stream:
        return item
    return None
