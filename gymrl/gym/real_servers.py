"""Real Gym servers as processes of a worker, in the interpreter that has NeMo Gym."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import tempfile
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.errors import ConfigError, ServerDiedError, ServerStartError
from gymrl.gym.processes import GuardedProcess
from gymrl.gym.publication import POLICY_MODEL
from gymrl.gym.real_peer import __file__ as _PEER
from gymrl.gym.real_ray import why_ray
from gymrl.gym.registry import ENVIRONMENTS, MODELS, RELAY, RESOURCES, read_instances

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gymrl.config import GymConfig
    from gymrl.gym.registry import InstanceConfig

GYM_PORTS = (10001, 20000)
"""Where Gym itself looks for free ports: below those that the system gives out."""

_OLDEST = (0, 7)


class RealServers(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration as Gym reads it.

    Attributes:
        config: Includes and references resolved.
        directories: Where the implementation of each instance to start is.
    """

    config: dict[str, Any]
    directories: dict[str, str]


def asks_for_gym(config: GymConfig) -> bool:
    """Whether NeMo Gym has to read this configuration: it includes files, or names real servers.

    Raises:
        ConfigError: It does, and `gym_python` is not set.
    """
    if "config_paths" not in config.servers and (
        config.gym_python is None
        or not any(is_real(i) for i in read_instances(config.servers).values())
    ):
        return False
    if config.gym_python is None:
        raise ConfigError(
            "gym.servers includes Gym's own files (config_paths): set gym.gym_python to the "
            "interpreter that has NeMo Gym",
            setting="gym_python",
        )
    return True


def is_real(instance: InstanceConfig) -> bool:
    """Whether an instance is a script of a real Gym server."""
    entrypoint = instance.block.get("entrypoint")
    return isinstance(entrypoint, str) and entrypoint.endswith(".py")


async def read_by_gym(config: GymConfig, base_urls: Sequence[str], model_name: str) -> RealServers:
    """Have NeMo Gym read the configuration, in a process of its own.

    Args:
        config: The worker's configuration, with `gym_python`.
        base_urls: The policy's servers; empty: the configuration has its own.
        model_name: The policy's name.

    Raises:
        ConfigError: The interpreter has no NeMo Gym of a known version, Gym refuses the
            configuration, or an instance needs Ray; names it.
    """
    if config.token_source != "messages" and not config.servers.get("observability_enabled"):
        raise ConfigError(
            f"token_source={config.token_source!r}: Gym's own agents name their rollouts to the "
            "policy only where gym.servers sets observability_enabled (and model_call_capture_dir)",
            setting="token_source",
        )
    request = {
        "config": _request_config(config, base_urls, model_name),
        "policy": _policy_block(base_urls, model_name),
        "oldest": _OLDEST,
    }
    answer = await _ask_gym(_interpreter(config), request)
    if "config" not in answer:
        raise ConfigError(
            f"{config.gym_python} has NeMo Gym {answer['version']}, whose every server starts Ray; "
            "0.7 and newer can do without",
            setting="gym_python",
        )
    resolved: dict[str, Any] = answer["config"]
    for name, instance in read_instances(resolved).items():
        if instance.block.get("port") == -1:  # "none yet", of Gym's reading without a network
            del resolved[name][instance.kind][instance.impl]["port"]
    started = instances_to_start(resolved, base_urls)
    _refuse_ray(started, answer)
    directories = {name: answer["directories"][name] for name in started}
    return RealServers(config=resolved, directories=directories)


def instances_to_start(
    config: Mapping[str, Any], base_urls: Sequence[str]
) -> dict[str, InstanceConfig]:
    """The instances that become processes: all real ones but relays and a policy we stand in for."""
    return {
        name: instance
        for name, instance in read_instances(config).items()
        if is_real(instance) and not is_relay(instance) and not (name == POLICY_MODEL and base_urls)
    }


def is_relay(instance: InstanceConfig) -> bool:
    """Whether an instance only relays to its agent."""
    return instance.kind == ENVIRONMENTS and instance.impl == RELAY


def _request_config(config: GymConfig, base_urls: Sequence[str], model_name: str) -> dict[str, Any]:
    wanted: dict[str, Any] = {"default_host": config.host}
    if base_urls:
        wanted |= {
            "policy_base_url": base_urls[0],
            "policy_api_key": "none",
            "policy_model_name": model_name,
        }
    wanted |= config.servers
    for name, instance in read_instances(config.servers).items():
        is_override = "entrypoint" not in instance.block
        if instance.kind == RESOURCES and not is_override and not is_real(instance):
            # Gym wants a domain of every environment; ours need not have one.
            wanted[name] = {RESOURCES: {instance.impl: {"domain": "other", **instance.block}}}
    return wanted


def _policy_block(base_urls: Sequence[str], model_name: str) -> dict[str, Any]:
    block = {
        "entrypoint": "app.py",
        "base_url": base_urls[0] if base_urls else "",
        "api_key": "none",
        "model": model_name,
        "return_token_id_information": True,
    }
    return {MODELS: {"vllm_model": block}}


def _refuse_ray(started: Mapping[str, InstanceConfig], answer: Mapping[str, Any]) -> None:
    reasons = []
    for name, instance in started.items():
        entrypoint = instance.block["entrypoint"]
        directory = answer["directories"].get(name)
        if directory is None:
            raise ConfigError(
                f"instance {name!r}: no {instance.kind}/{instance.impl}/{entrypoint} in "
                f"{', '.join(answer['roots'])}",
                setting=name,
            )
        reason = why_ray(directory, entrypoint, answer["roots"])
        if reason is not None:
            reasons.append(f"{name} ({reason})")
    if reasons:
        raise ConfigError(
            f"gymrl starts no Ray, and these servers need it: {'; '.join(reasons)}. Run them "
            "yourself and give their registry as gym.registry_url",
            setting="servers",
        )


def _interpreter(config: GymConfig) -> str:
    """`gym_python` as servers can be started with, each in a directory of its own."""
    named = os.path.expanduser(str(config.gym_python))
    # Symbolic links stay: an interpreter knows its environment by the path it is called by.
    return os.path.abspath(named) if os.sep in named else shutil.which(named) or named


async def _ask_gym(python: str, request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gymrl-") as folder:
        asked, answered = anyio.Path(folder, "request.json"), anyio.Path(folder, "answer.json")
        await asked.write_bytes(msgspec.json.encode(request))
        process = GuardedProcess(
            "nemo_gym config",
            [python, "-P", _PEER, str(asked), str(answered)],
            cwd=os.getcwd(),  # relative paths in a configuration begin here
            env=_environment(),
        )
        try:
            await process.start()
            await process.wait()
        except OSError as error:
            raise ConfigError(
                f"gym_python={python!r} cannot be started: {error}", setting="gym_python"
            ) from error
        finally:
            await process.stop(grace_s=0)
        if not await answered.exists():
            raise ConfigError(
                f"gym_python={python!r} {process.how_it_ended} before it had read the "
                f"configuration; its last lines:\n{process.last_lines}",
                setting="gym_python",
            )
        answer: dict[str, Any] = msgspec.json.decode(await answered.read_bytes())
    if "error" not in answer:
        return answer
    if answer["error"] in ("PackageNotFoundError", "ModuleNotFoundError"):
        raise ConfigError(
            f"gym_python={python!r} has no NeMo Gym that works: {answer['message']}",
            setting="gym_python",
        )
    raise ConfigError(
        f"NeMo Gym refuses the configuration: {answer['error']}: {answer['message']}",
        setting="servers",
    )


def _environment(**more: str) -> dict[str, str]:
    """Ours, less what belongs to our interpreter."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return kept | {"PYTHONUNBUFFERED": "1"} | more


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
            taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
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
        python: The interpreter that has NeMo Gym.
        directory: Where the implementation is.
        port: Where it will listen; released when it is stopped.
        on_death: Called with what happened when it ends without having been stopped.
    """

    def __init__(
        self,
        config: InstanceConfig,
        python: str,
        directory: str,
        port: ReservedPort,
        on_death: Callable[[ServerDiedError], None],
    ) -> None:
        self.config = config
        self.directory = directory
        self._python = python
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
    def pid(self) -> int | None:
        """Its process id, once it was started."""
        return self._process.pid if self._process is not None else None

    def configure(self, config_yaml: str) -> None:
        """Say what the whole run's configuration is, every address in it."""
        self._config_yaml = config_yaml

    async def start(self) -> None:
        """Start the process; does not wait until it answers."""
        name = self.config.name
        self._process = GuardedProcess(
            name,
            [self._python, str(self.config.block["entrypoint"])],
            cwd=self.directory,
            env=_environment(
                NEMO_GYM_CONFIG_DICT=self._config_yaml,
                NEMO_GYM_CONFIG_PATH=name,
                PYTHONPATH=self.directory,
            ),
            on_exit=self._has_ended,
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
    python = _interpreter(config)
    with contextlib.ExitStack() as undo:
        made = []
        for name, directory in real.directories.items():
            block = instances[name].block
            try:
                port = ReservedPort(block.get("host") or config.host, block.get("port"), low, high)
            except ServerStartError as error:
                raise ServerStartError(f"server {name!r}: {error}", instance=name) from error
            undo.callback(port.release)
            made.append(ProcessInstance(instances[name], python, directory, port, on_death))
        undo.pop_all()
    return made
