import json
import subprocess
import sys

import pytest

import gymrl

HEAVY = ["torch", "transformers", "vllm", "PIL", "ray", "nemo_gym"]


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=150
    )
    return result.stdout


def test_importing_gymrl_loads_nothing_heavy_and_is_quick():
    code = (
        "import json, sys, time\n"
        "start = time.process_time()\n"
        "import gymrl\n"
        "seconds = time.process_time() - start\n"
        f"print(json.dumps([seconds, [m for m in {HEAVY} if m in sys.modules]]))"
    )
    # The best of three: a busy machine slows computing down, too.
    measured = [json.loads(run_python(code)) for _ in range(3)]

    assert all(loaded == [] for _, loaded in measured)
    assert min(seconds for seconds, _ in measured) < 0.3


@pytest.mark.parametrize("name", gymrl.__all__)
def test_every_public_name_is_there(name):
    assert getattr(gymrl, name) is not None


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        gymrl.no_such_name  # noqa: B018 - the access is the test
