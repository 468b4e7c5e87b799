"""A process that computes is told from one that sleeps or was stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gymrl.actors.activity import ProcessActivity

SPIN = "print(flush=True)\nwhile True: pass"
SLEEP = "import time; print(flush=True); time.sleep(300)"


@pytest.mark.parametrize(
    ("code", "is_stopped", "expected"),
    [(SPIN, False, True), (SLEEP, False, False), (SPIN, True, False)],
)
def test_a_process_that_computes_is_told_from_one_that_does_not(code, is_stopped, expected):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        if is_stopped:
            os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        activity = ProcessActivity(process.pid)
        time.sleep(0.3)
        assert activity.is_computing() is expected
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_that_is_gone_computes_nothing():
    process = subprocess.Popen(["true"])
    process.wait()
    assert not ProcessActivity(process.pid).is_computing()
