"""The command line, a tiny real model, and real servers: agent and environment."""

import json
import os
import subprocess
import sys

import anyio
import pytest
import yaml

from gymrl.records import read_groups
from gymrl.testing import build_tiny_model

pytestmark = [pytest.mark.nemo_gym, pytest.mark.timeout(240)]


@pytest.fixture
def relative_python(gym_python):
    """As a person writes it; servers are started in other directories."""
    return os.path.relpath(gym_python)


async def test_rows_of_a_file_go_through_real_servers_with_a_model_of_ours(
    relative_python, example_rows, tmp_path
):
    model = tmp_path / "model"
    build_tiny_model(model)
    name = "example_single_tool_call"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in example_rows(name, count=3)))
    servers = tmp_path / "servers.yaml"
    servers.write_text(
        yaml.safe_dump({"config_paths": [f"resources_servers/{name}/configs/{name}.yaml"]})
    )
    config = tmp_path / "run.yaml"
    gym = {"gym_python": relative_python, "spinup_timeout_s": 200}
    config.write_text(yaml.safe_dump({"gym": gym}))
    output = tmp_path / "rollouts.jsonl"
    done = await anyio.run_process(
        [sys.executable, "-m", "gymrl", "rollout", str(rows), "--servers", str(servers),
         "--config", str(config), "--model", str(model), "--num-generations", "2",
         "--max-output-tokens", "8", "--seed", "1", "--output", str(output)],
        stderr=subprocess.PIPE,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    groups = list(read_groups(output))
    assert len(groups) == 3
    for group in groups:
        assert len(group.trajectories) == 2
        for trajectory in group.trajectories:
            assert trajectory.agent == f"{name}_simple_agent"
            [turn] = trajectory.turns
            assert 1 <= turn.end - turn.generation_start <= 8
            assert trajectory.reward.total == 0.0  # noise calls no tool
