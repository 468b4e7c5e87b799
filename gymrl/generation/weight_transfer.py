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

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import anyio
import anyio.to_thread

from gymrl.config import require
from gymrl.errors import WeightUpdateError
from gymrl.generation.weight_meeting import Meeting, WeightGroup, as_bytes
from gymrl.generation.weights import GLOO_BACKEND, IPC_BACKEND, NCCL_BACKEND, TransferWeights

if TYPE_CHECKING:
    import torch

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

        It can't be cancelled. It ends at once when an engine or one of its workers refuses the
        weights, and when :meth:`refuse` is called; else when a deadline of the sender has passed
        without a worker.

        Raises:
            WeightUpdateError: A worker refused, did not come, or is gone; the text says which one
                and why. Those who came are left, and the next :meth:`weights` meets them anew.
        """
        ...

    def refuse(self, reason: BaseException) -> None:
        """The weights are not taken, as whoever had them taken knows; a running send ends with it.

        For any thread, at any time before the next :meth:`weights`. :func:`deliver` calls it.

        Args:
            reason: What ``update_weights`` raised.
        """
        ...

    def close(self) -> None:
        """Leave the workers, and let go of memory that they read. Safe to call twice.

        :meth:`weights` begins anew.
        """
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


async def deliver(
    sender: WeightSender,
    state: Mapping[str, torch.Tensor],
    take: Callable[[TransferWeights], Awaitable[None]],
) -> None:
    """Send weights from a thread, and have engines take them; ends when both sides have ended.

    Where one side fails the other one is told, and nothing waits out a deadline. The next update
    may go through the same sender. Cancelling it cancels `take`, and with it the send.

    Args:
        sender: For as many engines as take the weights.
        state: All of them.
        take: Has the engines take what it is given: calls ``update_weights``.

    Raises:
        WeightUpdateError: They were not taken. What an engine says goes before what the sender met.
        BaseException: What else `take` raised.
    """
    weights = sender.weights(state)
    met: list[Exception] = []
    refusal: Exception | None = None

    async def send() -> None:
        try:
            await anyio.to_thread.run_sync(sender.send, state)
        except Exception as error:  # noqa: BLE001 - raised when both sides have ended
            met.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(send)
        try:
            await take(weights)
        except anyio.get_cancelled_exc_class():
            sender.refuse(WeightUpdateError("the update was cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - as above
            refusal = error
            sender.refuse(error)
    if refusal is not None:
        if met:
            refusal.add_note(f"The sender: {met[0]}")
        raise refusal
    if met:
        raise met[0]


class GlooSender:
    """Broadcasts tensors from the host's memory, by name, over TCP.

    An engine on a CPU is forked, and gloo's threads do not survive that: a process that has made
    this sender can't start such an engine afterwards. Start engines first, or keep them in workers.

    Args:
        meeting: Who takes part, and where.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._port = 0
        self._announced: dict[str, Any] | None = None
        self._group: WeightGroup | None = None
        self._open()

    def _open(self) -> None:
        self._group, self._port = WeightGroup.hosted(self._meeting)

    def weights(self, state: Mapping[str, torch.Tensor]) -> TransferWeights:
        """See :class:`WeightSender`."""
        if self._group is not None and self._group.is_refused:
            self.close()
        if self._group is None:
            self._open()
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
        group = self._group
        if group is None:
            raise WeightUpdateError("nobody awaits these weights: call weights() first")
        try:
            check_announced(state, self._announced)
            if not group.is_joined:
                group.join()
            group.begin()
            for tensor in state.values():
                group.broadcast(as_bytes(whole(tensor).cpu()))
        except BaseException as error:
            # Workers that wait for the rest are told.
            group.say_refused(f"{type(error).__name__}: {error}")
            self.close()
            if isinstance(error, WeightUpdateError):
                raise not_taken(error) from error
            raise

    def refuse(self, reason: BaseException) -> None:
        """See :class:`WeightSender`."""
        if self._group is not None:
            self._group.refuse(reason)

    def close(self) -> None:
        """See :class:`WeightSender`."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def not_taken(error: Exception) -> WeightUpdateError:
    """What a sender raises for what its workers, or the way to them, met."""
    fields = error.fields if isinstance(error, WeightUpdateError) else {}
    return WeightUpdateError(f"the engines' workers did not take the tensors: {error}", **fields)


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
