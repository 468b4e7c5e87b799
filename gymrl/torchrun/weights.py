"""The parameters of a trained model, as generators know them."""

from __future__ import annotations

from typing import Any

import torch

from gymrl.generation.weight_transfer import whole as whole_tensor

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
        for name, value in named_tensors(model).items():
            whole = whole_tensor(value)
            if keep:
                kept[name] = whole.to("cpu", copy=True).contiguous()
    return kept


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every entry of the model's state under the names of the unwrapped model; none is gathered."""
    inner: Any = getattr(model, "_orig_mod", model)
    if isinstance(inner, torch.nn.parallel.DistributedDataParallel):
        inner = inner.module
    named: dict[str, torch.Tensor] = {}
    for name, value in inner.state_dict().items():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")  # noqa: PLW2901 - the same name, shorter
        if isinstance(value, torch.Tensor):
            named[name] = value
    return named
