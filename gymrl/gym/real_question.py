"""Questions that only NeMo Gym can answer, asked in its interpreter: a script, once, as a process."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.errors import ConfigError
from gymrl.gym.processes import GuardedProcess

if TYPE_CHECKING:
    from collections.abc import Mapping


async def ask_gym(
    name: str, python: str, script: str, request: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run ``script`` with the paths of a request and of an answer, and read the answer.

    Cancelling it ends the process.

    Args:
        name: What its lines are logged with.
        python: The interpreter that has NeMo Gym.
        script: One of ours that runs there.
        request: Plain data.
        environment: Of the process, complete. It runs in the working directory.

    Returns:
        The answer, and under ``said`` the last lines that the process wrote.

    Raises:
        ConfigError: The interpreter cannot be started, or the script ended without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="gymrl-") as folder:
        asked, answered = anyio.Path(folder, "request.json"), anyio.Path(folder, "answer.json")
        await asked.write_bytes(msgspec.json.encode(request))
        process = GuardedProcess(
            name,
            [python, "-P", script, str(asked), str(answered)],
            cwd=os.getcwd(),  # relative paths in a configuration begin here
            env=environment,
        )
        try:
            await process.start()
            await process.wait()
        except OSError as error:
            raise ConfigError(
                f"gym_python={python!r} cannot be started: {error}", setting="gym_python"
            ) from error
        finally:
            await process.stop(grace_s=0)
        if not await answered.exists():
            raise ConfigError(
                f"gym_python={python!r} {process.how_it_ended} before it had answered "
                f"({name}); its last lines:\n{process.last_lines}",
                setting="gym_python",
            )
        answer: dict[str, Any] = msgspec.json.decode(await answered.read_bytes())
        return {"said": process.last_lines, **answer}
