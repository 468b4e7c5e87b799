"""Errors that resist being told: every one arrives typed, bounded and soon."""

# ruff: noqa: PERF401, PT012
# Streams raise while they are read.
from __future__ import annotations

import asyncio
import contextlib

import anyio
import pytest

from gymrl.actors import SpawnOptions, spawn
from gymrl.errors import ActorError, EncodeError, RemoteError
from tests.integration.actors.faulty_actors import ERRORS, BadEnd, Raiser
from tests.integration.actors.watching import is_running, until

both = pytest.mark.parametrize("in_process", [False, True], ids=["process", "in_process"])

BUILTIN = {
    "ten_megabytes": ValueError,
    "ten_megabytes_of_fields": RemoteError,
    "group": ExceptionGroup,
    "base_group": ExceptionGroup,
    "deep_group": ExceptionGroup,
    "wide_group": ExceptionGroup,
    "long_chain": ValueError,
    "recursion": RecursionError,
    "memory": MemoryError,
    "null_byte": ValueError,
    "stop": RuntimeError,  # Python itself makes it one, in coroutines and generators
}


@both
async def test_every_hostile_error_arrives_typed_from_calls_and_streams(in_process):
    # python/cpython#79492: an exception that fails to unpickle hangs a pool for ever.
    async with spawn(Raiser, in_process=in_process) as raiser:
        for kind in ERRORS:
            expected = BUILTIN.get(kind, RemoteError)
            with anyio.fail_after(30):
                with pytest.raises(Exception) as caught:  # noqa: PT011  # the type is asserted below
                    await raiser.call("fail", kind)
                assert type(caught.value) is expected, kind
                assert len(str(caught.value)) < 300_000, kind
                items = []
                with pytest.raises(Exception) as caught:  # noqa: PT011
                    async for item in raiser.stream("fail_late", kind):
                        items.append(item)
                assert items == [1]
                assert type(caught.value) is expected, kind
        assert await raiser.call("fine") == "fine"


async def test_an_http_error_with_unpicklable_parts_arrives_with_its_status():
    # NVIDIA-NeMo/Gym#1788: "can't pickle CIMultiDictProxy", and nobody saw the status.
    async with spawn(Raiser) as raiser:
        with anyio.fail_after(30), pytest.raises(RemoteError, match="503") as caught:
            await raiser.call("fail", "http")
        assert caught.value.remote_type == "ClientResponseError"
        assert caught.value.remote_module.startswith("aiohttp")
        assert "http://env.example/run" in caught.value.remote_message


@both
async def test_keys_that_are_tuples_travel_or_are_refused_and_never_break_the_link(in_process):
    async with spawn(Raiser, in_process=in_process) as raiser:
        for value in ({(1, 2): "t"}, {((1,), 2): {(): 1}}, {None: 1}, {1.5: 2}, {b"k": 3}):
            with contextlib.suppress(EncodeError):
                assert await raiser.call("any", value) == value
        assert await raiser.call("fine") == "fine"


async def test_an_unknown_error_says_type_text_and_traceback():
    async with spawn(Raiser) as raiser:
        for kind, name in (("own_base", "OwnBase"), ("odd", "Odd"), ("mute", "Mute")):
            with pytest.raises(RemoteError) as caught:
                await raiser.call("fail", kind)
            assert caught.value.remote_type == name
            assert caught.value.remote_module.endswith("faulty_actors")
            assert "in fail" in caught.value.remote_traceback
        assert "__str__ raised RuntimeError" in caught.value.remote_message


async def test_a_hostile_error_fits_the_smallest_frame():
    options = SpawnOptions(max_frame_bytes=64 << 10)
    async with spawn(Raiser, options=options) as raiser:
        for kind in ERRORS:
            with anyio.fail_after(30), pytest.raises(Exception):  # noqa: B017, PT011
                await raiser.call("fail", kind)
        assert await raiser.call("fine") == "fine"


@both
async def test_one_row_in_a_hundred_fails_alone_with_its_cause(in_process):
    # THUDM/slime#2078, NovaSky-AI/SkyRL#1613: logs showed only CancelledError.
    unretrieved = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
    results, failures = [], []
    async with spawn(Raiser, in_process=in_process) as raiser:

        async def one(row: int) -> None:
            try:
                results.append(await raiser.call("row", row))
            except Exception as error:  # noqa: BLE001  # what it is, is the result
                failures.append(error)

        async with anyio.create_task_group() as group:
            for row in range(100):
                group.start_soon(one, row)
    assert sorted(results) == [row for row in range(100) if row != 57]
    assert [type(error) for error in failures] == [KeyError]
    assert failures[0].args == ("x",)
    cause = failures[0].__cause__
    trace = cause.remote_traceback if isinstance(cause, RemoteError) else "row"
    assert "row" in trace
    assert "CancelledError" not in trace
    assert not unretrieved


@both
@pytest.mark.parametrize("kind", ["own_base", "mute", "odd", "generator_exit", "ten_megabytes"])
async def test_a_callee_that_raises_when_it_is_cancelled_harms_nobody(kind, in_process):
    async with spawn(Raiser, in_process=in_process) as raiser:
        with anyio.fail_after(30):
            with anyio.move_on_after(0.1) as scope:
                try:
                    await raiser.call("fail_when_cancelled", kind)
                except Exception:  # noqa: BLE001  # in process the callee's error may overtake
                    assert in_process
            assert scope.cancel_called
            assert raiser.in_flight == 0
            async with raiser.stream("fail_when_left", kind) as stream:
                assert await anext(stream) == 1
            await until(lambda: raiser.in_flight == 0)
            assert await raiser.call("fine") == "fine"


@pytest.mark.parametrize(("how", "name"), [("system_exit", "SystemExit"), ("own_base", "OwnBase")])
@both
async def test_a_close_that_raises_below_exception_is_told_and_ends_nothing_else(
    how, name, in_process
):
    handle = await spawn(BadEnd, how=how, in_process=in_process)
    with anyio.fail_after(30), pytest.raises(RemoteError) as caught:
        await handle.close()
    assert caught.value.remote_type == name
    if not in_process:
        assert not is_running(handle.pid)


async def test_a_worker_that_dies_in_its_close_is_told_in_the_log(caplog):
    handle = await spawn(BadEnd, how="kill")
    with anyio.fail_after(30):
        await handle.close()
    assert "was killed by SIGKILL" in caplog.text


async def test_an_echo_of_a_refused_value_is_short():
    async with spawn(Raiser) as raiser:
        with pytest.raises(TypeError) as caught:
            await raiser.call("row", {"deep": ["x" * 1_000_000]})
        assert len(str(caught.value)) < 2000
        with pytest.raises(TypeError) as caught:
            await raiser.call("fine", **{"k" * 100_000: 1})
        assert len(str(caught.value)) < 2000
        with pytest.raises(AttributeError) as caught:
            await raiser.call("m" * 100_000)
        assert len(str(caught.value)) < 2000
        assert isinstance(caught.value, AttributeError)
        assert not isinstance(caught.value, ActorError)
