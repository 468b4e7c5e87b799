"""The trainer's side of vLLM's weight transfer: tensors go to the engines' workers, without files.

::

    sender = weight_sender("gloo", num_engines=2)
    state = model.state_dict()
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, sender.send, state)
        await generator.update_weights(sender.weights(state), version="7")

Engines are started for it, with ``vllm.engine_args: {weight_transfer_config: {backend: ...}}``:

- ``gloo`` sends to the backend ``gymrl_gloo``: for CPUs, and the ordinary network between hosts;
- ``nccl`` to ``nccl``: for GPUs that trainer and engines have to themselves;
- ``ipc`` to ``gymrl_ipc``: for a GPU that trainer and engine share.

The trainer's own
``torch.distributed`` groups are not touched. Tensors that FSDP2 has sharded are gathered when their
turn comes: every other rank of the mesh calls :func:`take_part` meanwhile.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo

from gymrl.addresses import address_family
from gymrl.config import require
from gymrl.errors import WeightUpdateError
from gymrl.generation.weights import GLOO_BACKEND, IPC_BACKEND, NCCL_BACKEND, TransferWeights

Transfer = Literal["gloo", "nccl", "ipc"]
"""How tensors travel from a trainer to engines."""

BACKENDS: Mapping[Transfer, str] = {
    "gloo": GLOO_BACKEND,
    "nccl": NCCL_BACKEND,
    "ipc": IPC_BACKEND,
}
"""What the engines' ``weight_transfer_config`` calls each."""


class WeightSender(Protocol):
    """Sends whole sets of weights to engines that take them together. For one thread at a time."""

    def weights(self, state: Mapping[str, torch.Tensor]) -> TransferWeights:
        """What ``update_weights`` takes while :meth:`send` runs with the same `state`.

        Raises:
            WeightUpdateError: A tensor can't be sent; nothing was.
        """
        ...

    def send(self, state: Mapping[str, torch.Tensor]) -> None:
        """Send every tensor, in order; blocks until the workers have them all.

        It can't be cancelled; it ends when a deadline of the sender has passed without a worker.

        Raises:
            WeightUpdateError: No worker joined, or one is gone. Make another sender then.
        """
        ...

    def close(self) -> None:
        """Leave the workers, and let go of memory that they read. Safe to call twice."""
        ...


def weight_sender(
    transfer: Transfer,
    *,
    num_engines: int = 1,
    num_workers: int = 1,
    host: str = "127.0.0.1",
    port: int = 0,
    timeout_s: float = 60.0,
) -> WeightSender:
    """Make a sender.

    Args:
        transfer: How; see above.
        num_engines: That take the weights together: generators of one node, or servers by URL.
        num_workers: Of each engine: its ``tensor_parallel_size``.
        host: Address of this host, as the engines' reach it. Whoever reaches it can join: name one
            of a network that only the job is on. ``ipc`` has no use for it.
        port: 0: a free one.
        timeout_s: How long either side waits for the other one, to join and for the tensors.

    Raises:
        ConfigError: A number is not positive, or `transfer` is none of the three.
        WeightUpdateError: It needs a GPU, or vLLM, and there is none here.
    """
    require(transfer in BACKENDS, "transfer", transfer, "use gloo, nccl or ipc")
    require(num_engines > 0, "num_engines", num_engines, "must be positive")
    require(num_workers > 0, "num_workers", num_workers, "must be positive")
    require(timeout_s > 0, "timeout_s", timeout_s, "must be positive")
    place = Meeting(num_engines, num_workers, host, port, timeout_s)
    if transfer == "gloo":
        return GlooSender(place)
    # It brings vLLM.
    from gymrl.generation.gpu_transfer import IpcSender, NcclSender  # noqa: PLC0415

    return NcclSender(place) if transfer == "nccl" else IpcSender(num_engines)


class Meeting:
    """Where a trainer and the workers of its engines meet, and how many they are.

    Args:
        num_engines: See :func:`weight_sender`, as for the others.
        num_workers: Of each engine.
        host: Of the trainer.
        port: 0: a free one.
        timeout_s: How long they wait for each other.
    """

    def __init__(
        self, num_engines: int, num_workers: int, host: str, port: int, timeout_s: float
    ) -> None:
        self.num_engines = num_engines
        self.num_workers = num_workers
        self.host = host
        self.port = port
        self.timeout_s = timeout_s
        self.sender = uuid.uuid4().hex

    @property
    def world_size(self) -> int:
        """The trainer, and every worker."""
        return 1 + self.num_engines * self.num_workers

    def first_rank(self, engine: int) -> int:
        """Rank of an engine's first worker; the trainer's is 0."""
        return 1 + engine * self.num_workers

    def listen(self) -> socket.socket:
        """Where the workers come, on the host's interface alone; torch would take all of them.

        Raises:
            WeightUpdateError: The address is not this host's, or the port is taken.
        """
        try:
            return socket.create_server((self.host, self.port), family=address_family(self.host))
        except OSError as error:
            raise WeightUpdateError(
                f"can't listen on {self.host}:{self.port} for the engines' workers: {error}"
            ) from error


class GlooSender:
    """Broadcasts tensors from the host's memory, by name, over TCP.

    An engine on a CPU is forked, and gloo's threads do not survive that: a process that has made
    this sender can't start such an engine afterwards. Start engines first, or keep them in workers.

    Args:
        meeting: Who takes part, and where.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        listener = meeting.listen()
        self._port = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            meeting.host,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=meeting.timeout_s),
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )
        self._group: ProcessGroupGloo | None = None
        self._announced: dict[str, Any] | None = None

    def weights(self, state: Mapping[str, torch.Tensor]) -> TransferWeights:
        """See :class:`WeightSender`."""
        self._announced = described(state)
        meeting = self._meeting
        return TransferWeights(
            backend=GLOO_BACKEND,
            init_info={
                "host": meeting.host,
                "port": self._port,
                "world_size": meeting.world_size,
                "num_workers": meeting.num_workers,
                "timeout_s": meeting.timeout_s,
            },
            update_info=self._announced,
            engines=tuple(
                {"first_rank": meeting.first_rank(engine)} for engine in range(meeting.num_engines)
            ),
            sender=meeting.sender,
        )

    def send(self, state: Mapping[str, torch.Tensor]) -> None:
        """See :class:`WeightSender`. Tensors of a GPU are copied to the host one by one."""
        if self._store is None:
            raise WeightUpdateError(
                "this sender is closed, or lost its workers in an earlier update; make another one"
            )
        check_announced(state, self._announced)
        try:
            if self._group is None:
                meeting = self._meeting
                self._group = join(self._store, 0, meeting.world_size, meeting.timeout_s)
            for tensor in state.values():
                broadcast(self._group, as_bytes(whole(tensor).cpu()))
        except RuntimeError as error:
            self.close()
            raise WeightUpdateError(
                f"the engines' workers did not take the tensors: {error}; update_weights must run "
                f"at the same time, and says what they met"
            ) from error

    def close(self) -> None:
        """See :class:`WeightSender`."""
        self._group = self._store = None


def described(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """``names``, ``dtype_names`` and ``shapes``, as backends take them; nothing is gathered."""
    named = list(state.items())
    return {
        "names": [name for name, _ in named],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
    }


def check_announced(state: Mapping[str, torch.Tensor], announced: Mapping[str, Any] | None) -> None:
    """Refuse to send what engines do not wait for: they take bytes in the order they were told.

    Raises:
        WeightUpdateError: The tensors are others than ``weights`` described last.
    """
    if described(state) != announced:
        raise WeightUpdateError(
            "these are not the tensors that weights() described last; nothing was sent"
        )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The values alone; a collective of the mesh where FSDP2 has sharded them."""
    # DTensor has it; its module takes seconds to import where nothing is sharded.
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).detach()


def take_part(state: Mapping[str, torch.Tensor]) -> None:
    """On ranks that send nothing: gather what the sender's rank gathers, in the same order."""
    for tensor in state.values():
        whole(tensor)


def join(store: Store, rank: int, world_size: int, timeout_s: float) -> ProcessGroupGloo:
    """Join trainer (rank 0) and workers; blocks until all are there.

    Raises:
        RuntimeError: They were not within `timeout_s`.
    """
    prefixed = PrefixStore("gymrl-weights", store)
    return ProcessGroupGloo(prefixed, rank, world_size, timedelta(seconds=timeout_s))


def broadcast(group: ProcessGroupGloo, data: torch.Tensor) -> None:
    """From the trainer to every worker.

    Raises:
        RuntimeError: Another process is gone, or does not answer.
    """
    if data.numel():
        # torch's stubs leave the method out.
        group.broadcast(data, 0).wait()  # type: ignore[attr-defined]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, flat: gloo does not know every float type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
