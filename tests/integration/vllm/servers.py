"""vLLM's own servers as processes."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence

import anyio
import anyio.to_thread

VARIABLE = "GYMRL_TEST_VLLM_KEY"
KEY = "key-of-the-servers"

MARK = "refuse-me"
"""A server with the extension of :mod:`refusing` loads no directory that holds such a file."""


def free_ports(number: int) -> list[int]:
    """Ports that no connection is given by chance: a server that is killed must find its own again."""
    found: list[int] = []
    while len(found) < number:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if port not in found:
                found.append(port)
    return found


class Servers:
    """Servers of one model, started and killed by place.

    Args:
        model: A directory.
        arguments: Of each server. ``--enable-scale-out`` gives it the route for tokens.
    """

    def __init__(self, model: str, arguments: Sequence[str] = ("--enable-scale-out", "")) -> None:
        self.ports = free_ports(len(arguments))
        self.urls = tuple(f"http://127.0.0.1:{port}/v1" for port in self.ports)
        self._arguments = tuple(arguments)
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.vllm.serve", model],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore", "VLLM_SERVER_DEV_MODE": "1"},
        )

    def start(self, place: int) -> None:
        self._order(f"start {self.ports[place]} {self._arguments[place]}")

    def kill(self, place: int) -> None:
        self._order(f"kill {self.ports[place]}")

    def _order(self, line: str) -> None:
        self._launcher.stdin.write(f"{line}\n")
        self._launcher.stdin.flush()

    def end(self) -> None:
        self._launcher.stdin.close()
        self._launcher.wait(timeout=60)


def post(port: int, path: str, body: bytes) -> bytes:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return answer.read()


def get(port: int, path: str) -> bytes | None:
    """The answer, None while there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.read()
    except OSError:
        return None


def refuses(port: int) -> bool:
    """Whether nobody listens there; what is killed lets go of its sockets one process at a time."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


async def ready(port: int) -> None:
    with anyio.fail_after(120):
        while await anyio.to_thread.run_sync(get, port, "/health") is None:  # noqa: ASYNC110
            await anyio.sleep(0.2)
