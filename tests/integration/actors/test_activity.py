"""A process that computes is told from one that sleeps or was stopped."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from gymrl.actors.activity import ProcessActivity

SPIN = "print(flush=True)\nwhile True: pass"
SLEEP = "import time; print(flush=True); time.sleep(300)"


@contextlib.contextmanager
def running(code: str) -> Iterator[int]:
    """A process that has said that it is there."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_that_computes_is_told_at_every_look():
    with running(SPIN) as pid:
        activity = ProcessActivity(pid)
        for _ in range(3):
            time.sleep(0.1)
            assert activity.is_computing()


def test_a_process_that_sleeps_does_not_compute():
    with running(SLEEP) as pid:
        activity = ProcessActivity(pid)
        # It may still be on its way into its sleep; from then on it computes no more.
        while activity.is_computing():
            time.sleep(0.1)
        time.sleep(0.3)
        assert not activity.is_computing()


def test_a_process_that_was_stopped_does_not_compute():
    with running(SPIN) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        activity = ProcessActivity(pid)
        time.sleep(0.3)
        assert not activity.is_computing()


def test_a_process_that_is_gone_computes_nothing():
    process = subprocess.Popen(["true"])
    process.wait()
    assert not ProcessActivity(process.pid).is_computing()
