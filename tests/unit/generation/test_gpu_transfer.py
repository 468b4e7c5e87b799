"""What of the transfers between GPUs needs none: handles as plain data, and what is refused."""

import inspect
import threading

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from gymrl.errors import ConfigError, WeightUpdateError
from gymrl.generation.cuda_handles import (
    CudaHandle,
    from_arguments,
    from_plain,
    to_arguments,
    to_plain,
)
from gymrl.generation.gpu_transfer import merged, within
from gymrl.generation.weight_transfer import check_announced, described, take_part, weight_sender
from gymrl.generation.weights import IPC_BACKEND, TransferWeights

ARGUMENTS = (
    torch.Tensor,
    torch.Size([2, 3]),
    (3, 1),
    0,
    torch.storage.TypedStorage,
    torch.bfloat16,
    1,
    b"\x00handle\xff",
    2048,
    512,
    False,
    b"/torch_1234_0",
    7,
    b"event\x80",
    True,
)
"""As torch describes a tensor of GPU 1 to another process."""


def test_a_shared_tensor_is_told_in_plain_data_and_is_the_same_afterwards():
    told = to_plain([{"GPU-5": from_arguments(ARGUMENTS)}])
    told = msgspec.json.decode(msgspec.json.encode(told))
    assert told[0]["GPU-5"]["dtype"] == "bfloat16"
    assert to_arguments(from_plain(told)[0]["GPU-5"]) == ARGUMENTS


def test_the_arguments_are_those_of_the_torch_that_is_installed():
    assert list(inspect.signature(rebuild_cuda_tensor).parameters) == [
        "tensor_cls",
        "tensor_size",
        "tensor_stride",
        "tensor_offset",
        "storage_cls",
        "dtype",
        "storage_device",
        "storage_handle",
        "storage_size_bytes",
        "storage_offset_bytes",
        "requires_grad",
        "ref_counter_handle",
        "ref_counter_offset",
        "event_handle",
        "event_sync_required",
    ]


@settings(deadline=None, max_examples=30)
@given(
    st.builds(
        CudaHandle,
        dtype=st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn"]),
        storage_handle=st.none() | st.binary(),
    )
)
def test_any_handle_survives_both_ways(handle):
    assert from_arguments(to_arguments(handle)) == handle
    assert from_plain(msgspec.json.decode(msgspec.json.encode(to_plain([{"a": handle}])))) == [
        {"a": handle}
    ]


def test_handles_that_are_something_else_are_refused():
    with pytest.raises(ValueError, match="no handles of tensors on a GPU"):
        from_plain("gASVBQAAAAAAAABLAS4=")


def shown(gpu: str, name: str = "w") -> TransferWeights:
    handles = to_plain([{gpu: from_arguments(ARGUMENTS)}])
    update = {"names": [name], "dtype_names": ["bfloat16"], "shapes": [[2, 3]], "handles": handles}
    return TransferWeights(backend=IPC_BACKEND, init_info={}, update_info=update)


def test_what_ranks_show_on_their_gpus_becomes_one():
    parts = [shown("GPU-0"), shown("GPU-1")]
    whole = merged(parts)
    assert [sorted(by_gpu) for by_gpu in whole.update_info["handles"]] == [["GPU-0", "GPU-1"]]
    assert whole.offered() == {"w": ((2, 3), "bfloat16")}
    assert sorted(parts[0].update_info["handles"][0]) == ["GPU-0"]


def test_ranks_that_show_other_tensors_are_refused():
    with pytest.raises(WeightUpdateError, match="rank 1 shows other tensors than rank 0"):
        merged([shown("GPU-0"), shown("GPU-1", "v")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
@pytest.mark.parametrize("transfer", ["nccl", "ipc"])
def test_a_transfer_between_gpus_is_refused_where_there_is_none(transfer):
    with pytest.raises(WeightUpdateError, match=rf"by {transfer} is from GPU to GPU.*use gloo"):
        weight_sender(transfer)


def test_a_sender_with_wrong_settings_is_refused():
    with pytest.raises(ConfigError, match="use gloo, nccl or ipc"):
        weight_sender("tcp")
    with pytest.raises(ConfigError, match="num_engines=0"):
        weight_sender("gloo", num_engines=0)
    with pytest.raises(ConfigError, match="timeout_s"):
        weight_sender("gloo", timeout_s=0)


def test_tensors_that_engines_do_not_expect_are_not_sent():
    state = {"a": torch.zeros(2, 3), "b": torch.zeros(1, dtype=torch.bfloat16)}
    announced = described(state)
    assert announced["dtype_names"] == ["float32", "bfloat16"]
    check_announced(state, announced)
    with pytest.raises(WeightUpdateError, match="nothing was sent"):
        check_announced(dict(reversed(state.items())), announced)
    with pytest.raises(WeightUpdateError, match="nothing was sent"):
        check_announced({**state, "a": torch.zeros(3, 2)}, announced)


class Sharded:
    """As FSDP2's tensors: whole when all ranks gather."""

    def __init__(self) -> None:
        self.gathered = 0

    def full_tensor(self) -> torch.Tensor:
        self.gathered += 1
        return torch.zeros(2)


def test_ranks_that_send_nothing_gather_each_tensor_once():
    state = {"a": Sharded(), "b": torch.zeros(2)}
    take_part(state)
    assert state["a"].gathered == 1


def test_work_that_waits_for_a_peer_that_is_gone_is_given_up():
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"the engines did not answer within 0.01 s"):
        within(0.01, never.wait, "the engines")
    never.set()


def test_what_the_work_raises_is_raised_where_it_is_waited_for():
    def fail() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    with pytest.raises(RuntimeError, match="unhandled system error"):
        within(5, fail, "the engines")
    within(5, lambda: None, "the engines")
