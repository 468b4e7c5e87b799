"""The example of the guide runs as it stands there, with a small model of its own."""

import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import yaml

from gymrl.actors import spawn
from gymrl.benchmark.roots import SearchRoot, find_benchmark, search_roots
from gymrl.benchmark.serving import serving_config
from gymrl.benchmark.settings import load_config
from gymrl.config import GenerationConfig
from gymrl.generation.service import GenerationService
from gymrl.testing import build_tiny_model

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "run-a-benchmark.md"


def block(language):
    return re.search(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL).group(1)


@pytest.mark.slow
@pytest.mark.timeout(240)  # three interpreters start, one of them with torch
async def test_the_guides_example_gives_a_reward_a_repeat(tmp_path):
    model = build_tiny_model(tmp_path / "tiny")
    config = GenerationConfig(model=str(model), num_threads=1)
    async with spawn(GenerationService, config=config) as generation:
        endpoint = await generation.call("start")
        assert "http://127.0.0.1:8000/v1" in block("python")
        script = block("python").replace("http://127.0.0.1:8000/v1", endpoint.base_url)
        done = await run_script(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"chain_sum-s0-00000 \[(0\.\d+|1\.0)(, (0\.\d+|1\.0)){3}\]\n", done.stdout)


async def run_script(text, folder):
    (folder / "example.py").write_text(text)
    done = await anyio.run_process(
        [sys.executable, str(folder / "example.py")], check=False, cwd=folder
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def test_the_guides_own_benchmark_is_a_configuration_that_can_be_served(tmp_path):
    folder = tmp_path / "benchmarks" / "capitals"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(block("yaml"))
    roots = [SearchRoot(tmp_path), *search_roots()]
    overrides = {"policy_base_url": "http://127.0.0.1:1/v1", "policy_model_name": "m"}

    made = serving_config(load_config(find_benchmark("capitals", roots), roots, overrides), None)

    assert list(made.gym.servers) == list(yaml.safe_load(block("yaml")))
