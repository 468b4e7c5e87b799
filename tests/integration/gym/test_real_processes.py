"""One real server as a process: which interpreter, which environment, what is written where."""

import json
import sys

import anyio
import pytest

from gymrl.config import GymConfig
from gymrl.errors import ServerStartError
from gymrl.gym.real_processes import make_process_instances
from gymrl.gym.real_servers import RealServers

APP = """
import json, os, sys
print(json.dumps({"python": sys.executable, "path": sys.path[:2], **dict(os.environ)}), flush=True)
"""
APP_THAT_WOULD_START_RAY = """
import sys
from nemo_gym import server_utils
import beside

if __name__ == "__main__":
    server_utils.initialize_ray()
    print("serving", sys.argv, beside.__file__.endswith("beside.py"), flush=True)
"""


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "resources_servers" / "weather"
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(APP)
    return folder


def real(folder, **settings):
    config = {"here": {"resources_servers": {"weather": {"entrypoint": "app.py"}}}}
    leave_ray = settings.pop("leave_ray", frozenset())
    return RealServers(
        config=config | settings, directories={"here": str(folder)}, leave_ray=leave_ray
    )


async def output(config, servers, configuration="the: configuration\n"):
    """What the one server wrote until it ended."""
    died = anyio.Event()
    [instance] = make_process_instances(config, servers, lambda _: died.set())
    instance.configure(configuration)
    try:
        await instance.start()
        with anyio.fail_after(30):
            await died.wait()
    finally:
        await instance.stop()
    return await anyio.Path(config.log_dir, "here.log").read_text()


def settings(tmp_path, **more):
    return GymConfig(gym_python=sys.executable, log_dir=str(tmp_path / "logs"), **more)


async def test_a_server_knows_its_name_and_the_configuration_and_has_a_log_file(server, tmp_path):
    told = json.loads(await output(settings(tmp_path), real(server)))

    assert told["python"] == sys.executable
    assert told["NEMO_GYM_CONFIG_PATH"] == "here"
    assert told["NEMO_GYM_CONFIG_DICT"] == "the: configuration\n"
    assert told["RAY_ENABLE_AUTO_CONNECT"] == "0"
    assert told["path"][0] == str(server)


async def test_a_log_file_is_continued(server, tmp_path):
    await output(settings(tmp_path), real(server))

    assert len((await output(settings(tmp_path), real(server))).splitlines()) == 2


async def test_roots_of_the_run_come_before_those_of_the_variable(server, tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", "/one:/two")
    config = settings(tmp_path, gym_roots=(str(tmp_path),))

    told = json.loads(await output(config, real(server)))

    assert told["NEMO_GYM_EXTRA_ROOTS"] == f"{tmp_path}:/one:/two"


def linked_interpreter(folder):
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    return folder / "python"


async def test_the_environment_that_gym_made_for_a_server_is_its_own(server, tmp_path):
    made = linked_interpreter(tmp_path / "venvs/resources_servers/weather/.venv/bin")
    servers = real(server, uv_venv_dir=str(tmp_path / "venvs"))

    assert json.loads(await output(settings(tmp_path), servers))["python"] == str(made)


async def test_an_interpreter_that_is_named_for_an_instance_wins(server, tmp_path):
    linked_interpreter(tmp_path / "venvs/resources_servers/weather/.venv/bin")
    named = linked_interpreter(tmp_path / "other")
    config = settings(tmp_path, gym_pythons={"here": str(named)})
    servers = real(server, uv_venv_dir=str(tmp_path / "venvs"))

    assert json.loads(await output(config, servers))["python"] == str(named)


async def test_a_server_that_would_start_ray_is_run_as_by_python_but_without_it(server, tmp_path):
    (server / "app.py").write_text(APP_THAT_WOULD_START_RAY)
    (server / "beside.py").touch()
    package = server / "nemo_gym"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "server_utils.py").write_text(
        "def initialize_ray():\n    raise SystemExit('a Ray cluster')\n"
    )

    written = await output(settings(tmp_path), real(server, leave_ray=frozenset({"here"})))

    assert written == "gymrl: Ray is not started\nserving ['app.py'] True\n"


async def test_a_log_folder_that_cannot_be_made_is_an_error_of_the_start(server, tmp_path):
    (tmp_path / "logs").write_text("a file")
    [instance] = make_process_instances(settings(tmp_path), real(server), print)
    try:
        with pytest.raises(OSError, match="logs"):
            await instance.start()
    finally:
        await instance.stop()


async def test_a_configuration_that_no_process_can_be_given_is_refused_by_its_size(
    server, tmp_path
):
    most = (1 << 17) - len("NEMO_GYM_CONFIG_DICT=") - 1
    told = json.loads(await output(settings(tmp_path), real(server), "a" * most))
    assert len(told["NEMO_GYM_CONFIG_DICT"]) == most
    with pytest.raises(ServerStartError, match=r"131,073 bytes as YAML.*start fewer servers"):
        await output(settings(tmp_path), real(server), "a" * (most + 1))
