"""``serve_benchmark``: a benchmark's servers, for as long as a ``with`` block lasts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from anyio.from_thread import start_blocking_portal

from gymrl.actors import SpawnOptions
from gymrl.actors.spawn import spawn
from gymrl.benchmark.dataset import POLICY_MODEL, server_instances
from gymrl.benchmark.roots import find_benchmark, search_roots
from gymrl.benchmark.servers import BenchmarkServers, ServingConfig
from gymrl.benchmark.settings import checked_overrides, load_config, resolved, unresolved, value_of
from gymrl.config import GymConfig
from gymrl.errors import ConfigError, RealServersError
from gymrl.gym.registry import ENVIRONMENTS, MODELS, RELAY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from omegaconf import DictConfig

    from gymrl.benchmark.tasks import BaseServerConfig
    from gymrl.gym.registry import InstanceConfig

MODEL_TYPES = ("openai_model",)
DEFAULT_READINESS_S = 600.0
_STOP_TIMEOUT_S = 30.0


def serve_benchmark(
    benchmark: str,
    model_type: str = "openai_model",
    overrides: Mapping[str, Any] | None = None,
    registry_port: int | None = None,
    *,
    roots: Sequence[str | Path] = (),
) -> ServedBenchmark:
    """Start a benchmark's servers in a worker process, and stop them on exit.

    Use it as ``with serve_benchmark(...) as registry_server:`` or with ``async with``; both give
    the registry server that a :class:`~gymrl.benchmark.tasks.TaskRunner` talks to, once every
    server and the model endpoint are ready. The blocking form holds up an event loop while it
    starts and stops: where the policy is served by that loop, use ``async with``.

    Several benchmarks may be served by one process; nothing of the process is changed.

    Args:
        benchmark: ``NAME`` or ``NAME/FLAVOR``.
        model_type: ``openai_model``: an endpoint that speaks OpenAI's Responses API.
        overrides: Configuration keys merged on top, as in
            :func:`~gymrl.benchmark.planning.plan_benchmark`. ``policy_base_url`` (one, or a list
            that takes turns, with ``/v1``) and ``policy_model_name`` must be among them or in the
            configuration; ``policy_api_key`` where the endpoint wants one. Deadlines in seconds:
            ``server_spinup_timeout_seconds``, ``model_endpoint_readiness_timeout_seconds``.
        registry_port: Of the registry server; None: the configuration's ``head_server.port``, else
            a free one.
        roots: Searched for benchmarks before all others.

    Raises:
        ConfigError: On entering. The name, the configuration, the model type or the overrides are
            wrong; an instance needs one of NeMo Gym's own servers; the port is in use; a server or
            the model endpoint was not ready in time.
    """
    return ServedBenchmark(benchmark, model_type, overrides, registry_port, roots)


class ServedBenchmark:
    """What :func:`serve_benchmark` returns: enter it once, with ``with`` or ``async with``."""

    def __init__(
        self,
        benchmark: str,
        model_type: str,
        overrides: Mapping[str, Any] | None,
        registry_port: int | None,
        roots: Sequence[str | Path],
    ) -> None:
        self._benchmark = benchmark
        self._model_type = model_type
        self._overrides = overrides
        self._registry_port = registry_port
        self._roots = roots
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
        self._context = _serving(self._config())
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
        if self._model_type not in MODEL_TYPES:
            raise ConfigError(
                f"model_type={self._model_type!r}: gymrl serves {', '.join(MODEL_TYPES)}, an "
                "endpoint with OpenAI's Responses API; a model that has none can be given one with "
                "`gymrl serve`",
                setting="model_type",
            )
        overrides = checked_overrides(self._overrides)
        places = search_roots(self._roots)
        source = find_benchmark(self._benchmark, places)
        return serving_config(load_config(source, places, overrides), self._registry_port)


@contextlib.asynccontextmanager
async def _serving(config: ServingConfig) -> AsyncIterator[BaseServerConfig]:
    options = SpawnOptions(name="benchmark servers", close_timeout_s=_STOP_TIMEOUT_S)
    async with spawn(BenchmarkServers, options=options, config=config) as servers:
        yield await servers.call("start")


def serving_config(config: DictConfig, registry_port: int | None) -> ServingConfig:
    """What the worker is told, from a benchmark's configuration.

    Raises:
        ConfigError: See :func:`serve_benchmark`.
    """
    served = _served_instances(config)
    settings = {name: value_of(config, name) for name in _SETTINGS}
    name, key = settings["policy_model_name"], settings["policy_api_key"]
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"policy_model_name={name!r}: give the model's name in overrides",
            setting="policy_model_name",
        )
    base_urls = _base_urls(settings["policy_base_url"])
    gym = GymConfig.from_dict(
        {
            "servers": served,
            "model_name": name,
            "host": settings["default_host"] or "127.0.0.1",
            "port_range_low": settings["port_range_low"],
            "port_range_high": settings["port_range_high"],
            "spinup_timeout_s": _seconds(settings, "server_spinup_timeout_seconds"),
        }
    )
    head = settings["head_server"]
    port = registry_port
    if port is None and isinstance(head, dict):
        port = head.get("port")
    if port is not None and (type(port) is not int or not 0 < port < 65536):
        raise ConfigError(f"registry_port={port!r}: must be a port", setting="registry_port")
    return ServingConfig(
        gym=gym,
        base_urls=base_urls,
        api_key=str(key) if key else None,
        registry_port=port,
        readiness_timeout_s=_seconds(settings, "model_endpoint_readiness_timeout_seconds"),
    )


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
    return tuple(urls)


def _seconds(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name)
    if value is None:
        return DEFAULT_READINESS_S
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"{name}={value!r}: must be seconds, 0 or more", setting=name)
    # The field writes 0 for no deadline.
    return float(value) or float("inf")


def benchmark_servers(
    benchmark: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    roots: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """The server instances that :func:`serve_benchmark` would start, without the policy's.

    Args:
        benchmark: ``NAME`` or ``NAME/FLAVOR``.
        overrides: As for :func:`serve_benchmark`; the policy's keys need not be among them.
        roots: Searched for benchmarks before all others.

    Returns:
        Gym's own shape, every interpolation resolved; fits ``GymConfig.servers``.

    Raises:
        ConfigError: The name or the configuration is wrong.
        RealServersError: An instance needs one of NeMo Gym's own servers.
    """
    checked = checked_overrides(overrides)
    places = search_roots(roots)
    source = find_benchmark(benchmark, places)
    return _served_instances(load_config(source, places, checked, _NO_POLICY))


_NO_POLICY = {"policy_base_url": "", "policy_api_key": "", "policy_model_name": ""}


def _served_instances(config: DictConfig) -> dict[str, Any]:
    plain = server_instances(unresolved(config))
    real = {n: i.block["entrypoint"] for n, i in plain.items() if _is_real_gym_server(i)}
    if real:
        named = ", ".join(f"{name} ({entrypoint})" for name, entrypoint in sorted(real.items()))
        raise RealServersError(
            f"these instances are NeMo Gym's own servers, which gymrl does not start here: {named}. "
            "Start the benchmark with `gym env start` and give its registry server to TaskRunner, "
            "or name host and port of each such server that runs",
            setting=sorted(real)[0],
        )
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


def _is_real_gym_server(instance: InstanceConfig) -> bool:
    entrypoint = instance.block.get("entrypoint")
    if instance.name == POLICY_MODEL or not isinstance(entrypoint, str):
        return False
    if instance.kind == ENVIRONMENTS and instance.impl == RELAY:
        return False
    if instance.kind == MODELS and "base_url" in instance.block:
        return False
    return entrypoint.endswith(".py") and instance.block.get("port") is None
