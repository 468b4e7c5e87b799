"""Real Gym servers as processes: their ports, their interpreters, their output."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gymrl.addresses import address_family
from gymrl.errors import ServerDiedError, ServerStartError
from gymrl.gym.policy_key import without_key
from gymrl.gym.processes import GuardedProcess
from gymrl.gym.real_start import __file__ as _START
from gymrl.gym.registry import read_instances

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.config import GymConfig
    from gymrl.gym.real_servers import RealServers
    from gymrl.gym.registry import InstanceConfig

GYM_PORTS = (10001, 20000)
"""Where Gym itself looks for free ports: below those that the system gives out."""

ROOTS_VARIABLE = "NEMO_GYM_EXTRA_ROOTS"
_CONFIG_VARIABLE = "NEMO_GYM_CONFIG_DICT"
_LONGEST_VARIABLE = 1 << 17
"""Bytes that Linux gives to one variable of a process, its name and its end included."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How one server is started.

    Attributes:
        python: Its interpreter.
        directory: Where its implementation is.
        environment: Of the process, complete but for the configuration.
        leaves_ray: Whether Gym would start Ray for it, and must not.
        log_file: Gets what it writes; None: no file.
    """

    python: str
    directory: str
    environment: dict[str, str]
    leaves_ray: bool = False
    log_file: str | None = None


def interpreter(config: GymConfig) -> str:
    """`gym_python` as servers can be started with, each in a directory of its own."""
    return _as_called(str(config.gym_python))


def _as_called(python: str) -> str:
    named = os.path.expanduser(python)
    # Symbolic links stay: an interpreter knows its environment by the path it is called by.
    return os.path.abspath(named) if os.sep in named else shutil.which(named) or named


def environment(config: GymConfig) -> dict[str, str]:
    """Of processes in Gym's interpreter: ours, less what belongs to our own interpreter."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    ours = without_key(os.environ, config.api_key_env)
    kept = {name: value for name, value in ours.items() if name not in own}
    roots = [os.path.abspath(os.path.expanduser(root)) for root in config.gym_roots]
    if roots:
        kept[ROOTS_VARIABLE] = os.pathsep.join([*roots, *_named_roots()])
    return kept | {"PYTHONUNBUFFERED": "1", "RAY_ENABLE_AUTO_CONNECT": "0"}


def _named_roots() -> list[str]:
    return [part for part in os.environ.get(ROOTS_VARIABLE, "").split(os.pathsep) if part]


class ReservedPort:
    """A port that nobody else gets until a server of ours listens on it, nor afterwards.

    It is bound here and not listened on; the server may bind it too, since both ask for
    ``SO_REUSEADDR``. Workers of one machine so never choose the same.

    Args:
        host: The address.
        port: The only one that will do; None takes a free one.
        low: First port of the range, where `port` is None.
        high: Last port.

    Raises:
        ServerStartError: The port, or every port of the range, is taken.
    """

    def __init__(self, host: str, port: int | None, low: int, high: int) -> None:
        self.host = host
        self._socket: socket.socket | None = None
        candidates = [port] if port else random.sample(range(low, high + 1), high - low + 1)
        for candidate in candidates:
            taken = socket.socket(address_family(host))
            try:
                # Without SO_REUSEADDR, so that a port that anybody else has is refused.
                taken.bind((host, candidate))
            except OSError:
                taken.close()
                continue
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket, self.port = taken, candidate
            return
        which = f"port {port} is" if port else f"all ports from {low} to {high} are"
        raise ServerStartError(f"{which} taken on {host}")

    @property
    def url(self) -> str:
        """The address."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def release(self) -> None:
        """Give it up. Safe to call twice."""
        held, self._socket = self._socket, None
        if held is not None:
            held.close()


class ProcessInstance:
    """A real Gym server, running as a process.

    Args:
        config: The instance.
        launch: How it is started.
        port: Where it will listen; released when it is stopped.
        on_death: Called with what happened when it ends without having been stopped.
    """

    def __init__(
        self,
        config: InstanceConfig,
        launch: Launch,
        port: ReservedPort,
        on_death: Callable[[ServerDiedError], None],
    ) -> None:
        self.config = config
        self._launch = launch
        self._port = port
        self._on_death = on_death
        self._is_stopping = False
        self._process: GuardedProcess | None = None
        self._config_yaml = ""

    @property
    def url(self) -> str:
        """Its address, known before it runs."""
        return self._port.url

    @property
    def directory(self) -> str:
        """Where its implementation is."""
        return self._launch.directory

    @property
    def pid(self) -> int | None:
        """Its process id, once it was started."""
        return self._process.pid if self._process is not None else None

    def configure(self, config_yaml: str) -> None:
        """Say what the whole run's configuration is, every address in it."""
        self._config_yaml = config_yaml

    async def start(self) -> None:
        """Start the process; does not wait until it answers.

        Raises:
            ServerStartError: The configuration is larger than what a process can be given.
        """
        name, launch = self.config.name, self._launch
        size = len(self._config_yaml.encode()) + len(_CONFIG_VARIABLE) + 2
        if size > _LONGEST_VARIABLE:
            raise ServerStartError(
                f"the whole configuration, which NeMo Gym's servers get in {_CONFIG_VARIABLE}, has "
                f"{size:,} bytes as YAML, and a variable may have {_LONGEST_VARIABLE:,}: start fewer "
                "servers in one run, or put long texts (prompts) into files",
                instance=name,
            )
        # The folder of our own script must not be a place where the server's imports are found.
        started_by = ["-P", _START] if launch.leaves_ray else []
        self._process = GuardedProcess(
            name,
            [launch.python, *started_by, str(self.config.block["entrypoint"])],
            cwd=launch.directory,
            env=launch.environment
            | {
                _CONFIG_VARIABLE: self._config_yaml,
                "NEMO_GYM_CONFIG_PATH": name,
                "PYTHONPATH": launch.directory,
            },
            on_exit=self._has_ended,
            log_file=launch.log_file,
        )
        await self._process.start()

    def check(self) -> None:
        """Raise where it is known to be gone.

        Raises:
            ServerDiedError: With exit code and last lines.
        """
        if self._process is not None and self._process.has_ended:
            raise self._death(self._process)

    def _has_ended(self) -> None:
        if self._process is not None and not self._is_stopping:
            self._on_death(self._death(self._process))

    def _death(self, process: GuardedProcess) -> ServerDiedError:
        name = self.config.name
        return ServerDiedError(
            f"server {name!r} {process.how_it_ended}; its last lines:\n{process.last_lines}",
            instance=name,
            url=self.url,
            exit_code=process.exit_code,
        )

    async def stop(self) -> None:
        """Interrupt it, kill what does not end. Safe to call twice."""
        self._is_stopping = True
        try:
            if self._process is not None:
                await self._process.stop()
        finally:
            self._port.release()


def make_process_instances(
    config: GymConfig, real: RealServers, on_death: Callable[[ServerDiedError], None]
) -> list[ProcessInstance]:
    """The instances to start, each with its port reserved; nothing runs yet.

    Raises:
        ServerStartError: There is no port for one; names it.
    """
    low, high = GYM_PORTS
    if config.port_range_low is not None and config.port_range_high is not None:
        low, high = config.port_range_low, config.port_range_high
    instances = read_instances(real.config)
    with contextlib.ExitStack() as undo:
        made = []
        for name in real.directories:
            block = instances[name].block
            try:
                port = ReservedPort(block.get("host") or config.host, block.get("port"), low, high)
            except ServerStartError as error:
                raise ServerStartError(f"server {name!r}: {error}", instance=name) from error
            undo.callback(port.release)
            launch = _launch_of(config, real, instances[name])
            made.append(ProcessInstance(instances[name], launch, port, on_death))
        undo.pop_all()
    return made


def _launch_of(config: GymConfig, real: RealServers, instance: InstanceConfig) -> Launch:
    log_file = None
    if config.log_dir is not None:
        name = instance.name.replace(os.sep, "_")
        log_file = os.path.join(os.path.abspath(os.path.expanduser(config.log_dir)), f"{name}.log")
    return Launch(
        python=_python_of(config, real, instance),
        directory=real.directories[instance.name],
        environment=environment(config),
        leaves_ray=instance.name in real.leave_ray,
        log_file=log_file,
    )


def _python_of(config: GymConfig, real: RealServers, instance: InstanceConfig) -> str:
    """Named for it; else of the environment that Gym made for it; else the one of all."""
    named = config.gym_pythons.get(instance.name)
    if named is not None:
        return _as_called(named)
    made_by_gym = Path(
        str(real.config.get("uv_venv_dir", "")), instance.kind, instance.impl, ".venv/bin/python"
    ).absolute()
    return str(made_by_gym) if made_by_gym.exists() else interpreter(config)
