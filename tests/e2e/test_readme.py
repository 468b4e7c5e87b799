"""The README's examples are run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(tmp_path: Path, code: str) -> str:
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_rollout_example_prints_a_batch(tmp_path):
    (example,) = [code for code in EXAMPLES if "RolloutEngine" in code]

    printed = run(tmp_path, example)

    assert printed.startswith("torch.Size([16, ")
    assert "tensor([" in printed


def test_the_actor_example_counts(tmp_path):
    (example,) = [code for code in EXAMPLES if "gymrl.Actor" in code]

    assert run(tmp_path, example).split() == ["7", "7", "8", "9"]


def test_the_benchmark_example_is_the_one_of_its_guide_which_is_run_there():
    (example,) = [code for code in EXAMPLES if "plan_benchmark" in code]

    assert example in (ROOT / "docs/guides/run-a-benchmark.md").read_text()
