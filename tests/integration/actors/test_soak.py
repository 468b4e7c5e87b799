"""The soak run, a few seconds of it: so that it works when someone wants all of it."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.integration.actors.watching import ROOT


def test_a_few_seconds_of_soak_account_for_every_row_and_leave_nothing():
    sizes = ["--rows", "700", "--spawns", "4", "--fuzz", "300"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert figures["rows"]["accounted_once"] == 700
    assert figures["left_after_rows"] == figures["left_after_spawns"] == {}
    assert figures["failed"] == []
