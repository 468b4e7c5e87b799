"""The parameters of a trained model, whole, on the ranks that hand them to generators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# What wrappers of torch put into the names of parameters.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def whole_parameters(model: torch.nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
    """Every entry of the model's state, gathered, under the names of the unwrapped model.

    A collective where entries are sharded (FSDP2): every rank of the mesh must enter. One entry at
    a time is whole on the device. Replicated models (DDP, or none) need no communication.

    Args:
        model: Plain, in DDP, compiled, or sharded by FSDP2.
        keep: False on ranks that take part and keep nothing.

    Returns:
        Copies in the host's memory, so that the next optimizer step does not change them; empty
        where `keep` is false.
    """
    kept: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, value in _entries(model):
            # DTensor has it; its module takes seconds to import where nothing is sharded.
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if keep:
                kept[name] = whole.detach().to("cpu", copy=True).contiguous()
    return kept


def _entries(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    inner: Any = model.module if wrapped else model
    for name, value in inner.state_dict().items():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")  # noqa: PLW2901 - the same name, shorter
        if isinstance(value, torch.Tensor):
            yield name, value
