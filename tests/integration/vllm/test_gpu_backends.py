"""What the senders for GPUs describe is what the engines of the vLLM that is installed take."""

import inspect
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gymrl.generation.gpu_transfer import join_nccl, nccl_weights
from gymrl.generation.weight_transfer import Meeting, described
from gymrl.generation.weights import IPC_BACKEND
from tests.unit.generation.test_gpu_transfer import ARGUMENTS, shown

STATE = {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)}


def test_vllm_takes_what_an_nccl_sender_describes():
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Engine

    weights = nccl_weights(Meeting(2, 4, "10.0.0.1", 0, 60), 1234, described(STATE))
    init = Engine.init_info_cls(**weights.for_engine(1, 2).init_info)
    assert (init.master_address, init.master_port, init.world_size) == ("10.0.0.1", 1234, 9)
    assert (init.rank_offset, init.packed) == (5, True)
    update = Engine.update_info_cls(**weights.update_info)
    assert update.names == ["w", "b"]
    assert update.dtype_names == ["bfloat16", "float32"]
    assert update.shapes == [[2, 3], [4]]


def test_vllm_takes_what_an_ipc_sender_shows_without_pickles():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    import gymrl.generation.vllm_worker  # noqa: F401 - registers it, as in an engine
    from gymrl.generation.vllm_transfer import ipc_update

    assert IPC_BACKEND in WeightTransferEngineFactory._registry
    update = ipc_update(shown("GPU-0").update_info)
    assert update.names == ["w"]
    assert update.ipc_handles == [{"GPU-0": ARGUMENTS}]
    with pytest.raises(ValueError, match="no handles"):
        ipc_update({**shown("GPU-0").update_info, "handles": None})


def test_vllm_has_what_an_nccl_sender_uses():
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
    from vllm.utils.nccl import unpinned_nccl_env

    def parameters(function) -> set[str]:
        return set(inspect.signature(function).parameters)

    assert {"rank", "world_size", "store"} <= parameters(StatelessProcessGroup)
    assert {"group", "device"} <= parameters(PyNcclCommunicator.__init__)
    assert parameters(packed_nccl_broadcast_producer) == {
        "iterator",
        "group",
        "src",
        "post_iter_func",
        "buffer_size_bytes",
        "num_buffers",
    }
    assert not parameters(unpinned_nccl_env)
    assert hasattr(PyNcclCommunicator, "destroy")


GPU = torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where NCCL is missing")
def test_a_trainer_meets_vllms_workers_and_finds_that_there_is_no_nccl():
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as worker:
        joined = worker.submit(stateless_init_process_group, "127.0.0.1", port, 1, 2, GPU)
        with pytest.raises(RuntimeError, match="no NCCL library here"):
            join_nccl(Meeting(1, 1, "127.0.0.1", 0, 30), listener, GPU)
        assert joined.result(30).world_size == 2


def test_a_trainer_whose_workers_do_not_come_says_so_in_time():
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        join_nccl(Meeting(1, 1, "127.0.0.1", 0, 1), socket.create_server(("127.0.0.1", 0)), GPU)
