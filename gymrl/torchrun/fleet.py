"""A fleet over all nodes: on each its generators, and Gym workers that call only those."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from gymrl.actors import SpawnOptions, connect_actor
from gymrl.concurrency import close_within, gather_bounded
from gymrl.errors import GymrlError
from gymrl.gym.shards import PlannedShard, ShardSet, instance_labels, plan_shards
from gymrl.rollout.fleet import Fleet
from gymrl.rollout.instance import Instance
from gymrl.rollout.restarts import Restarts
from gymrl.torchrun.config import transfer_arguments
from gymrl.torchrun.remote import RemoteNode
from gymrl.torchrun.workers import NodeHost, NodeWorkers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from gymrl.actors import ActorHandle
    from gymrl.config import GenerationConfig
    from gymrl.torchrun.config import TorchrunConfig
    from gymrl.torchrun.workers import Node


class NodeAddress(msgspec.Struct, frozen=True):
    """Where another node's workers are reached."""

    node: int
    host: str
    port: int

    @property
    def where(self) -> str:
        """As errors name it."""
        return f"node {self.node} ({self.host})"


class NodeFleet(Fleet):
    """Starts the workers of every node, keeps them running, and ends them.

    A generator that is started again serves the weights of now before it is asked anything.

    Args:
        config: Of the job.
        own: The workers of the driver's node.
        others: The other nodes.
        secret: Of the links to them.
    """

    def __init__(
        self,
        config: TorchrunConfig,
        own: NodeWorkers,
        others: Sequence[NodeAddress],
        secret: bytes,
    ) -> None:
        super().__init__(config.rollout)
        self._job = config
        self._own = own
        self._others = tuple(others)
        self._secret = secret
        self._nodes: list[Node] = []
        self._links: list[tuple[Any, RemoteNode]] = []
        self._generators: dict[str, Instance] = {}
        self._ports: dict[str, int] = {}
        self._plan: tuple[PlannedShard, ...] = tuple(
            msgspec.structs.replace(
                shard,
                labels=instance_labels(
                    shard.name,
                    max(len(shard.labels), config.per_node.gym_workers) * (1 + len(others)),
                ),
            )
            for shard in plan_shards(config.rollout.gym, config.rollout.shards)
        )

    @property
    def link_bytes(self) -> int:
        """Bytes sent to other nodes so far."""
        return sum(handle.bytes_sent for handle, _ in self._links)

    def _make_instances(self) -> None:
        """Only what needs no link; the others follow when the links are open."""
        self._restarts = Restarts(self._policy)

    async def _start(self) -> None:
        self._waiting = {address.where for address in self._others}
        self._nodes = [self._own, *await gather_bounded(self._connect, self._others)]
        self._waiting.clear()
        self._add_generators()
        for shard in self._plan:
            self._add_workers(shard)
        self._waiting = set(self._instances)
        await gather_bounded(lambda instance: instance.open(), self.instances)
        await gather_bounded(self._prepare, list(self._generators))
        workers = [label for shard in self._plan for label in shard.labels]
        await gather_bounded(self._prepare, workers)
        self._shards = ShardSet([self._started(shard) for shard in self._plan])

    async def _connect(self, address: NodeAddress) -> RemoteNode:
        seconds = self._job.heartbeat_timeout_s
        options = SpawnOptions(
            name=address.where,
            start_timeout_s=self._config.start_timeout_s,
            keepalive_s=seconds / 4,
            expiry_s=seconds,
        )
        connecting = connect_actor(
            NodeHost, address.host, address.port, secret=self._secret, options=options
        )
        handle = await connecting.__aenter__()
        node = RemoteNode(handle, address.where)
        self._links.append((handle, node))
        return node

    def _add_generators(self) -> None:
        if self._config.generation is None:
            return
        for number, node in enumerate(self._nodes):
            for rank in range(self._job.per_node.generators):
                label = f"generator {number}/{rank}"
                self._generators[label] = self._instances[label] = Instance(
                    label,
                    functools.partial(self._open_one_generator, node, label, rank),
                    functools.partial(self._start_one_generator, node, label),
                    self._restarts,
                    start_timeout_s=self._config.start_timeout_s,
                )

    def _add_workers(self, shard: PlannedShard) -> None:
        per_node = len(shard.labels) // len(self._nodes)
        generators = list(self._generators.values())
        for place, label in enumerate(shard.labels):
            number = place // per_node
            generator = None
            if generators:
                first = number * self._job.per_node.generators
                generator = generators[first + place % self._job.per_node.generators]
            node = self._nodes[number]
            self._instances[label] = Instance(
                label,
                functools.partial(self._named_call, number, node.open_gym, label, shard.config),
                functools.partial(self._spin_up_at, number, generator),
                self._restarts,
                start_timeout_s=self._config.start_timeout_s,
                needs=generator,
            )

    async def _open_one_generator(self, node: Node, label: str, rank: int) -> ActorHandle:
        config = self._config.generation
        assert config is not None
        number = self._nodes.index(node)
        handle: ActorHandle = await self._named_call(
            number, node.open_generator, label, self._placed(config, label, rank)
        )
        return handle

    def _placed(self, config: GenerationConfig, label: str, rank: int) -> GenerationConfig:
        """With its place on the node, and the port that agents know where it had one."""
        vllm, transfer = msgspec.structs.replace(config.vllm, rank=rank), self._job.weight_transfer
        if transfer is not None:
            arguments = transfer_arguments(transfer, vllm.engine_args)
            vllm = msgspec.structs.replace(vllm, engine_args=arguments)
        return msgspec.structs.replace(config, vllm=vllm, port=self._ports.get(label, config.port))

    async def _start_one_generator(self, node: Node, label: str, worker: ActorHandle) -> Any:
        endpoint = await self._named_call(self._nodes.index(node), node.start_generator, label)
        self._max_model_len = endpoint.max_model_len
        self._ports[label] = urlsplit(endpoint.base_url).port or 0
        return endpoint

    async def _spin_up_at(
        self, number: int, generator: Instance | None, worker: ActorHandle
    ) -> Any:
        base_urls, model = list(self._config.gym.base_urls), self._config.gym.model_name
        if generator is not None:
            base_urls, model = [generator.endpoint.base_url], generator.endpoint.model
        return await self._named_call(number, worker.call, "spin_up", base_urls, model)

    async def _named_call(self, number: int, function: Any, *args: Any) -> Any:
        """Call, and name the node in what that raises."""
        asked: Awaitable[Any] = function(*args)
        try:
            return await asked
        except GymrlError as error:
            raise type(error).rebuild(f"node {number}: {error}", dict(error.fields)) from error

    async def close(self) -> None:
        """End every process, on every node that can be reached. Safe to call twice."""
        instances, self._instances, self._shards = self._instances, {}, None
        generators, self._generators = self._generators, {}
        links, self._links = self._links, []
        seconds = self._job.close_timeout_s

        async def close_one(instance: Instance) -> None:
            await close_within(instance.close(), seconds, instance.name)

        workers = [i for label, i in instances.items() if label not in generators]
        await gather_bounded(close_one, workers)
        await gather_bounded(close_one, list(generators.values()))
        for handle, node in links:
            await close_within(node.close(), seconds, handle.name)
            await close_within(handle.close(), seconds, handle.name)
        await close_within(self._own.close(), seconds, "the workers of this node")
