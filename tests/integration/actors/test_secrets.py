"""Secrets reach the worker they are for, and nothing that others read."""

# ruff: noqa: ASYNC240
# The tables of the system are read as files.
from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil
import pytest

from gymrl.actors import Actor, SpawnOptions, Supervisor, connect_actor, serve_actor, spawn
from gymrl.actors.actor import contract_of
from gymrl.errors import ActorDiedError, ActorStartError, ConfigError
from tests.integration.actors.faulty_actors import Environ, Secretive, Tiny

KEY = "sk-very-secret-0123456789abcdef"


def everything_said(caplog: pytest.LogCaptureFixture, *errors: BaseException) -> str:
    texts = [record.getMessage() for record in caplog.records]
    for error in errors:
        link: BaseException | None = error
        while link is not None:
            texts += [str(link), repr(link), repr(getattr(link, "fields", ""))]
            link = link.__cause__ or link.__context__
    return "\n".join(texts)


def command_lines() -> str:
    lines = []
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            lines.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return "\n".join(lines)


async def test_set_up_and_arguments_are_in_no_command_line_environment_log_or_error(caplog):
    caplog.set_level(logging.DEBUG)
    errors = []
    async with spawn(Secretive, api_key=KEY) as secretive:
        assert await secretive.call("use", KEY, 1) == 1
        assert KEY not in command_lines()
        assert KEY not in "\n".join(await secretive.call("argv"))
        assert KEY not in "\n".join(await secretive.call("environ"))
        with pytest.raises(TypeError) as refused:
            await secretive.call("use", KEY, "not a number")
        errors.append(refused.value)
        with pytest.raises(TypeError) as refused:
            await secretive.call("use", api_key=KEY, count=1)
        errors.append(refused.value)
        with pytest.raises(TypeError) as refused:
            await secretive.call("use", api_key=[KEY], number=1)
        errors.append(refused.value)
        with pytest.raises(ActorDiedError) as died:
            await secretive.call("die")
        errors.append(died.value)
    with pytest.raises(TypeError) as refused:
        spawn(Secretive, api_key={"key": KEY})
    errors.append(refused.value)
    assert KEY not in everything_said(caplog, *errors)
    assert KEY not in repr(secretive)


async def test_variables_for_a_worker_reach_it_and_are_in_no_command_line_log_or_error(caplog):
    caplog.set_level(logging.DEBUG)
    options = SpawnOptions(env={"OPENAI_API_KEY": KEY})
    assert KEY not in repr(options)
    assert KEY not in f"{options} {[options]}"
    assert "OPENAI_API_KEY" in repr(options)
    async with Supervisor(Environ, options=options) as environ:
        assert await environ.call("value", "OPENAI_API_KEY") == KEY
        assert "OPENAI_API_KEY" not in os.environ
        assert KEY not in command_lines()
        assert KEY not in "\n".join(await environ.call("argv"))
        with pytest.raises(ValueError, match="something else") as wrong:
            await environ.call("spill")
    with pytest.raises(ActorStartError) as failed:
        await spawn(Environ, options=SpawnOptions(env={"OPENAI_API_KEY": KEY, "BAD\0NAME": KEY}))
    with pytest.raises(ConfigError) as bad:
        SpawnOptions(env={"OPENAI_API_KEY": KEY}, stream_window=0)
    assert KEY not in everything_said(caplog, wrong.value, failed.value, bad.value)


async def test_the_link_secret_is_never_sent_logged_or_told(caplog):
    caplog.set_level(logging.DEBUG)
    secret = KEY.encode()
    errors = []
    async with serve_actor(Tiny, secret=secret) as server:
        for wrong in (b"another secret of 16 bytes", b"short"):
            with pytest.raises((ConfigError, RuntimeError)) as refused:
                async with connect_actor(Tiny, server.host, server.port, secret=wrong):
                    pass
            errors.append(refused.value)
        async with connect_actor(Tiny, server.host, server.port, secret=secret) as tiny:
            assert await tiny.call("ping_back", 1) == 1
            assert KEY not in repr(tiny)
        assert KEY not in repr(server)
    with pytest.raises(ConfigError) as text:
        serve_actor(Tiny, secret=KEY)  # type: ignore[arg-type]
    assert KEY not in everything_said(caplog, *errors, text.value)


async def test_a_workers_socket_pair_has_no_name_and_no_other_holder():
    async with spawn(Tiny) as tiny, spawn(Tiny) as other:
        for handle, stranger in ((tiny, other), (other, tiny)):
            ours = {
                os.readlink(f"/proc/{handle.pid}/fd/{name}")
                for name in os.listdir(f"/proc/{handle.pid}/fd")
            }
            theirs = {
                os.readlink(f"/proc/{stranger.pid}/fd/{name}")
                for name in os.listdir(f"/proc/{stranger.pid}/fd")
            }
            sockets = {target for target in ours if target.startswith("socket:")}
            assert len(sockets) >= 2  # the link and the lane
            assert not sockets & theirs
        inodes = {target[8:-1] for target in sockets}
        table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        ends = [line for line in table if line[6] in inodes]
        assert len(ends) >= 2
        assert all(len(line) == 7 for line in ends)  # an eighth word would be a path
        assert not psutil.Process(tiny.pid).net_connections("inet")


def test_a_private_class_has_no_public_methods_by_accident():
    class Careful(Actor):
        async def public(self) -> None: ...

        async def _private(self) -> None: ...

        def not_async(self) -> None: ...

    assert list(contract_of(Careful).methods) == ["public"]
