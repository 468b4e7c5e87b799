"""What the command line does with the streams, the directory and the shell it is started in."""

import os
import socket
import subprocess
import sys

import pytest

GYMRL = [sys.executable, "-m", "gymrl"]


def run(command, **options):
    return subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, **options
    )


def test_standard_output_that_is_full_is_a_message():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*GYMRL, "benchmarks"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=150,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "gymrl: OSError: No space left on device\n")


def test_a_reader_that_leaves_early_is_no_error_to_tell():
    done = run(f"{' '.join(GYMRL)} rollout --help | head -n 1", shell=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_place_for_sockets(closed, tmp_path):
    # The loop of `doctor` has sockets; that nobody answers is what it has to tell.
    done = run(f"{' '.join(GYMRL)} doctor --base-url http://127.0.0.1:9/v1 {closed}", shell=True)
    assert done.returncode == 1
    assert ("http://127.0.0.1:9/v1" in done.stderr) == ("2>" not in closed)
    assert "Traceback" not in done.stderr


def test_the_command_finds_modules_of_the_working_directory(tmp_path):
    (tmp_path / "my_environments.py").write_text("print('imported')\n")
    # As the installed command does: its own directory is first, the working directory is not there.
    command = "import sys; sys.path.remove(''); from gymrl.cli import main; main(['benchmarks'])"
    look = "import atexit; atexit.register(__import__, 'my_environments'); " + command
    done = run([sys.executable, "-c", look], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""})
    assert done.stdout.splitlines()[-1] == "imported", done.stderr


def test_a_shell_completes_commands_and_options():
    request = {"_GYMRL_COMPLETE": "complete_bash", "COMP_WORDS": "gymrl ro", "COMP_CWORD": "1"}
    done = run(
        [sys.executable, "-c", "from gymrl.cli import main; main([])"],
        env={**os.environ, **request},
    )
    assert (done.returncode, done.stdout) == (0, "rollout\n"), done.stderr


def test_a_policy_server_that_is_not_there_is_told_with_what_to_look_at():
    command = [*GYMRL, "rollout", "tool_arithmetic", "--base-url", "http://127.0.0.1:9/v1"]
    done = run(command)
    assert done.returncode == 1
    assert "is the server up, and is --base-url its address" in done.stderr


def test_a_busy_port_is_told_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run([*GYMRL, "serve", "--model", "nobody/has-this-model", "--port", port])
    assert done.returncode != 0
    assert f"can't listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "choose another port" in " ".join(done.stderr.split())
