"""vLLM's own servers as processes."""

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence

import anyio
import anyio.to_thread


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


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
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
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
        self._launcher.wait(timeout=20)


def get(port: int, path: str) -> bytes | None:
    """The answer, None while there is none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.read()
    except OSError:
        return None


async def ready(port: int) -> None:
    with anyio.fail_after(120):
        while await anyio.to_thread.run_sync(get, port, "/health") is None:  # noqa: ASYNC110
            await anyio.sleep(0.2)
