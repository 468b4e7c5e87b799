"""``gymrl view`` as a process."""

import os
import signal
import subprocess
import sys
import urllib.request

import pytest

# An interpreter starts; a busy machine gets time for that.
pytestmark = pytest.mark.timeout(240)


def command(*arguments):
    return [sys.executable, "-m", "gymrl", "view", *map(str, arguments)]


def test_the_command_prints_its_address_serves_and_ends_with_ctrl_c(sample):
    process = subprocess.Popen(
        command(sample, "--token"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GYMRL_VIEW_TOKEN": "known-token"},
    )
    with process:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        assert url.endswith("/?token=known-token")
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(url, timeout=60) as response:
            assert b"<main" in response.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"showing {sample}" in err
    assert "known-token" not in err
