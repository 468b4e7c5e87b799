"""Errors of a callee, as the caller sees them: always typed, never a hang."""

# ruff: noqa: PERF401, PT012, RUF043
# Streams raise while they are read.
from __future__ import annotations

import anyio
import pytest

from gymrl.actors import spawn
from gymrl.errors import ContextOverflowError, GymTransportError, RemoteError
from tests.integration.actors.sample_actors import Trouble

both = pytest.mark.parametrize("in_process", [False, True], ids=["process", "in_process"])

EXPECTED = {
    "key": KeyError,
    "two": RemoteError,
    "speechless": RemoteError,
    "long": ValueError,
    "exit": RemoteError,
    "base": RemoteError,
    "cancelled": RemoteError,
    "stop": RemoteError,
    "group": ExceptionGroup,
    "overflow": ContextOverflowError,
    "transport": GymTransportError,
    "oserror": FileNotFoundError,
    "surrogate": ValueError,
    "circular": ValueError,
    "local": RemoteError,
}


@both
async def test_every_error_arrives_typed_from_a_call_and_from_a_stream(in_process):
    async with spawn(Trouble, in_process=in_process) as trouble:
        for kind, expected in EXPECTED.items():
            with anyio.fail_after(30):
                with pytest.raises(expected) as caught:
                    await trouble.call("raise_", kind)
                assert type(caught.value) is expected, kind
                assert len(str(caught.value)) < 200_000
                # Python itself makes it a RuntimeError inside a generator.
                in_stream = RuntimeError if kind == "stop" else expected
                items = []
                with pytest.raises(in_stream) as from_stream:
                    async for item in trouble.stream("stream", kind):
                        items.append(item)
                assert items == [1]
                assert type(from_stream.value) is in_stream, kind


async def test_an_interrupt_raised_by_a_callee_does_not_interrupt_the_caller():
    async with spawn(Trouble) as trouble:
        with pytest.raises(RemoteError) as caught:
            await trouble.call("raise_", "interrupt")
        assert caught.value.remote_type == "KeyboardInterrupt"
        with pytest.raises(KeyError):
            await trouble.call("raise_", "key")


@both
async def test_known_errors_keep_their_fields_and_arguments(in_process):
    async with spawn(Trouble, in_process=in_process) as trouble:
        with pytest.raises(ContextOverflowError, match="^too long$") as overflow:
            await trouble.call("raise_", "overflow")
        assert (overflow.value.prompt_tokens, overflow.value.max_model_len) == (9, 8)
        with pytest.raises(GymTransportError) as transport:
            await trouble.call("raise_", "transport")
        assert transport.value.status == 503
        assert transport.value.url == "http://a/run"
        with pytest.raises(FileNotFoundError) as missing:
            await trouble.call("raise_", "oserror")
        assert missing.value.errno == 2
        with pytest.raises(KeyError) as key:
            await trouble.call("raise_", "key")
        assert key.value.args == ("x",)
        with pytest.raises(ExceptionGroup, match="many") as group:
            await trouble.call("raise_", "group")
        assert [type(e) for e in group.value.exceptions] == [KeyError, RemoteError]


async def test_the_cause_of_a_known_error_is_the_remote_traceback():
    async with spawn(Trouble) as trouble:
        with pytest.raises(ValueError, match="outer") as caught:
            await trouble.call("nested")
        remote = caught.value.__cause__
        assert isinstance(remote, RemoteError)
        assert "in nested" in remote.remote_traceback
        assert isinstance(remote.__cause__, KeyError)


async def test_in_process_the_cause_is_the_error_itself_with_its_frames():
    async with spawn(Trouble, in_process=True) as trouble:
        with pytest.raises(ValueError, match="outer") as caught:
            await trouble.call("nested")
        frames = []
        trace = caught.value.__cause__.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        assert "nested" in frames
