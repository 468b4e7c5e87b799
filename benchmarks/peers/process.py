"""A peer: a script in ``.venv-bench`` that is asked to do something and says how long it took."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import anyio
import msgspec

if TYPE_CHECKING:
    from types import TracebackType

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-bench" / "bin" / "python"
ANSWER_S = 180.0
STOP_S = 30.0


class PeerError(Exception):
    """A peer could not do what it was asked."""


def installed() -> bool:
    """Whether ``scripts/bench-peers`` has run."""
    return PYTHON.exists()


class Peer:
    """One peer's process; it idles between questions.

    Args:
        script: Beside this file.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        folder = str(Path(__file__).parent)
        environment = {
            **os.environ,
            "PYTHONPATH": folder,  # a peer's own workers import its modules too
            "PYTHONWARNINGS": "ignore",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._process = await asyncio.create_subprocess_exec(
            str(PYTHON),
            os.path.join(folder, self._script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        with anyio.CancelScope(shield=True):
            process.stdin.close()
            with anyio.move_on_after(STOP_S):
                await process.wait()
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def ask(self, question: str, **arguments: Any) -> Any:
        """Have the peer run one of its functions, and return what that returned.

        Raises:
            PeerError: It failed, died, or took three minutes.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the peer does not run: use it inside `async with`")
        process.stdin.write(msgspec.json.encode([question, arguments]) + b"\n")
        with anyio.move_on_after(ANSWER_S):
            await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                raise PeerError(f"{self._script} ended at {question!r}; its error is above")
            answer = msgspec.json.decode(line)
            if "error" in answer:
                raise PeerError(f"{self._script}: {question!r} failed:\n{answer['error']}")
            return answer["result"]
        raise PeerError(f"{self._script}: {question!r} took more than {ANSWER_S:g} s")

    async def seconds(self, question: str, **arguments: Any) -> float:
        """As :meth:`ask`, for a question whose answer is a number."""
        return float(await self.ask(question, **arguments))
