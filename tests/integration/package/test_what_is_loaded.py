"""What an import brings along, seen in an interpreter that has imported nothing else."""

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "vllm", "PIL", "reasoning_gym", "ray", "nemo_gym"]


def loaded_by(code: str) -> tuple[float, list[str]]:
    """The processor time of this code, in seconds, and what is heavy of what it has loaded."""
    whole = (
        f"import json, sys, time\nstart = time.process_time()\n{code}\n"
        "seconds = time.process_time() - start\n"
        f"print(json.dumps([seconds, [m for m in {HEAVY} if m in sys.modules]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", whole], capture_output=True, text=True, check=True, timeout=55
    )
    return json.loads(done.stdout)


def test_importing_gymrl_loads_nothing_heavy_and_is_quick():
    # The best of three: a busy machine slows computing down, too.
    measured = [loaded_by("import gymrl") for _ in range(3)]
    assert all(loaded == [] for _, loaded in measured)
    assert min(seconds for seconds, _ in measured) < 0.3


@pytest.mark.parametrize(
    "modules",
    [
        "gymrl.generation.service, gymrl.rollout.engine, gymrl.gym.service",
        "gymrl.media, gymrl.gym.service, gymrl.gym.row_images",
    ],
)
def test_a_driver_that_names_what_its_workers_do_loads_nothing_heavy(modules):
    assert loaded_by(f"import {modules}")[1] == []


def test_rows_of_text_load_no_image_library_where_images_are_read():
    code = """
import asyncio
from gymrl.config import MediaConfig
from gymrl.gym.row_images import ImageReader
from gymrl.types import Row
body = b'{"responses_create_params": {"input": [{"role": "user", "content": "hi"}]}}'
row = Row(index=0, task_index=0, rollout_index=0, route="eye", rollout_id="r", body=body)
images = asyncio.run(ImageReader(MediaConfig()).open_row(row))
assert images.body == body and images.bins.pending == []
"""
    assert loaded_by(code)[1] == []
