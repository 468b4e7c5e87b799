"""What a command that serves until it is stopped says with its exit code."""

import signal
import subprocess
import sys

import pytest

# An interpreter starts; a busy machine gets time for that.
pytestmark = pytest.mark.timeout(240)

SLOW = """
import anyio, sys
from gymrl.cli.serving import run_until_interrupted

async def serve():
    print("up", flush=True)
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            print("closing", flush=True)
            await anyio.sleep(200)

sys.exit(run_until_interrupted(serve, "starting"))
"""


def test_a_server_that_takes_long_to_close_was_still_stopped_as_it_is_meant_to_be():
    """On a busy machine closing takes longer than there is time for."""
    command = [sys.executable, "-c", SLOW]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "closing\n"
        assert process.wait(60) == 0
