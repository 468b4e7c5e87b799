"""The trainer's side of weight transfers between GPUs; see :mod:`gymrl.generation.weight_transfer`.

NCCL is vLLM's own backend, and its own code sends (vLLM must be installed where the trainer runs): its
buffers and its order of tensors are then those of the engine. CUDA IPC copies nothing: the engine
opens the trainer's tensors where they are.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import WeightUpdateError
from gymrl.extras import optional_imports
from gymrl.generation.cuda_handles import Handles, from_plain, shared_handle, to_plain
from gymrl.generation.weight_meeting import refused
from gymrl.generation.weight_transfer import check_announced, described, not_taken, whole
from gymrl.generation.weights import IPC_BACKEND, NCCL_BACKEND, TransferWeights

with optional_imports():
    import torch
    from torch._C._distributed_c10d import TCPStore

if TYPE_CHECKING:
    import socket

    from gymrl.generation.weight_meeting import Meeting

BUFFER_BYTES = 256 << 20
"""Tensors go out packed in pieces of this size; the engine sets as much aside, twice."""

NUM_BUFFERS = 2


class NcclSender:
    """Broadcasts from the trainer's GPU to those of the engines.

    NCCL lets no two processes of a group use one GPU: engines need their own. It belongs to the GPU
    that is current where it is made, in whatever thread it sends.

    Args:
        meeting: Who takes part, and where. Its deadline holds for joining, and for the whole set.

    Raises:
        WeightUpdateError: There is no GPU, or no vLLM.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._device = current_gpu("nccl")
        _vllm("distributed.utils")  # fail here, not in the first update
        self._meeting = meeting
        self._listener: socket.socket | None = meeting.listen()
        self._port = self._listener.getsockname()[1]
        self._group: Any = None
        self._announced: dict[str, Any] | None = None
        self._refusal: Future[None] = Future()

    def weights(self, state: Mapping[str, torch.Tensor]) -> TransferWeights:
        """See :class:`~gymrl.generation.weight_transfer.WeightSender`."""
        if self._refusal.done():
            self.close()
            self._refusal = Future()
        if self._group is None and self._listener is None:
            self._listener = self._meeting.listen()
            self._port = self._listener.getsockname()[1]
        self._announced = described(state)
        return nccl_weights(self._meeting, self._port, self._announced)

    def send(self, state: Mapping[str, torch.Tensor]) -> None:
        """See :class:`~gymrl.generation.weight_transfer.WeightSender`.

        Tensors of the host, or of another GPU, are copied to this one first. What NCCL still waits
        for when the workers have refused stays in a thread of its own.
        """
        check_announced(state, self._announced)
        seconds, whom = self._meeting.timeout_s, "the engines' workers"
        try:
            within(seconds, lambda: self._send(state), whom, self._refusal)
        except (RuntimeError, TimeoutError) as error:
            self.close()
            raise not_taken(error) from error

    def _send(self, state: Mapping[str, torch.Tensor]) -> None:
        # What is current is so for each thread.
        torch.cuda.set_device(self._device)
        # The optimizer may still be writing, in another stream.
        torch.cuda.synchronize(self._device)
        if self._group is None:
            self._group = self._join()
        produce = _vllm("distributed.weight_transfer.packed_tensor").packed_nccl_broadcast_producer
        produce(
            iterator=((name, whole(tensor).to(self._device)) for name, tensor in state.items()),
            group=self._group,
            src=0,
            post_iter_func=_tensor_of,
            buffer_size_bytes=BUFFER_BYTES,
            num_buffers=NUM_BUFFERS,
        )
        torch.cuda.synchronize(self._device)

    def _join(self) -> Any:
        listener, self._listener = self._listener, None
        if listener is None:
            raise RuntimeError("nobody awaits these weights: call weights() first")
        return join_nccl(self._meeting, listener, self._device)

    def refuse(self, reason: BaseException) -> None:
        """See :class:`~gymrl.generation.weight_transfer.WeightSender`."""
        if not self._refusal.done():
            self._refusal.set_exception(refused(reason))

    def close(self) -> None:
        """See :class:`~gymrl.generation.weight_transfer.WeightSender`."""
        group, self._group = self._group, None
        if group is not None:
            group.destroy()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


def join_nccl(meeting: Meeting, listener: socket.socket, device: torch.device) -> Any:
    """Join the workers of vLLM's engines, as rank 0; blocks until all are there.

    Args:
        meeting: Who takes part.
        listener: Where they meet; it is used up.
        device: The GPU that sends.

    Returns:
        vLLM's communicator.

    Raises:
        RuntimeError: They were not there in time, or there is no NCCL.
    """
    # As vLLM's StatelessProcessGroup.create, which closes the listener twice when this fails.
    store = TCPStore(
        meeting.host,
        listener.getsockname()[1],
        world_size=meeting.world_size,
        is_master=True,
        timeout=timedelta(seconds=meeting.timeout_s),
        use_libuv=False,
        master_listen_fd=listener.detach(),
    )
    group_type = _vllm("distributed.utils").StatelessProcessGroup
    members = group_type(rank=0, world_size=meeting.world_size, store=store)
    communicator = _vllm("distributed.device_communicators.pynccl").PyNcclCommunicator
    # As vLLM makes communicators that it shares with other processes.
    with _vllm("utils.nccl").unpinned_nccl_env():
        group = communicator(members, device=device)
    if group.disabled:
        # Its broadcasts would return at once, and have sent nothing.
        raise RuntimeError("vLLM found no NCCL library here, or VLLM_DISABLE_PYNCCL is set")
    return group


def nccl_weights(meeting: Meeting, port: int, update_info: dict[str, Any]) -> TransferWeights:
    """What vLLM's engines must know to receive by NCCL.

    Args:
        meeting: Who takes part, and where.
        port: At which the trainer listens.
        update_info: Names, shapes and types.
    """
    return TransferWeights(
        backend=NCCL_BACKEND,
        init_info={
            "master_address": meeting.host,
            "master_port": port,
            "world_size": meeting.world_size,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES,
            "packed_num_buffers": NUM_BUFFERS,
        },
        update_info=update_info,
        engines=tuple(
            {"rank_offset": meeting.first_rank(engine)} for engine in range(meeting.num_engines)
        ),
        sender=meeting.sender,
    )


class IpcSender:
    """Shows engines on the trainer's GPU where the tensors are; they copy them from there.

    Tensors that :meth:`weights` described stay in memory until its next call, or :meth:`close`.
    Where trainer ranks and engines share several GPUs, each rank has a sender, and
    :func:`merged` makes one of what they describe.

    Args:
        num_engines: That take the weights together.

    Raises:
        WeightUpdateError: There is no GPU.
    """

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._device = current_gpu("ipc")
        self._shown: list[torch.Tensor] = []

    def weights(self, state: Mapping[str, torch.Tensor]) -> TransferWeights:
        """See :class:`~gymrl.generation.weight_transfer.WeightSender`.

        Values are those of the time when the engine reads them, during ``update_weights``: don't
        change them before it has returned. Tensors that FSDP2 has sharded are gathered here, not
        in :meth:`send`. Those of the host, or of another GPU, are copied to this one.
        """
        self.close()
        with torch.cuda.device(self._device):
            shown = [whole(tensor).to(self._device).contiguous() for tensor in state.values()]
            torch.cuda.synchronize(self._device)
            uuid = str(torch.cuda.get_device_properties(self._device).uuid)
            handles: list[Handles] = [{uuid: shared_handle(tensor)} for tensor in shown]
        self._shown = shown
        return TransferWeights(
            backend=IPC_BACKEND,
            init_info={},
            update_info={**described(state), "handles": to_plain(handles)},
            engines=({},) * self._num_engines,
        )

    def send(self, state: Mapping[str, torch.Tensor]) -> None:
        """See :class:`~gymrl.generation.weight_transfer.WeightSender`. There is nothing to wait for."""

    def refuse(self, reason: BaseException) -> None:
        """See :class:`~gymrl.generation.weight_transfer.WeightSender`. Nothing waits."""

    def close(self) -> None:
        """See :class:`~gymrl.generation.weight_transfer.WeightSender`."""
        if self._shown:
            self._shown = []
            # Memory that an engine has let go of goes back to the allocator.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def merged(parts: Sequence[TransferWeights]) -> TransferWeights:
    """What several ranks show of the same tensors, each on its own GPU, as one.

    Args:
        parts: Of their :meth:`IpcSender.weights`, one or more.

    Raises:
        WeightUpdateError: They describe different tensors.
    """
    first = parts[0]
    described_first = {**first.update_info, "handles": None}
    handles: list[Handles] = [{} for _ in first.update_info["handles"]]
    for place, part in enumerate(parts):
        if {**part.update_info, "handles": None} != described_first:
            raise WeightUpdateError(f"rank {place} shows other tensors than rank 0")
        for by_gpu, more in zip(handles, from_plain(part.update_info["handles"]), strict=True):
            by_gpu.update(more)
    update_info = {**first.update_info, "handles": to_plain(handles)}
    return msgspec.structs.replace(first, update_info=update_info)


def current_gpu(transfer: str) -> torch.device:
    """The GPU that is current in this thread.

    Raises:
        WeightUpdateError: There is none.
    """
    if not torch.cuda.is_available():
        raise WeightUpdateError(
            f"a transfer by {transfer} is from GPU to GPU, and torch sees none here; use gloo"
        )
    return torch.device("cuda", torch.cuda.current_device())


def within(
    seconds: float, work: Callable[[], None], whom: str, refusal: Future[None] | None = None
) -> None:
    """Do what may never end, because NCCL waits for a peer that is gone.

    Args:
        seconds: How long it may take.
        work: Done in a thread of its own.
        whom: It waits for.
        refusal: Ends the wait when it has an error.

    Raises:
        TimeoutError: It took longer; its thread stays, and ends with the process at the latest.
        BaseException: What `work` raised; or of the refusal, and then the thread stays too.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="gymrl-weights", daemon=True).start()
    awaited = [done] if refusal is None else [done, refusal]
    wait(awaited, seconds, FIRST_COMPLETED)
    if done.done():
        done.result()
    elif refusal is not None and refusal.done():
        refusal.result()
    else:
        raise TimeoutError(f"{whom} did not answer within {seconds:g} s (timeout_s)")


def _tensor_of(item: tuple[str, torch.Tensor]) -> torch.Tensor:
    return item[1]


def _vllm(module: str) -> Any:
    try:
        return importlib.import_module(f"vllm.{module}")
    except ImportError as error:
        raise WeightUpdateError(
            f"a transfer by nccl uses vLLM's own code here too, which can't be imported: {error}; "
            "install gymrl[vllm] where the trainer runs, or use gloo"
        ) from error
