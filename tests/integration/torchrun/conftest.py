"""Launches jobs the way users do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).parent / "job.py"


class Job:
    """What a job said, and how it ended."""

    def __init__(self, code, output, log):
        self.code = code
        lines = [line[line.find("{") :] for line in output.splitlines() if "{" in line]
        self.said = [json.loads(line) for line in lines]
        self.log = f"{log[-6000:]}\n{self.errors()}"

    def of(self, rank):
        return [facts for facts in self.said if facts["rank"] == rank]

    def errors(self):
        return {facts["rank"]: facts for facts in self.said if "error" in facts}


def environment(**variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "RANK", "WORLD_"))}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        **variables,
    }


def run_command(command, timeout, variables):
    """Run a job to its end; all its processes are gone after that, also where it hangs."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, log = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # The launcher passes it on to its ranks, each of which is a session of its own.
            process.terminate()
            output, log = process.communicate(timeout=40)
            raise AssertionError(f"the job hung:\n{output}\n{log[-6000:]}") from None
        return Job(process.returncode, output, log)


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Run a job on so many ranks; 0: under plain python.

    With `all_speak` a rank that has said its error does not end before every other one has.
    """

    def run(name, *arguments, ranks=2, timeout=150, all_speak=False, **variables):
        if all_speak:
            variables["SPOKEN"] = str(tmp_path_factory.mktemp("spoken"))
        command = [sys.executable]
        if ranks:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={ranks}"]
        return run_command([*command, str(JOB), name, *map(str, arguments)], timeout, variables)

    return run
