"""The peer's end: reads questions from standard input, answers on standard output.

Runs in ``.venv-bench``; knows nothing of gymrl.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TextIO

Answers = Mapping[str, Callable[..., Awaitable[Any]]]


def private_output() -> TextIO:
    """Standard output for answers alone; what else is printed goes to standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


async def serve(answers: Answers, output: TextIO) -> None:
    """Answer until standard input ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        question, arguments = json.loads(line)
        try:
            answer = {"result": await answers[question](**arguments)}
        except Exception:  # noqa: BLE001  # goes to whoever asked
            answer = {"error": traceback.format_exc()}
        output.write(json.dumps(answer) + "\n")
        output.flush()
