"""Real Gym servers, in the interpreter that scripts/nemo-gym-peer makes."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import psutil
import pytest

from gymrl.testing.model_server import ModelCall
from gymrl.types import Row

PEER = Path(__file__).parents[2] / ".venv-nemo-gym"
OLD_PEER = Path(__file__).parents[2] / ".venv-nemo-gym-04"

# NeMo Gym 0.4 is tested where `scripts/nemo-gym-peer 0.4.0` has put it.
# In CI its absence is a failure.
wanted = os.environ.get("CI") == "true" or (OLD_PEER / ".installed").exists()
collect_ignore = [] if wanted else ["test_version_04.py"]


@pytest.fixture(scope="session")
def gym_python():
    """The interpreter that has NeMo Gym."""
    python = PEER / "bin" / "python"
    if not (PEER / ".installed").exists():
        message = f"{PEER} is not there: run scripts/nemo-gym-peer"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return str(python)


@pytest.fixture(scope="session")
def example_rows(gym_python):
    """The first rows of an environment's example data, routed to it."""
    [packages] = PEER.glob("lib/python3.*/site-packages")

    def read(environment, count=1, route=None):
        file = packages / "resources_servers" / environment / "data" / "example.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines()[:count]
        rows = [json.loads(line) for line in lines]
        for row in rows:
            row.pop("agent_ref", None)
            row["task_source"] = route or environment
        return rows

    return read


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """A folder with a benchmark of the user's, whose servers are Gym's; it may be written to."""
    folder = tmp_path_factory.mktemp("root") / "environments"
    return shutil.copytree(Path(__file__).with_name("environments"), folder)


def forecast(body):
    if any(item.get("type") == "function_call_output" for item in body["input"]):
        return ModelCall(text="It is cold.")
    return ModelCall(tool_calls=(("get_weather", '{"city": "Oslo"}'),))


@pytest.fixture(scope="session")
def forecaster():
    """A policy that asks for Oslo's weather and then answers."""
    return forecast


@pytest.fixture
def rays_processes():
    """Those of Ray under this one; a process of other tests, such as a browser's, may just end."""

    def find():
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() in ("raylet", "gcs_server"):
                    found.append(process)
        return found

    return find


@pytest.fixture
def peers_processes(gym_python):
    """The processes under this one (or another) that run in the peer's interpreter."""

    def find(root=None):
        found = []
        for process in psutil.Process(root).children(recursive=True):
            try:
                if process.cmdline()[:1] == [gym_python]:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    return find


class Planner:
    """A policy that does what was planned for a task, one call after the other.

    A task is known by the last message of its user; how far it is, by the tools' outputs.
    """

    def __init__(self):
        self.plans = {}

    def plan(self, row, *calls):
        self.plans[self._key(row["responses_create_params"])] = calls

    def __call__(self, body):
        calls = self.plans[self._key(body)]
        done = sum(item.get("type") == "function_call_output" for item in body["input"])
        return calls[min(done, len(calls) - 1)]

    @staticmethod
    def _key(body):
        messages = [item for item in body["input"] if item.get("role") == "user"]
        content = messages[-1]["content"]
        return content if isinstance(content, str) else content[0]["text"]


@pytest.fixture(scope="session")
def planner_class():
    return Planner


@pytest.fixture(scope="session")
def tool():
    """A policy's call of a tool."""

    def call(name, **arguments):
        return ModelCall(tool_calls=((name, json.dumps(arguments)),))

    return call


@pytest.fixture
def make_row():
    """A row for the example of a single tool call."""

    def make(index):
        body = {"responses_create_params": {"input": [{"role": "user", "content": "hi"}]}}
        return Row(
            index=index,
            task_index=index,
            rollout_index=0,
            route="example_single_tool_call",
            rollout_id=f"r{index}",
            body=json.dumps(body).encode(),
        )

    return make
