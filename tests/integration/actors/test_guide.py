"""The examples of the guide run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "guides" / "actors.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.S | re.M)

PRINTED = [
    "7\n",
    "100\n",
    "101\n",
    "{'episode 0': 0, 'episode 1': 1, 'episode 2': 2}\nMeasure.lengths(): argument episodes",
    "no key 'b'\n3 something is wrong\n",
    "ended by SIGKILL\n",
    "gave up, and so has the worker\n",
    "40 True\npoison after 2 deaths\n",
    "[1, 2, 3]\n",
    "2\n",
]


def test_every_example_is_known():
    assert len(BLOCKS) == len(PRINTED)


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_an_example_prints_what_it_should(number, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PRINTED[number]), done.stdout
