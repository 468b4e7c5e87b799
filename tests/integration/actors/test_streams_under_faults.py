"""Streams that are left, stuck, shared or starved."""

from __future__ import annotations

# ruff: noqa: ASYNC110, ASYNC115, PT012
# The other side is another process: its state is polled.
import asyncio
import gc
import os
import resource

import anyio
import pytest

from gymrl.actors import SpawnOptions, spawn
from gymrl.errors import ActorClosedError, ActorStartError, EncodeError, RemoteError
from tests.integration.actors.faulty_actors import Poor, Producer, Tiny
from tests.integration.actors.watching import segments, what_is_left, what_is_open

both = pytest.mark.parametrize("in_process", [False, True], ids=["process", "in_process"])


async def idle(handle) -> None:
    """Within a moment no stream and no task of one is left, on either side."""
    with anyio.fail_after(30):
        while await handle.call("open_streams") or handle.in_flight:
            await anyio.sleep(0.01)


@both
async def test_a_consumer_may_leave_at_every_position(in_process):
    # THUDM/slime#2078: early aclose of the generator.
    options = SpawnOptions(stream_window=4)
    async with spawn(Producer, in_process=in_process, options=options) as producer:
        baseline = await producer.call("tasks")
        for position in range(12):
            read = []
            async with producer.stream("numbers", 10) as stream:
                async for item in stream:
                    if len(read) == position:
                        break
                    read.append(int.from_bytes(item, "big"))
            assert read == list(range(min(position, 10)))
            await idle(producer)
        for position in range(0, 80, 8):  # cancelled while it waits, or between two items
            with anyio.CancelScope() as scope:
                count = 0
                async for _ in producer.stream("endless"):
                    count += 1
                    if count >= position:
                        scope.cancel()
                        await anyio.sleep(0)
            await idle(producer)
        for position in range(4):  # forgotten, and collected
            stream = producer.stream("endless")
            for _ in range(position):
                await anext(stream)
            del stream
            gc.collect()
            await idle(producer)
        with anyio.fail_after(30):
            while await producer.call("tasks") != baseline:
                await anyio.sleep(0.01)


async def test_a_stuck_stream_does_not_hold_up_its_neighbours():
    options = SpawnOptions(stream_window=8, stream_window_bytes=1 << 20)
    async with spawn(Producer, options=options) as producer:
        stuck = producer.stream("numbers", 10_000, 100_000)
        await anext(stuck)
        with anyio.fail_after(30):
            neighbour = [item async for item in producer.stream("numbers", 3000)]
            large = [len(item) async for item in producer.stream("numbers", 40, 700_000)]
            assert [int.from_bytes(item, "big") for item in neighbour] == list(range(3000))
            assert large == [700_004] * 40
            assert await producer.call("open_streams") == 1
            await stuck.aclose()
        await idle(producer)


@both
async def test_a_producer_that_ignores_its_cancellation_is_left_behind_and_reported(in_process):
    options = SpawnOptions(cancel_timeout_s=0.2)
    async with spawn(Producer, in_process=in_process, options=options) as producer:
        with anyio.fail_after(30):
            async with producer.stream("stubborn") as stream:
                await anext(stream)
            assert await producer.call("open_streams") == 1
            await producer.call("wake")
        await idle(producer)


@both
async def test_hundreds_of_streams_over_one_link_keep_their_order(in_process):
    async with spawn(Producer, in_process=in_process) as producer:
        ends = []

        async def read(number: int) -> None:
            stream = producer.stream("numbers", number, number)
            got = [int.from_bytes(item[:4], "big") async for item in stream]
            ends.append(got == list(range(number)))

        with anyio.fail_after(40):
            async with anyio.create_task_group() as group:
                for number in range(300):
                    group.start_soon(read, number)
        assert ends == [True] * 300
        await idle(producer)


@both
async def test_closing_under_open_streams_ends_their_readers(in_process):
    async with spawn(Producer, in_process=in_process) as producer:
        ends = []

        async def read() -> None:
            try:
                async for _ in producer.stream("endless"):
                    await anyio.sleep(0.001)
            except ActorClosedError:
                ends.append(True)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(read)
            await anyio.sleep(0.2)
            await producer.close()
        assert ends == [True] * 20


# --- out of memory, out of descriptors ---------------------------------------------------------------


async def test_without_descriptors_large_messages_go_inline_in_both_directions():
    async with spawn(Poor) as poor:
        assert await poor.call("limit", "RLIMIT_NOFILE", 128) is None
        assert await poor.call("take_descriptors") > 50
        with anyio.fail_after(20):
            made = await poor.call("make", 4 << 20)  # no descriptor for a segment: inline
            assert int(made.sum()) == 4 << 20
        await poor.call("give_descriptors_back")
        assert await poor.call("total", made) == 4 << 20


async def test_without_memory_for_segments_large_messages_go_inline():
    async with spawn(Poor) as poor:
        # A memory file may not grow beyond the limit of file sizes.
        await poor.call("limit", "RLIMIT_FSIZE", 1 << 20)
        before = segments()
        with anyio.fail_after(20):
            made = await poor.call("make", 4 << 20)
            assert int(made.sum()) == 4 << 20
            assert segments() == before


async def test_a_call_that_runs_out_of_memory_fails_alone():
    async with spawn(Poor) as poor:
        await poor.call("limit", "RLIMIT_AS", 3 << 30)
        with anyio.fail_after(20):
            with pytest.raises(MemoryError):
                await poor.call("allocate", 8 << 30)
            with pytest.raises(RemoteError, match="ArrayMemoryError"):
                await poor.call("make", 8 << 30)
            assert await poor.call("total", (await poor.call("make", 1 << 20))) == 1 << 20


async def test_a_driver_without_descriptors_gets_a_start_error_and_recovers():
    async with spawn(Tiny) as tiny:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = []
        before = what_is_open()
        resource.setrlimit(resource.RLIMIT_NOFILE, (before.descriptors + 40, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(
                8
            ):  # short of ever fewer descriptors: each place of the start is reached
                with pytest.raises(ActorStartError, match="Too many open files"):
                    await spawn(Tiny)
                os.close(taken.pop())
            assert await tiny.call("ping_back", 5) == 5
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert await what_is_left(before) == {}
        async with spawn(Tiny) as another:
            assert await another.call("ping_back", 6) == 6


# --- nothing grows -----------------------------------------------------------------------------------


async def test_a_thousand_actors_in_process_leave_nothing():
    async def one(number: int) -> None:
        async with spawn(Producer, in_process=True) as producer:
            assert await producer.call("open_streams") == 0
            async with producer.stream("endless") as stream:
                await anext(stream)
            if number % 3 == 0:
                producer.kill()

    await one(0)
    before = what_is_open()
    objects = count_objects()
    for number in range(1000):
        await one(number)
    assert await what_is_left(before) == {}
    assert count_objects() - objects < 500


def count_objects() -> int:
    gc.collect()
    kinds = ("InProcessHandle", "StreamState", "Window", "OwnedTasks", "ActorStream", "Producer")
    return sum(type(thing).__name__ in kinds for thing in gc.get_objects())


async def test_sixty_worker_processes_leave_nothing():
    async def one(number: int) -> None:
        options = SpawnOptions(heartbeat_timeout_s=20.0)
        async with spawn(Tiny, options=options) as tiny:
            assert await tiny.call("ping_back", number) == number
            if number % 4 == 0:
                tiny.kill()

    async def batch(numbers: range) -> None:
        async with anyio.create_task_group() as group:
            for number in numbers:
                group.start_soon(one, number)

    await batch(range(2))
    before = what_is_open()
    for start in range(0, 60, 4):
        await batch(range(start, start + 4))
    assert await what_is_left(before) == {}


async def test_the_loops_callbacks_do_not_pile_up_over_ten_thousand_calls():
    async with spawn(Tiny) as tiny:
        for _ in range(10):
            async with anyio.create_task_group() as group:
                for number in range(1000):
                    group.start_soon(tiny.call, "ping_back", number)
        assert tiny.in_flight == 0
        assert len(asyncio.all_tasks()) < 12


async def test_a_wrong_result_names_the_method():
    async with spawn(Tiny) as tiny:
        with pytest.raises(EncodeError, match="ping_back"):
            await tiny.call("ping_back", "x")
