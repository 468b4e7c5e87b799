import subprocess
import sys


def test_a_driver_that_names_the_service_loads_no_torch():
    code = (
        "import sys, gymrl.generation.service, gymrl.rollout.engine, gymrl.gym.service; "
        "print([m for m in ('torch', 'transformers', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
