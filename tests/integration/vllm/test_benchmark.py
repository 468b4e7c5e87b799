"""The benchmark that needs an engine runs in its tiny size. Nothing is said about speed."""

import subprocess
import sys

import msgspec

from benchmarks.comparison import Report


def test_roads_of_weights(tmp_path):
    path = tmp_path / "weights.json"
    # In a process of its own: once it has sent weights by gloo, no engine can be forked there.
    command = [sys.executable, "-m", "benchmarks.weights", "--quick", "--json", str(path)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = msgspec.json.decode(path.read_bytes(), type=Report).comparisons
    assert [sorted(one.sides) for one in found] == [
        ["saved and loaded", "sent by gloo"],
        ["handed over in shared memory", "saved and loaded"],
    ]
    assert all(one.value for one in found)
