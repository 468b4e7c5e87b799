"""What the tutorial shows is what happens: its program, its files and its command are run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gymrl.records import read_groups
from gymrl.testing.models import build_tiny_model

REPOSITORY = Path(__file__).parents[2]
TUTORIAL = (REPOSITORY / "docs" / "guides" / "first-rollouts.md").read_text(encoding="utf-8")
# Each run starts several interpreters; a busy machine gets time for that.
pytestmark = pytest.mark.timeout(240)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("model")))


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=90,
        env=ENVIRONMENT,
        check=False,
        **options,
    )


def test_the_program_of_the_tutorial_runs(tiny_model, tmp_path):
    (program,) = [block for block in blocks("python") if "anyio.run" in block]
    script = tmp_path / "program.py"
    script.write_text(program.replace('"smollm2"', repr(tiny_model)))
    done = run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SourceSummary(source='chain_sum', prompts=8, rows=32, failed=0" in done.stdout


def test_the_rows_and_servers_of_the_tutorial_run(tiny_model, tmp_path):
    (row,) = blocks("json")
    (servers,) = blocks("yaml")
    (tmp_path / "rows.jsonl").write_text(row)
    (tmp_path / "servers.yaml").write_text(servers)
    done = run(
        "-m", "gymrl", "rollout", "rows.jsonl", "--servers", "servers.yaml", "--in-process",
        "--model", tiny_model, "--num-generations", 4, "--max-output-tokens", 4, "-o", "out.jsonl",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (group,) = read_groups(tmp_path / "out.jsonl")
    assert len(group.trajectories) == 4


def words(command):
    return command.replace("\\\n", " ").replace("$ ", "").split()


def test_the_demo_is_the_command_that_the_tutorial_shows():
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^demo:.*?\n\n", makefile, re.DOTALL | re.MULTILINE).group()
    made = words(recipe[recipe.index("$(BIN)/gymrl") :].replace("$(BIN)/", ""))
    (shown,) = [block for block in blocks("console") if "runs/demo.jsonl --overwrite" in block]
    assert sorted(words(shown)) == sorted(made)
