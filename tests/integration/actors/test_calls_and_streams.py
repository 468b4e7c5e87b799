"""One behaviour in a worker process and in the in-process twin."""

# ruff: noqa: ASYNC110, PT012, RUF043
# A worker's state is polled, and streams raise while they are read.
from __future__ import annotations

import asyncio
import math
import os
import threading

import anyio
import anyio.lowlevel
import numpy as np
import psutil
import pytest

from gymrl.actors import SpawnOptions, spawn
from gymrl.concurrency import closing_stream, gather_bounded
from gymrl.errors import (
    ActorClosedError,
    ActorDiedError,
    ActorStartError,
    EncodeError,
    FrameTooLargeError,
    RemoteError,
)
from tests.integration.actors.sample_actors import (
    BadClose,
    BadSetup,
    Cargo,
    Counter,
    Echo,
    Keeping,
    Point,
    Sleeper,
)

both = pytest.mark.parametrize("in_process", [False, True], ids=["process", "in_process"])


async def became(sleeper, history: list[str]) -> None:
    with anyio.fail_after(30):
        while await sleeper.call("history") != history:
            await anyio.sleep(0.01)


@both
async def test_calls_keep_state_and_take_names_and_defaults(in_process):
    async with spawn(Counter, in_process=in_process, start=3) as counter:
        assert await counter.call("add", 4) == 7
        assert await counter.call("add", n=1, times=3) == 10
        assert await counter.call("add", np.int64(1)) == 11
        assert (counter.pid == os.getpid()) is in_process
        assert not counter.closed
    assert counter.closed


@both
async def test_a_stream_yields_in_order_and_ends(in_process):
    async with spawn(Counter, in_process=in_process) as counter:
        assert [i async for i in counter.stream("count", 1000)] == list(range(1000))
        assert [i async for i in counter.stream("count", 0)] == []


@both
async def test_many_tasks_may_use_one_handle(in_process):
    async with spawn(Counter, in_process=in_process) as counter:

        async def one(_):
            return await counter.call("add", 1)

        results = await gather_bounded(one, range(500))
        assert sorted(results) == list(range(1, 501))


@both
async def test_values_come_back_as_annotated(in_process):
    async with spawn(Echo, in_process=in_process) as echo:
        assert await echo.call("point", Point(1, "a")) == Point(2, "a")
        assert await echo.call("point", {"x": 1}) == Point(2)
        assert await echo.call("any", Point(1)) == {"x": 1, "label": ""}
        value = {"a": [1, 2.5, None, True, "ü"], (1, 2): b"x", "inf": math.inf}
        assert await echo.call("any", value) == value
        assert math.isnan(await echo.call("any", math.nan))


@both
@pytest.mark.parametrize("length", [0, 3, 5000, 1 << 18, 1 << 21])
async def test_arrays_of_every_size_come_back_equal_and_read_only(in_process, length):
    async with spawn(Echo, in_process=in_process) as echo:
        array = np.arange(length, dtype=np.int32)
        cargo = [Cargo("a", array, bytes(length)), Cargo("b", array[::2])]
        back = await echo.call("cargo", cargo)
        assert [c.name for c in back] == ["a", "b"]
        np.testing.assert_array_equal(back[0].token_ids, array)
        np.testing.assert_array_equal(back[1].token_ids, array[::2])
        assert back[0].body == bytes(length)
        assert not back[0].token_ids.flags.writeable


@both
@pytest.mark.parametrize(
    "array",
    [
        np.array(3.5),
        np.zeros((2, 0, 3), np.float16),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([True, False]),
        np.array(["a", "bcd"]),
        np.array(["2026-01-01"], "datetime64[s]"),
        np.arange(4, dtype=">i4"),
        np.array([1 + 2j]),
        np.arange(24).reshape(2, 3, 4)[:, ::-1, 1:3],
        np.array([np.nan, np.inf, -np.inf]),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
async def test_arrays_of_every_kind_come_back_equal(in_process, array):
    async with spawn(Echo, in_process=in_process) as echo:
        back = await echo.call("array", array)
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


async def test_an_array_may_be_changed_once_it_was_sent():
    async with spawn(Echo) as echo:
        for size in (10, 1 << 15, 1 << 20):
            array = np.zeros(size, np.int64)
            async with anyio.create_task_group() as group:
                received = []

                async def call(array=array, received=received):
                    received.append(await echo.call("array", array))

                group.start_soon(call)
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()
                array += 1
            assert received[0].sum() in (0, size)


async def test_a_received_array_stays_what_it_is_while_others_arrive():
    async with spawn(Echo) as echo:
        kept = [await echo.call("array", np.full(1 << 19, i, np.int32)) for i in range(6)]
        assert [int(a[0]) for a in kept] == list(range(6))
        assert [int(a[-1]) for a in kept] == list(range(6))
        del kept
        for i in range(20):
            assert int((await echo.call("array", np.full(1 << 19, i, np.int32)))[7]) == i


@both
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("\ud800", "value"),
        (2**64, "value"),
        (-(2**63) - 1, "value"),
        ({"a": [1, {"b": threading.Lock()}]}, "value['a'][1]['b']"),
        ({"a": {threading.Lock(): 1}}, "value['a']{key lock}"),
        ([np.array([object()])], "value[0]"),
        ({"k": np.zeros(2, [("a", "i4")])}, "value['k']"),
        ([Point(2**70)], "value[0].x"),
        ({"\udcff": 1}, "value{key '\\udcff'}"),
    ],
    ids=str,
)
async def test_what_cannot_travel_is_named_and_the_link_survives(in_process, value, path):
    async with spawn(Echo, in_process=in_process) as echo:
        with pytest.raises(EncodeError) as caught:
            await echo.call("any", value)
        assert path in str(caught.value)
        assert await echo.call("any", 1) == 1


@both
async def test_a_nesting_that_is_too_deep_is_refused_and_the_link_survives(in_process):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    async with spawn(Echo, in_process=in_process) as echo:
        with pytest.raises(EncodeError, match="nested"):
            await echo.call("any", {"deep": deep})
        looped = []
        looped.append(looped)
        with pytest.raises(EncodeError, match="nested"):
            await echo.call("any", looped)
        assert await echo.call("any", 1) == 1


@both
async def test_a_result_that_cannot_travel_fails_that_call_alone(in_process):
    async with spawn(Echo, in_process=in_process) as echo:
        with pytest.raises(EncodeError, match=r"Echo.untravelling\['deep'\]\[0\]"):
            await echo.call("untravelling")
        with pytest.raises(EncodeError, match="Expected `int`, got `str`"):
            await echo.call("lies")
        assert await echo.call("any", 1) == 1


@both
async def test_wrong_arguments_are_refused_by_name_before_anything_is_sent(in_process):
    async with spawn(Counter, in_process=in_process) as counter:
        with pytest.raises(EncodeError, match=r"Counter.add\(\): argument n: .*str"):
            await counter.call("add", "4")
        with pytest.raises(TypeError, match="misses argument 'n'"):
            await counter.call("add")
        with pytest.raises(TypeError, match="has no argument 'm'"):
            await counter.call("add", 1, m=2)
        with pytest.raises(TypeError, match="'n' twice"):
            await counter.call("add", 1, n=2)
        with pytest.raises(TypeError, match="takes 2 positional"):
            await counter.call("add", 1, 2, 3)
        with pytest.raises(AttributeError, match="it has: add, count"):
            await counter.call("subtract", 1)
        with pytest.raises(TypeError, match="use .stream"):
            await counter.call("count", 1)
        with pytest.raises(TypeError, match="use .call"):
            counter.stream("add", 1)
        with pytest.raises(EncodeError, match="argument n"):
            counter.stream("count", None)


@both
async def test_a_call_on_a_closed_handle_is_refused(in_process):
    async with spawn(Counter, in_process=in_process) as counter:
        pass
    with pytest.raises(ActorClosedError):
        await counter.call("add", 1)
    with pytest.raises(ActorClosedError):
        async for _ in counter.stream("count", 1):
            pass
    await counter.close()


@both
async def test_closing_fails_what_is_in_flight(in_process):
    async with spawn(Sleeper, in_process=in_process) as sleeper:
        task = asyncio.get_running_loop().create_task(sleeper.call("sleep", 60))
        await anyio.sleep(0.1)
    with pytest.raises(ActorClosedError):
        await task


@both
async def test_killing_fails_what_is_in_flight(in_process):
    async with spawn(Sleeper, in_process=in_process) as sleeper:
        task = asyncio.get_running_loop().create_task(sleeper.call("sleep", 60))
        await anyio.sleep(0.1)
        sleeper.kill()
        with pytest.raises(ActorDiedError) as caught:
            await task
        assert caught.value.signal == 9
        with pytest.raises(ActorDiedError):
            await sleeper.call("history")


@both
async def test_cancelling_a_caller_cancels_the_callee(in_process):
    options = SpawnOptions(cancel_timeout_s=30)
    async with spawn(Sleeper, in_process=in_process, options=options) as sleeper:
        with anyio.move_on_after(0.1):
            await sleeper.call("sleep", 60)
        assert await sleeper.call("history") == ["started", "cancelled"]
        task = asyncio.get_running_loop().create_task(sleeper.call("sleep", 60))
        await became(sleeper, ["started", "cancelled", "started"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await sleeper.call("history") == ["started", "cancelled"] * 2


async def test_a_callee_that_ignores_its_cancellation_is_left_behind():
    options = SpawnOptions(cancel_timeout_s=0.2)
    async with spawn(Sleeper, options=options) as sleeper:
        task = asyncio.get_running_loop().create_task(sleeper.call("deaf"))
        await became(sleeper, ["deaf"])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await became(sleeper, ["deaf", "ignored"])
        await sleeper.call("wake")
        await became(sleeper, ["deaf", "ignored", "done"])


@both
@pytest.mark.parametrize("way", ["break", "aclose", "with", "cancel", "raise"])
async def test_leaving_a_stream_early_closes_its_generator(in_process, way):
    async with spawn(Sleeper, in_process=in_process) as sleeper:
        if way == "break":
            async for _ in sleeper.stream("slow_numbers"):
                break
        elif way == "aclose":
            async with closing_stream(sleeper.stream("slow_numbers")) as stream:
                await anext(stream)
        elif way == "with":
            async with sleeper.stream("slow_numbers") as stream:
                await anext(stream)
        elif way == "cancel":
            with anyio.CancelScope() as scope:
                async for _ in sleeper.stream("slow_numbers"):
                    scope.cancel()
        else:
            with pytest.raises(KeyError):
                async for _ in sleeper.stream("slow_numbers"):
                    raise KeyError
        with anyio.fail_after(30):
            while await sleeper.call("open_streams"):
                await anyio.sleep(0.01)


@both
async def test_a_stream_that_was_left_has_no_next_item(in_process):
    async with spawn(Sleeper, in_process=in_process) as sleeper:
        stream = sleeper.stream("numbers")
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(Exception, match="was left"):
            await anext(stream)
        unread = sleeper.stream("numbers")
        await unread.aclose()


@both
async def test_a_producer_runs_ahead_by_its_window_only(in_process):
    options = SpawnOptions(stream_window=8)
    async with spawn(Sleeper, in_process=in_process, options=options) as sleeper:
        stream = sleeper.stream("numbers")
        for _ in range(20):
            await anext(stream)
        await anyio.sleep(0.2)
        made = len(await sleeper.call("history"))
        assert 20 <= made <= 20 + 8 + 8
        await stream.aclose()


async def test_large_items_are_held_back_by_their_bytes():
    options = SpawnOptions(stream_window=1000, stream_window_bytes=1 << 20)
    async with spawn(Sleeper, options=options) as sleeper:
        stream = sleeper.stream("numbers", 300_000)
        await anext(stream)
        await anyio.sleep(0.2)
        assert len(await sleeper.call("history")) <= 8
        await stream.aclose()


@both
async def test_a_failed_set_up_is_a_start_error_with_its_traceback(in_process):
    with pytest.raises(ActorStartError, match="the set-up failed") as caught:
        async with spawn(BadSetup, in_process=in_process, how="raise"):
            pass
    assert caught.value.remote_type == "ValueError"
    assert "in setup" in caught.value.remote_traceback
    assert isinstance(caught.value.__cause__, ValueError)


@both
async def test_set_up_arguments_are_checked_at_once(in_process):
    with pytest.raises(EncodeError, match="argument start"):
        spawn(Counter, in_process=in_process, start="three")
    with pytest.raises(TypeError, match="no argument 'begin'"):
        spawn(Counter, in_process=in_process, begin=3)
    with pytest.raises(TypeError, match="misses argument 'how'"):
        spawn(BadSetup, in_process=in_process)
    with pytest.raises(TypeError, match="not a subclass"):
        spawn(dict, in_process=in_process)


@both
async def test_an_error_of_close_is_raised_after_the_end(in_process):
    handle = await spawn(BadClose, in_process=in_process, how="raise")
    with pytest.raises(ValueError, match="close failed"):
        await handle.close()
    assert handle.closed
    await handle.close()


async def test_a_message_over_the_limit_fails_alone_in_both_directions():
    options = SpawnOptions(max_frame_bytes=1 << 20)
    async with spawn(Echo, options=options) as echo:
        with pytest.raises(FrameTooLargeError) as caught:
            await echo.call("body", bytes(2 << 20))
        assert caught.value.limit == 1 << 20
        with pytest.raises(FrameTooLargeError):
            await echo.call("large", 2 << 20)
        with pytest.raises(FrameTooLargeError):
            await echo.call("array", np.zeros(2 << 20, np.uint8))
        assert await echo.call("body", bytes(1000)) == bytes(1000)


async def test_two_hundred_megabytes_and_two_hundred_back():
    async with spawn(Echo) as echo:
        body = os.urandom(1 << 20) * 200
        assert await echo.call("body", body) == body


async def test_without_shared_memory_large_messages_go_inline():
    async with spawn(Echo, options=SpawnOptions(max_segment_bytes=0)) as echo:
        array = np.arange(3 << 20, dtype=np.int64)
        np.testing.assert_array_equal(await echo.call("array", array), array)
        body = os.urandom(5 << 20)
        assert await echo.call("body", body) == body


async def test_when_segments_run_out_messages_go_inline():
    async with spawn(Echo, options=SpawnOptions(max_segment_bytes=4 << 20)) as echo:
        arrays = [np.full(1 << 19, i, np.int32) for i in range(5)]
        kept = [await echo.call("array", array) for array in arrays]
        for back, array in zip(kept, arrays, strict=True):
            np.testing.assert_array_equal(back, array)


async def test_an_unknown_error_type_arrives_whole():
    from tests.integration.actors.sample_actors import Trouble

    async with spawn(Trouble) as trouble:
        with pytest.raises(RemoteError) as caught:
            await trouble.call("raise_", "two")
    error = caught.value
    assert (error.remote_type, error.remote_message) == ("TwoArguments", "1 and 2")
    assert "in raise_" in error.remote_traceback


async def test_what_goes_into_the_set_up_is_sent_once():
    # NVIDIA-NeMo/RL#3668: a tokenizer of 7 MB went along with every prompt.
    async with spawn(Keeping, table=bytes(5 << 20)) as keeping:
        started = keeping.bytes_sent
        assert started > 5 << 20
        for key in range(100):
            assert await keeping.call("look_up", key) == 0
        assert keeping.bytes_sent - started < 100 * 100


async def test_memory_stays_flat_while_large_arrays_pass():
    async with spawn(Echo) as echo:
        array = np.zeros(16 << 20, np.uint8)
        processes = [psutil.Process(), psutil.Process(echo.pid)]

        async def pass_some():
            for number in range(20):
                array[0] = number
                assert (await echo.call("array", array))[0] == number

        await pass_some()
        before = [process.memory_info().rss for process in processes]
        await pass_some()
        after = [process.memory_info().rss for process in processes]
    # A direction may come to use a second segment; a leak would be twenty of them.
    assert all(new - old < 64 << 20 for old, new in zip(before, after, strict=True))


async def test_a_handle_of_another_loop_is_refused():
    async with spawn(Counter) as counter:

        def elsewhere():
            with pytest.raises(RuntimeError, match="another event loop"):
                asyncio.run(counter.call("add", 1))

        await anyio.to_thread.run_sync(elsewhere)
        assert await counter.call("add", 1) == 1


@both
async def test_an_error_of_close_does_not_hide_the_error_that_led_to_it(in_process, caplog):
    with pytest.raises(KeyError, match="the reason"):
        async with spawn(BadClose, in_process=in_process, how="raise"):
            raise KeyError("the reason")
    assert "close failed" in caplog.text


@both
async def test_a_death_is_told_to_those_who_ask_early_and_late(in_process):
    told = []
    async with spawn(Counter, in_process=in_process) as counter:
        counter.when_dead(lambda: told.append("early"))
        counter.kill()
        with anyio.fail_after(30):
            while told != ["early"]:
                await anyio.sleep(0.01)
            counter.when_dead(lambda: told.append("late"))
            while told != ["early", "late"]:
                await anyio.sleep(0.01)


@both
async def test_closing_is_no_death(in_process):
    told = []
    async with spawn(Counter, in_process=in_process) as counter:
        counter.when_dead(lambda: told.append("dead"))
    await anyio.sleep(0.05)
    assert told == []
