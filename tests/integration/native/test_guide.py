"""The guide's examples run as they are printed."""

import re
import sys
from pathlib import Path

import anyio
import pytest

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "native-environments.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S)

PLAY_THE_PARROT = """
import anyio

from gymrl.generation import Generated
from gymrl.rollout.native import NativePrompt, run_native_rollout
from gymrl.rollout.native_text import RawText
from gymrl.testing import ScriptedGenerator, build_tiny_tokenizer

tokenizer = build_tiny_tokenizer()
prompt = NativePrompt(task_name="parrot", messages=[{"role": "user", "content": "hello"}])
rollout = anyio.run(
    lambda: run_native_rollout(
        [prompt],
        ScriptedGenerator([tokenizer.encode("hello")]),
        {"parrot": Parrot()},
        codec=RawText(tokenizer),
    )
)
assert rollout.metrics["parrot/accuracy"] == 1.0
"""


@pytest.mark.parametrize(
    "program",
    [EXAMPLES[0], EXAMPLES[1] + PLAY_THE_PARROT, EXAMPLES[2], EXAMPLES[3]],
    ids=["a whole example", "an environment", "workers", "images"],
)
async def test_the_guides_examples_run(program, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(program, encoding="utf-8")
    environment = {
        "PYTHONPATH": str(GUIDE.parents[2]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }

    done = await anyio.run_process([sys.executable, str(script)], env=environment, check=False)

    assert done.returncode == 0, done.stderr.decode()
