"""The registry (head) server, and what a run's configuration says about where rows go.

The registry tells clients the run's configuration (``/global_config_dict_yaml``: a JSON string that
holds YAML) and its server instances. Ours and real Gym's are read the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import yaml
from aiohttp import web

from gymrl.errors import ConfigError, RowValueError, ServerError
from gymrl.gym.client import HttpPool, raise_for_status
from gymrl.gym.embedded.base import json_response
from gymrl.gym.materialized import TASKSET_ROUTE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gymrl.errors import ServerDiedError

RESOURCES = "resources_servers"
AGENTS = "responses_api_agents"
MODELS = "responses_api_models"
ENVIRONMENTS = "environment_servers"
KINDS = (RESOURCES, AGENTS, MODELS, ENVIRONMENTS)

RELAY = "legacy_agent"
"""An environment server that only relays to its agent; gymrl asks the agent itself."""

TASKSET_ROUTES = "environment_server_routes"
"""The key under which a configuration names the environment server of each taskset."""

DIED = "died"
"""``status`` of a registry's readiness, once a server of its run is gone."""

_WILDCARD_HOSTS = ("0.0.0.0", "::")


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One server instance of a configuration in Gym's shape.

    Attributes:
        name: The instance.
        kind: One of `KINDS`.
        impl: The implementation's name.
        block: The implementation's block.
    """

    name: str
    kind: str
    impl: str
    block: dict[str, Any]

    def reference(self, key: str) -> str | None:
        """The name inside a reference such as ``resources_server: {name: ...}``."""
        value = self.block.get(key)
        name = value.get("name") if isinstance(value, Mapping) else None
        return name if isinstance(name, str) else None


def read_instances(config: Mapping[str, Any]) -> dict[str, InstanceConfig]:
    """The server instances of a configuration; other keys are no instances and left out.

    Raises:
        ConfigError: An instance has several kinds or implementations, or no block.
    """
    return {instance.name: instance for instance in _instances(config)}


def _instances(config: Mapping[str, Any]) -> Iterator[InstanceConfig]:
    for name, value in config.items():
        if not isinstance(value, Mapping) or not any(kind in value for kind in KINDS):
            continue
        kinds = [kind for kind in KINDS if kind in value]
        impls = value[kinds[0]]
        if len(kinds) != 1 or not isinstance(impls, Mapping) or len(impls) != 1:
            raise ConfigError(
                f"instance {name!r} must have one kind with one implementation: "
                f"{{{name}: {{{kinds[0]}: {{implementation: {{...}}}}}}}}",
                setting=name,
            )
        impl, block = next(iter(impls.items()))
        if not isinstance(block, Mapping):
            raise ConfigError(f"instance {name!r}: {impl} holds no settings", setting=name)
        yield InstanceConfig(name=str(name), kind=kinds[0], impl=str(impl), block=dict(block))


class RouteTable:
    """Where the rows of each route go.

    A route is the name of an agent, or of a resources server (a dataset's ``task_source``), which
    stands for the one agent in front of it. An environment server in front of an agent gets its
    rows, unless it merely relays. Materialized rows have the route of their taskset, which the
    configuration gives to an environment server.

    Args:
        config: The run's configuration; every instance that is asked has ``host`` and ``port``.
        default_host: Stands for a host that an instance lacks, or that means all interfaces.
    """

    def __init__(self, config: Mapping[str, Any], default_host: str = "127.0.0.1") -> None:
        self._instances = read_instances(config)
        self._default_host = default_host
        self._run_urls: dict[str, str] = {}
        routes = config.get(TASKSET_ROUTES)
        self._taskset_routes = dict(routes) if isinstance(routes, Mapping) else {}
        known = [*self._instances, *(f"{TASKSET_ROUTE}{name}" for name in self._taskset_routes)]
        self.routes = tuple(sorted(name for name in known if self._is_route(name)))

    def _is_route(self, name: str) -> bool:
        try:
            self.agent_of(name)
        except RowValueError:
            return False
        return True

    def agent_of(self, route: str) -> str:
        """The agent that a route leads to; of a taskset its environment server.

        Raises:
            RowValueError: There is no such instance, it is a model, no agent is in front of it,
                or several are; or no environment server takes the taskset. Lists the routes that
                exist.
        """
        if route.startswith(TASKSET_ROUTE):
            return self.taskset_server(route.removeprefix(TASKSET_ROUTE))
        instance = self._instances.get(route)
        if instance is None:
            raise self._unknown(route, "not in the running config")
        if instance.kind == AGENTS:
            return route
        if instance.kind != RESOURCES:
            raise self._unknown(
                route, "instance is not an agent or resources server (datasets cannot route here)"
            )
        agents = sorted(
            other.name
            for other in self._instances.values()
            if other.kind == AGENTS and other.reference("resources_server") == route
        )
        if len(agents) == 1:
            return agents[0]
        if agents:
            raise self._unknown(
                route,
                f"several agents use it ({', '.join(agents)}); name one in the row's agent_ref",
            )
        raise self._unknown(route, "no agent uses this resources server")

    def _unknown(self, route: str, why: str) -> RowValueError:
        known = ", ".join(getattr(self, "routes", ())) or "none"
        return RowValueError(
            f"cannot resolve route {route!r} to an agent: {why}. Known routes: {known}"
        )

    def run_url(self, route: str) -> str:
        """The ``/run`` URL for a route.

        Raises:
            RowValueError: As :meth:`agent_of`; or several environment servers front the agent.
            ConfigError: The instance has no address.
        """
        url = self._run_urls.get(route)
        if url is None:
            url = self._run_urls[route] = self._find_run_url(route)
        return url

    def _find_run_url(self, route: str) -> str:
        agent = self.agent_of(route)
        if route.startswith(TASKSET_ROUTE):
            return f"{self.url_of(agent)}/run"
        fronts = sorted(
            other.name
            for other in self._instances.values()
            if other.kind == ENVIRONMENTS
            and other.impl != RELAY
            and other.reference("agent_server") == agent
        )
        if len(fronts) > 1:
            raise self._unknown(
                route, f"agent {agent!r} is behind several environment servers: {fronts}"
            )
        return f"{self.url_of(fronts[0] if fronts else agent)}/run"

    def url_of(self, name: str) -> str:
        """The address of an instance.

        Raises:
            ConfigError: It has no port.
        """
        block = self._instances[name].block
        host, port = block.get("host"), block.get("port")
        if type(port) is not int or not 0 < port < 65536:
            raise ConfigError(f"instance {name!r} has no port (port={port!r})", setting=name)
        if not isinstance(host, str) or host in _WILDCARD_HOSTS:
            host = self._default_host
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def taskset_server(self, taskset: str) -> str:
        """The environment server that takes a taskset's materialized tasks.

        Raises:
            RowValueError: ``environment_server_routes`` does not name it, or names no such server.
        """
        name = self._taskset_routes.get(taskset)
        instance = self._instances.get(str(name))
        if instance is None or instance.kind != ENVIRONMENTS:
            known = ", ".join(map(str, self._taskset_routes)) or "none"
            raise RowValueError(
                f"no environment server takes the taskset {taskset!r}: environment_server_routes "
                f"has {name!r} for it. Known tasksets: {known}"
            )
        return instance.name

    @property
    def servers(self) -> dict[str, str]:
        """Addresses by name of the instances that rows pass; models and relays are left out."""
        return {
            name: self.url_of(name)
            for name, instance in self._instances.items()
            if instance.kind != MODELS
            and instance.impl != RELAY
            and type(instance.block.get("port")) is int
        }


async def read_registry(pool: HttpPool, url: str) -> RouteTable:
    """Ask a registry server for the run's configuration.

    Args:
        pool: An open pool.
        url: The registry's address.

    Raises:
        GymTransportError, GymRequestError: It did not answer, or with an error.
        ServerError: Its answer is no configuration.
        ConfigError: The configuration's instances are malformed.
    """
    address = f"{url.rstrip('/')}/global_config_dict_yaml"
    answer = await pool.get(address)
    raise_for_status(answer, "the registry")
    try:
        config = yaml.safe_load(msgspec.json.decode(answer.body, type=str))
    except (msgspec.DecodeError, yaml.YAMLError) as error:
        raise ServerError(
            f"{address} did not answer with a JSON string of YAML: {error}", url=address
        ) from error
    if not isinstance(config, dict):
        raise ServerError(f"{address}: the configuration is no mapping", url=address)
    return RouteTable(config, default_host=urlsplit(url).hostname or "127.0.0.1")


class RegistryServer:
    """Our registry: answers with a configuration that is given to it once all is up."""

    def __init__(self) -> None:
        self._config: dict[str, Any] = {}
        self._instances: list[dict[str, Any]] = []
        self._ready = False
        self._death: dict[str, Any] | None = None

    def report(self, death: ServerDiedError) -> None:
        """Say that a server is gone; the first death is kept."""
        if self._death is None:
            self._death = {
                "status": DIED,
                "instance": death.instance,
                "url": death.url,
                "exit_code": death.exit_code,
                "message": death.message,
            }

    def publish(self, config: dict[str, Any], instances: list[dict[str, Any]]) -> None:
        """Say that every server is ready, and where."""
        self._config = config
        self._instances = instances
        self._ready = True

    def application(self, max_body_bytes: int = 1 << 20) -> web.Application:
        """The aiohttp application.

        Args:
            max_body_bytes: Larger bodies get HTTP 413; the registry's own routes take none.
        """
        app = web.Application(client_max_size=max_body_bytes)
        for path in ("/", "/livez"):
            app.router.add_get(path, self._alive)
        for path in ("/readyz", "/healthz", "/health"):
            app.router.add_get(path, self._readiness)
        app.router.add_get("/global_config_dict_yaml", self._config_yaml)
        app.router.add_get("/server_instances", self._server_instances)
        return app

    async def _alive(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def _readiness(self, _: web.Request) -> web.Response:
        if self._death is not None:
            return json_response(self._death, HTTPStatus.SERVICE_UNAVAILABLE)
        if self._ready:
            return json_response({"status": "ok"})
        return json_response({"status": "starting"}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _config_yaml(self, _: web.Request) -> web.Response:
        return json_response(yaml.safe_dump(self._config, sort_keys=False, allow_unicode=True))

    async def _server_instances(self, _: web.Request) -> web.Response:
        return json_response(self._instances)
