"""A NeMo Gym in another interpreter is found by its path, asked there, and never imported."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import gymrl
from gymrl.benchmark.installed_gym import GYM_PYTHON_VARIABLE, find_gym
from gymrl.errors import ConfigError, RealServersError

CONFIG = """
theirs:
  resources_servers:
    theirs:
      entrypoint: app.py
      domain: other
      datasets:
        - name: theirs
          type: benchmark
          jsonl_fpath: benchmarks/theirs/data.jsonl
          prepare_script: benchmarks/theirs/prepare.py
          prepare_script_args: {count: "${count}"}
count: 2
"""
PREPARE = """
import json, os, sys
from pathlib import Path
from benchmarks.theirs.beside import WORD  # a module of the roots

def prepare(count):
    file = Path(__file__).with_name("data.jsonl")
    config = os.environ["NEMO_GYM_CONFIG_DICT"]
    with file.open("w") as lines:
        for i in range(count):
            row = {"task_id": f"{WORD}{i}", "python": sys.executable, "seen": "theirs:" in config}
            lines.write(json.dumps(row) + "\\n")
    return file
"""


class FakeGym:
    """An interpreter with a NeMo Gym that cannot be imported."""

    def __init__(self, folder):
        command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(command, check=True)
        self.python = str(folder / "bin" / "python")
        [self.packages] = folder.glob("lib/python3*/site-packages")
        self.write("nemo_gym/__init__.py", "raise AssertionError('NeMo Gym was imported')")
        metadata = "Metadata-Version: 2.1\nName: nemo-gym\nVersion: 9.8.7\n"
        self.write("nemo_gym-9.8.7.dist-info/METADATA", metadata)
        self.write("benchmarks/theirs/config.yaml", CONFIG)
        self.write("benchmarks/theirs/prepare.py", PREPARE)
        self.write("benchmarks/theirs/beside.py", "WORD = 't'\n")

    def write(self, path, text):
        file = self.packages / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))


@pytest.fixture(scope="module")
def gym(tmp_path_factory):
    return FakeGym(tmp_path_factory.mktemp("venv") / "venv")


@pytest.fixture(autouse=True)
def no_gym_of_the_machine(monkeypatch, tmp_path):
    """Whatever the machine has, these tests see none that they do not name."""
    monkeypatch.delenv(GYM_PYTHON_VARIABLE, raising=False)
    monkeypatch.delenv("NEMO_GYM_EXTRA_ROOTS", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)


def test_a_benchmark_that_gym_ships_is_planned_with_data_prepared_in_its_interpreter(gym):
    planned = gymrl.plan_benchmark("theirs", gym_python=gym.python, overrides={"count": 3})

    assert planned.task_ids() == ["t0", "t1", "t2"]
    assert planned.plan.gym.version == "9.8.7"
    assert planned.plan.benchmark.config_paths == ["benchmarks/theirs/config.yaml"]
    assert planned.rows[0]["python"] == gym.python
    assert planned.rows[0]["seen"] is True
    assert "nemo_gym" not in sys.modules
    assert str(gym.packages) not in sys.path


def test_gym_is_found_where_the_variable_says(gym, monkeypatch):
    monkeypatch.setenv(GYM_PYTHON_VARIABLE, gym.python)

    found = find_gym()

    assert (found.python, found.folder, found.version) == (
        gym.python,
        gym.packages.resolve(),
        "9.8.7",
    )
    assert len(gymrl.plan_benchmark("theirs").rows) == 2


def test_gym_is_found_in_an_activated_environment(gym, monkeypatch):
    command = Path(gym.python).with_name("ng_run")
    command.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")

    assert find_gym().python == gym.python


def test_without_a_gym_there_is_none():
    assert find_gym() is None


def test_an_interpreter_that_is_named_and_has_no_gym_is_refused():
    with pytest.raises(ConfigError, match=r"gym_python=.* has no NeMo Gym; install nemo-gym"):
        find_gym(sys.executable)


def test_an_interpreter_that_is_not_there_is_refused_with_the_setting_that_named_it(monkeypatch):
    with pytest.raises(ConfigError, match="gym_python='/nowhere/python' cannot be asked"):
        find_gym("/nowhere/python")
    monkeypatch.setenv(GYM_PYTHON_VARIABLE, "no-such-python")
    with pytest.raises(ConfigError, match=f"{GYM_PYTHON_VARIABLE}='no-such-python' cannot be"):
        find_gym()


def test_a_benchmark_of_ours_is_prepared_here_whatever_gym_there_is(gym):
    planned = gymrl.plan_benchmark(
        "tool_arithmetic", overrides={"num_tasks": 1}, gym_python=gym.python
    )

    assert planned.plan.gym.version.startswith("gymrl-")
    assert planned == gymrl.plan_benchmark("tool_arithmetic", overrides={"num_tasks": 1})


def test_a_prepare_script_that_fails_there_is_told_with_what_it_raised(gym, tmp_path):
    folder = tmp_path / "benchmarks" / "broken"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.replace("theirs", "broken"))
    (folder / "prepare.py").write_text("import sys\nsys.exit('no disk')\n")
    with pytest.raises(ConfigError, match=r"broken/prepare\.py failed, in .*: SystemExit: no disk"):
        gymrl.plan_benchmark("broken", gym_python=gym.python)


def test_servers_of_gyms_own_are_refused_by_name_where_there_is_no_gym(gym):
    policy = {"policy_base_url": "http://127.0.0.1:9/v1", "policy_model_name": "m"}
    served = gymrl.serve_benchmark("theirs", overrides=policy, roots=[gym.packages])
    with pytest.raises(
        RealServersError, match=r"own servers: theirs \(app\.py\), .* none was found"
    ):
        served.__enter__()
