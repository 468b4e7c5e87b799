"""The engine's side of :mod:`gymrl.generation.weight_transfer`, in vLLM's worker.

vLLM makes one such engine a worker when its ``weight_transfer_config`` names gymrl's backend. A set
of weights is received as a whole before the model is touched: a trainer that dies in the middle
leaves the model as it was. That takes the host's memory for one more copy of the weights.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gymrl.extras import optional_imports
from gymrl.generation.cuda_handles import from_plain, to_arguments
from gymrl.generation.weight_meeting import Meeting, WeightGroup, as_bytes, visit

with optional_imports():
    import torch
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCWeightTransferEngine,
        IPCWeightTransferUpdateInfo,
    )
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class GlooInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not checked
    """Where the trainer is; see :class:`~gymrl.generation.weight_meeting.Meeting`."""

    host: str
    port: int
    world_size: int
    first_rank: int
    num_workers: int
    timeout_s: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """What the trainer sends, in order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooTransferEngine(WeightTransferEngine[GlooInit, GlooUpdate]):  # type: ignore[misc]  # as above
    """Takes tensors that the trainer broadcasts."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    has_touched_model = False
    """Whether the latest update came as far as the model."""
    _group: WeightGroup | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        """Join the trainer's group; blocks until every worker has, or one refuses."""
        self.leave("another trainer was met")
        parallel = self.parallel_config
        num_engines = (init_info.world_size - 1) // max(1, init_info.num_workers)
        meeting = Meeting(
            num_engines,
            init_info.num_workers,
            init_info.host,
            init_info.port,
            init_info.timeout_s,
        )
        store = visit(init_info.host, init_info.port, init_info.timeout_s)
        self._group = WeightGroup(store, init_info.first_rank + parallel.rank, meeting)
        del store  # so that an error's frames hold no connection
        with self._told():
            self._check(init_info)
            self._group.join()

    def _check(self, init_info: GlooInit) -> None:
        parallel = self.parallel_config
        if parallel.data_parallel_size > 1:
            raise ValueError(
                "gymrl_gloo sends to whole engines; start one for each data-parallel rank"
            )
        if init_info.num_workers != parallel.world_size:
            raise ValueError(
                f"the engine has {parallel.world_size} workers, the sender was made for "
                f"{init_info.num_workers}; make it with num_workers={parallel.world_size}"
            )

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong here is told to the trainer and the other workers, and the group left."""
        try:
            yield
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise

    def leave(self, reason: str) -> None:
        """Leave the group, so that nobody in it waits for this worker."""
        group, self._group = self._group, None
        if group is not None:
            group.say_refused(reason)
            group.close()

    def start_weight_update(self) -> None:
        """Nothing yet: the model is touched when everything is here."""
        self.has_touched_model = False

    def finish_weight_update(self) -> None:
        """Nothing more: :meth:`receive_weights` has loaded all there is."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load; the base class would wait for an accelerator afterwards."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdate) -> None:
        """Receive every tensor, then load them all."""
        if self._group is None:
            raise RuntimeError("init_weight_transfer_engine was not called")
        received: list[tuple[str, torch.Tensor]] = []
        with self._told():
            self._group.begin()
            for name, dtype, shape in zip(
                update_info.names, update_info.dtype_names, update_info.shapes, strict=True
            ):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self._group.broadcast(as_bytes(tensor))
                received.append((name, tensor))
            self.has_touched_model = True
            initialize_layerwise_reload(self.model)
            self.model.load_weights((name, tensor.to(self.device)) for name, tensor in received)
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        self.leave("the engine ended")


class IpcTransferEngine(IPCWeightTransferEngine):  # type: ignore[misc]  # as above
    """vLLM's engine of the name ``ipc``, told in plain data where tensors are, not by pickles."""

    def parse_update_info(self, update_dict: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
        """From what :class:`~gymrl.generation.gpu_transfer.IpcSender` describes.

        Raises:
            ValueError: It is something else.
        """
        return ipc_update(update_dict)


def ipc_update(update_info: dict[str, Any]) -> IPCWeightTransferUpdateInfo:
    """What vLLM makes of it.

    Raises:
        ValueError: There are no handles, or not one for every tensor.
    """
    fields = dict(update_info)
    handles = from_plain(fields.pop("handles", None))
    return IPCWeightTransferUpdateInfo(
        **fields,
        ipc_handles=[
            {uuid: to_arguments(handle) for uuid, handle in by_gpu.items()} for by_gpu in handles
        ],
    )
