"""A breakpoint in an environment, on a real terminal and without one."""

import json
import os
import pty
import subprocess
import sys

import anyio.to_thread
import pytest

from gymrl.generation import GenerationServer, Policy
from gymrl.generation.chat import ChatFormat
from gymrl.testing import ScriptedGenerator, build_tiny_tokenizer

ENVIRONMENT = """
from gymrl.gym.embedded import ResourcesServer, Verdict


class Stops(ResourcesServer):
    async def verify(self, row, reply, state):
        breakpoint()
        return Verdict(reward=1.0)
"""
SERVERS = """
stops:
  resources_servers:
    stops: {entrypoint: "stops:Stops"}
stops_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: gymrl.gym.embedded.simple_agent:SimpleAgent
      resources_server: {type: resources_servers, name: stops}
      model_server: {type: responses_api_models, name: policy_model}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "stops.py").write_text(ENVIRONMENT)
    (tmp_path / "servers.yaml").write_text(SERVERS)
    row = {"task_source": "stops", "responses_create_params": {"input": "Hello"}}
    (tmp_path / "run.yaml").write_text("max_infra_attempts: 1")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


@pytest.fixture
async def command():
    """Rolls the row out, with a policy that lives here."""
    generator = ScriptedGenerator([[5, 2]])
    server = GenerationServer(Policy(generator, ChatFormat(build_tiny_tokenizer())))
    words = ["rollout", "rows.jsonl", "--servers", "servers.yaml", "--config", "run.yaml"]
    yield [sys.executable, "-m", "gymrl", *words, "--base-url", await server.start()]
    await server.close()
    await generator.close()


def on_a_terminal(command, folder, answers):
    """The exit code and what the terminal showed, when its user answers each prompt in turn."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*command, "--in-process"],
        cwd=folder,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(follower)
    shown = ""
    while True:
        try:
            read = os.read(leader, 4096)
        except OSError:  # Linux says EIO when nobody holds the other end
            break
        shown += read.decode(errors="replace")
        if answers and shown.endswith("(Pdb) "):
            os.write(leader, answers.pop(0).encode() + b"\n")
    os.close(leader)
    return process.wait(150), shown


async def test_a_breakpoint_stops_in_one_process_and_goes_on(command, folder):
    answers = ["p 'task of', row['task_source']", "c"]
    code, shown = await anyio.to_thread.run_sync(on_a_terminal, command, folder, answers)
    assert code == 0, shown
    assert "('task of', 'stops')" in shown
    assert "100.0%" in shown


async def test_leaving_the_debugger_ends_the_run_at_the_first_time(command, folder):
    code, shown = await anyio.to_thread.run_sync(on_a_terminal, command, folder, ["q"])
    assert code == 130, shown
    assert "SIGINT: ending the run" in shown
    assert shown.count("(Pdb)") == 1


async def test_a_breakpoint_in_a_worker_says_where_it_would_stop(command, folder):
    def run():
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=150, check=False
        )

    done = await anyio.to_thread.run_sync(run)
    assert done.returncode == 1
    assert "run in one process (in_process=True, --in-process)" in done.stderr
