"""The trainer's side of vLLM's weight transfer: tensors go to the engine's workers, without files.

::

    sender = WeightSender(num_workers=1)
    state = model.state_dict()
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, sender.send, state)
        await generator.update_weights(sender.weights(state), version="7")

The trainer and the workers form a group of processes of their own (gloo, over TCP); the trainer's
``torch.distributed`` is not touched. The engine's side is
``gymrl.generation.vllm_transfer``; an engine has it when it was started with
``vllm.engine_args: {weight_transfer_config: {backend: gymrl_gloo}}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo

from gymrl.errors import WeightUpdateError
from gymrl.generation.weights import GLOO_BACKEND, TransferWeights


class WeightSender:
    """Sends whole sets of weights to the workers of one engine. For one thread at a time.

    An engine on a CPU is forked, and gloo's threads do not survive that: a process that has made a
    sender can't start such an engine afterwards. Start engines first, or keep them in workers.

    Args:
        num_workers: Of the engine: its ``tensor_parallel_size``.
        host: Address of this host, as the engine's reaches it. Whoever reaches it can join: name
            one of a network that only the job is on.
        port: 0: a free one.
        timeout_s: How long either side waits for the other one, to join and for each tensor.
    """

    def __init__(
        self,
        num_workers: int = 1,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        self._num_workers = num_workers
        self._host = host
        self._timeout_s = timeout_s
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        self._group: ProcessGroupGloo | None = None
        self._has_failed = False

    def weights(self, state: Mapping[str, torch.Tensor]) -> TransferWeights:
        """What ``update_weights`` takes while :meth:`send` runs with the same `state`."""
        return TransferWeights(
            backend=GLOO_BACKEND,
            init_info={
                "host": self._host,
                "port": self._store.port,
                "num_workers": self._num_workers,
                "timeout_s": self._timeout_s,
            },
            update_info={
                "names": list(state),
                "dtype_names": [str(t.dtype).removeprefix("torch.") for t in state.values()],
                "shapes": [list(tensor.shape) for tensor in state.values()],
            },
        )

    def send(self, state: Mapping[str, torch.Tensor]) -> None:
        """Send every tensor, in order; blocks until the workers have them all.

        Tensors of a GPU are copied to the host one by one. It can't be cancelled; it ends after
        ``timeout_s`` without a worker.

        Raises:
            WeightUpdateError: No worker joined, or one is gone. Make another sender then.
        """
        if self._has_failed:
            raise WeightUpdateError(
                "this sender lost its workers in an earlier update; make another one"
            )
        try:
            if self._group is None:
                self._group = join(self._store, 0, self._num_workers + 1, self._timeout_s)
            for tensor in state.values():
                broadcast(self._group, as_bytes(tensor.detach().cpu()))
        except RuntimeError as error:
            self._has_failed = True
            raise WeightUpdateError(
                f"the engine's workers did not take the tensors: {error}; update_weights must run "
                f"at the same time, and says what they met"
            ) from error


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
