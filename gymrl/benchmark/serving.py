"""``serve_benchmark``: a benchmark's servers, for as long as a ``with`` block lasts."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec
from anyio.from_thread import start_blocking_portal

from gymrl.actors import SpawnOptions
from gymrl.actors.spawn import spawn
from gymrl.benchmark.dataset import server_instances
from gymrl.benchmark.installed_gym import GYM_PYTHON_VARIABLE, find_gym
from gymrl.benchmark.real import (
    RESPONSES_ENDPOINT,
    RealRun,
    gym_servers,
    real_instances,
    refuse_real,
    refuse_without_gym,
    with_model_server,
)
from gymrl.benchmark.roots import find_benchmark, search_roots
from gymrl.benchmark.servers import BenchmarkServers, ServingConfig
from gymrl.benchmark.settings import checked_overrides, load_config, resolved, unresolved, value_of
from gymrl.config import GymConfig, require_urls
from gymrl.errors import ConfigError
from gymrl.gym.registry import ENVIRONMENTS, RELAY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from omegaconf import DictConfig

    from gymrl.benchmark.tasks import BaseServerConfig

DEFAULT_READINESS_S = 600.0
_STOP_TIMEOUT_S = 30.0


def serve_benchmark(  # noqa: PLR0913 - the first four are promised to callers
    benchmark: str,
    model_type: str = "openai_model",
    overrides: Mapping[str, Any] | None = None,
    registry_port: int | None = None,
    *,
    roots: Sequence[str | Path] = (),
    gym_python: str | None = None,
    work_dir: str | Path | None = None,
) -> ServedBenchmark:
    """Start a benchmark's servers in a worker process, and stop them on exit.

    Use it as ``with serve_benchmark(...) as registry_server:`` or with ``async with``; both give
    the registry server that a :class:`~gymrl.benchmark.tasks.TaskRunner` talks to, once every
    server and the model endpoint are ready. The blocking form holds up an event loop while it
    starts and stops: where the policy is served by that loop, use ``async with``.

    Several benchmarks may be served by one process; nothing of the process is changed.

    Servers of NeMo Gym's own (``entrypoint: app.py``) are processes in the interpreter that has
    NeMo Gym, which reads the configuration; no Ray is started. They end with this process, however
    it ends.

    Args:
        benchmark: ``NAME`` or ``NAME/FLAVOR``.
        model_type: ``openai_model``: an endpoint that speaks OpenAI's Responses API, behind a relay
            of ours. Any other is a model server of NeMo Gym's, started like its other servers:
            ``vllm_model`` for an endpoint that speaks Chat Completions, for example.
        overrides: Configuration keys merged on top, as in
            :func:`~gymrl.benchmark.planning.plan_benchmark`. ``policy_base_url`` (one, or a list
            that takes turns, with ``/v1``) and ``policy_model_name`` must be among them or in the
            configuration; ``policy_api_key`` where the endpoint wants one. Deadlines in seconds:
            ``server_spinup_timeout_seconds``, ``model_endpoint_readiness_timeout_seconds``.
        registry_port: Of the registry server; None: the configuration's ``head_server.port``, else
            a free one.
        roots: Searched for benchmarks before all others.
        gym_python: The interpreter that has NeMo Gym; None: what
            :func:`~gymrl.benchmark.installed_gym.find_gym` finds.
        work_dir: Gets what each of Gym's servers writes, as ``logs/<instance>.log``.

    Raises:
        ConfigError: On entering. The name, the configuration, the model type or the overrides are
            wrong; the port is in use; a server or the model endpoint was not ready in time, which is
            then named.
        RealServersError: On entering. Servers of NeMo Gym's own are needed, and no NeMo Gym was
            found, or one needs Ray.
    """
    return ServedBenchmark(
        _Asked(
            benchmark=benchmark,
            model_type=model_type,
            overrides=overrides,
            registry_port=registry_port,
            roots=tuple(str(root) for root in roots),
            gym_python=gym_python,
            work_dir=str(work_dir) if work_dir is not None else None,
        )
    )


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    benchmark: str
    model_type: str
    overrides: Any
    registry_port: int | None
    roots: tuple[str, ...]
    gym_python: str | None
    work_dir: str | None


class ServedBenchmark:
    """What :func:`serve_benchmark` returns: enter it once, with ``with`` or ``async with``."""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked
        self._blocking = contextlib.ExitStack()
        self._context: contextlib.AbstractAsyncContextManager[BaseServerConfig] | None = None
        self._entered = False

    def __enter__(self) -> BaseServerConfig:
        config = self._config()
        with contextlib.ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal("asyncio"))
            context = portal.wrap_async_context_manager(_serving(config))
            registry_server = stack.enter_context(context)
            self._blocking = stack.pop_all()
        return registry_server

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The block's error is not told to the servers: they stop the same way after one.
        self._blocking.close()

    async def __aenter__(self) -> BaseServerConfig:
        # Files are read and an interpreter is asked meanwhile.
        config = await anyio.to_thread.run_sync(self._config)
        self._context = _serving(config)
        return await self._context.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        context, self._context = self._context, None
        if context is not None:
            await context.__aexit__(kind, error, traceback)

    def _config(self) -> ServingConfig:
        if self._entered:
            raise RuntimeError("this was entered already; call serve_benchmark again")
        self._entered = True
        asked = self._asked
        overrides = checked_overrides(asked.overrides)
        gym = find_gym(asked.gym_python)
        places = search_roots(asked.roots, gym)
        source = find_benchmark(asked.benchmark, places)
        config = load_config(source, places, overrides)
        real = real_instances(config)
        if not real and asked.model_type == RESPONSES_ENDPOINT:
            return serving_config(config, asked.registry_port)
        if gym is None:
            raise _no_gym(real, asked.model_type)
        if real:
            servers = gym_servers(source, overrides, asked.model_type, places)
        else:
            ours = served_instances(config)
            servers = with_model_server(ours, overrides, asked.model_type, places)
        run = RealRun(
            servers=servers,
            python=gym.python,
            roots=asked.roots,
            log_dir=os.path.join(asked.work_dir, "logs") if asked.work_dir is not None else None,
            has_model_server=asked.model_type != RESPONSES_ENDPOINT,
        )
        return serving_config(config, asked.registry_port, run)


def _no_gym(real: Mapping[str, str], model_type: str) -> ConfigError:
    if real:
        return refuse_without_gym(real)
    return ConfigError(
        f"model_type={model_type!r} is a model server of NeMo Gym's, and no interpreter that has "
        f"NeMo Gym was found: name one (gym_python, or {GYM_PYTHON_VARIABLE}). Without it the policy "
        f"is {RESPONSES_ENDPOINT!r}, an endpoint with OpenAI's Responses API; a model that has none "
        "can be given one with `gymrl serve`",
        setting="model_type",
    )


@contextlib.asynccontextmanager
async def _serving(config: ServingConfig) -> AsyncIterator[BaseServerConfig]:
    options = SpawnOptions(name="benchmark servers", close_timeout_s=_STOP_TIMEOUT_S)
    async with spawn(BenchmarkServers, options=options, config=config) as servers:
        yield await servers.call("start")


def serving_config(
    config: DictConfig, registry_port: int | None, real: RealRun | None = None
) -> ServingConfig:
    """What the worker is told, from a benchmark's configuration.

    Args:
        config: The configuration.
        registry_port: Of the registry server.
        real: How servers of NeMo Gym's own are run; None: there are none.

    Raises:
        ConfigError: See :func:`serve_benchmark`.
    """
    settings = {name: value_of(config, name) for name in _SETTINGS}
    servers: dict[str, Any] = {}
    if real is None:
        servers["servers"] = served_instances(config)
    else:
        servers = {
            "servers": real.servers,
            "gym_python": real.python,
            "gym_roots": list(real.roots),
            "log_dir": real.log_dir,
        }
    # A model server of Gym's says itself what it needs.
    needs_policy = real is None or not real.has_model_server
    name, key = settings["policy_model_name"], settings["policy_api_key"]
    if needs_policy and (not isinstance(name, str) or not name):
        raise ConfigError(
            f"policy_model_name={name!r}: give the model's name in overrides",
            setting="policy_model_name",
        )
    base_url = settings["policy_base_url"]
    base_urls = _base_urls(base_url) if needs_policy or base_url else ()
    gym = GymConfig.from_dict(
        {
            **servers,
            "model_name": name or "policy",
            "host": settings["default_host"] or "127.0.0.1",
            "port_range_low": settings["port_range_low"],
            "port_range_high": settings["port_range_high"],
            "spinup_timeout_s": _seconds(settings, "server_spinup_timeout_seconds"),
        }
    )
    return ServingConfig(
        gym=gym,
        base_urls=base_urls,
        api_key=str(key) if key else None,
        registry_port=_registry_port(settings, registry_port),
        readiness_timeout_s=_seconds(settings, "model_endpoint_readiness_timeout_seconds"),
        has_model_server=not needs_policy,
    )


def _registry_port(settings: Mapping[str, Any], port: int | None) -> int | None:
    head = settings["head_server"]
    if port is None and isinstance(head, dict):
        port = head.get("port")
    if port is not None and (type(port) is not int or not 0 < port < 65536):
        raise ConfigError(f"registry_port={port!r}: must be a port", setting="registry_port")
    return port


_SETTINGS = (
    "policy_base_url",
    "policy_api_key",
    "policy_model_name",
    "default_host",
    "head_server",
    "port_range_low",
    "port_range_high",
    "server_spinup_timeout_seconds",
    "model_endpoint_readiness_timeout_seconds",
)


def _base_urls(given: object) -> tuple[str, ...]:
    urls = [given] if isinstance(given, str) else given
    if (
        not isinstance(urls, list)
        or not urls
        or not all(isinstance(u, str) and u.startswith(("http://", "https://")) for u in urls)
    ):
        raise ConfigError(
            f"policy_base_url={given!r}: give the URL of the model's endpoint, with /v1, in "
            "overrides",
            setting="policy_base_url",
        )
    require_urls("policy_base_url", tuple(urls))
    return tuple(urls)


def _seconds(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name)
    if value is None:
        return DEFAULT_READINESS_S
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"{name}={value!r}: must be seconds, 0 or more", setting=name)
    # The field writes 0 for no deadline.
    return float(value) or float("inf")


def served_instances(config: DictConfig) -> dict[str, Any]:
    """The server instances of a configuration of ours alone, resolved, without the policy's.

    Raises:
        RealServersError: One needs NeMo Gym's own servers.
        ConfigError: There is none, or a reference in it leads nowhere.
    """
    plain = server_instances(unresolved(config))
    real = real_instances(config)
    if real:
        raise refuse_real(real)
    served: dict[str, Any] = {}
    for name, instance in plain.items():
        if instance.kind == ENVIRONMENTS and instance.impl == RELAY:
            continue
        node = config[name][instance.kind][instance.impl]
        node.pop("datasets", None)
        block = resolved(node, f"instance {name!r}")
        served[name] = {instance.kind: {instance.impl: block}}
    if not served:
        raise ConfigError("the configuration declares no server instance", setting="benchmark")
    return served
