"""Tensors of a GPU as another process on it opens them: CUDA's IPC handles, as plain data.

torch describes a shared tensor by the arguments of its ``rebuild_cuda_tensor``, classes among them,
and expects them to be pickled. Here they are numbers and bytes, which travel as everything else does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gymrl.extras import optional_imports

with optional_imports():
    import torch
    from torch.multiprocessing.reductions import reduce_tensor


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor. The names are those of the arguments of torch's ``rebuild_cuda_tensor``.

    Attributes:
        tensor_size: Its shape.
        tensor_stride: In elements.
        tensor_offset: In its storage, in elements.
        dtype: As torch names it.
        storage_device: Index of the GPU in the process that shares it.
        storage_handle: Of the allocation; None: it has no bytes.
        storage_size_bytes: Of the storage.
        storage_offset_bytes: Of the storage, in the allocation.
        ref_counter_handle: Of the file that counts who has it open.
        ref_counter_offset: In that file.
        event_handle: Of the event after which it may be read.
        event_sync_required: Whether to wait for that.
    """

    tensor_size: tuple[int, ...]
    tensor_stride: tuple[int, ...]
    tensor_offset: int
    dtype: str
    storage_device: int
    storage_handle: bytes | None
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


def shared_handle(tensor: torch.Tensor) -> CudaHandle:
    """Share a tensor of a GPU. It must stay until whoever opens it is done.

    Args:
        tensor: Contiguous, without a gradient.
    """
    _, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return from_arguments(arguments)


def from_arguments(arguments: tuple[Any, ...]) -> CudaHandle:
    """From the arguments of ``rebuild_cuda_tensor``, in their order."""
    (_, size, stride, offset, _, dtype, device, *storage, _, counter, counted_at, event, sync) = (
        arguments
    )
    handle, size_bytes, offset_bytes = storage
    return CudaHandle(
        tensor_size=tuple(size),
        tensor_stride=tuple(stride),
        tensor_offset=offset,
        dtype=str(dtype).removeprefix("torch."),
        storage_device=device,
        storage_handle=handle,
        storage_size_bytes=size_bytes,
        storage_offset_bytes=offset_bytes,
        ref_counter_handle=counter,
        ref_counter_offset=counted_at,
        event_handle=event,
        event_sync_required=sync,
    )


def to_arguments(handle: CudaHandle) -> tuple[Any, ...]:
    """The arguments of ``rebuild_cuda_tensor``, in their order."""
    return (
        torch.Tensor,
        torch.Size(handle.tensor_size),
        handle.tensor_stride,
        handle.tensor_offset,
        torch.storage.TypedStorage,
        getattr(torch, handle.dtype),
        handle.storage_device,
        handle.storage_handle,
        handle.storage_size_bytes,
        handle.storage_offset_bytes,
        False,
        handle.ref_counter_handle,
        handle.ref_counter_offset,
        handle.event_handle,
        handle.event_sync_required,
    )


Handles = dict[str, CudaHandle]
"""One tensor by the UUID of the GPU: each engine opens the one on its own."""


def to_plain(handles: list[Handles]) -> list[dict[str, dict[str, Any]]]:
    """As ``update_info`` carries them: JSON's types alone."""
    plain: list[dict[str, dict[str, Any]]] = msgspec.to_builtins(handles)
    return plain


def from_plain(plain: Any) -> list[Handles]:
    """The way back.

    Raises:
        ValueError: It is something else.
    """
    try:
        return msgspec.convert(plain, list[Handles])
    except msgspec.ValidationError as error:
        raise ValueError(f"no handles of tensors on a GPU: {error}") from error
