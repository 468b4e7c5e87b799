"""Tensors of many images as one, padded where their shapes differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymrl.errors import MediaError
from gymrl.extras import optional_imports

with optional_imports():
    import torch
    import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXACT_SIZES = "imgs_sizes"
"""Heights and widths before padding, int32 ``[N, 2]``."""


def padded_stack(
    name: str, images: Sequence[Any], *, exact_sizes: Any = None
) -> dict[str, torch.Tensor]:
    """Images of several sizes as one tensor, and their exact sizes.

    Args:
        name: Of the input; ``pixel_values``, or a list of plain values that makes a tensor as it
            is.
        images: ``[C, H, W]`` each.
        exact_sizes: Heights and widths where the processor says them; None: those of `images`.

    Returns:
        `name`: ``[N, C, H_max, W_max]``, zero beyond an image's own height and width, and
        ``imgs_sizes``.

    Raises:
        MediaError: An image is not ``[C, H, W]``, or their numbers of channels differ.
    """
    if name != "pixel_values":
        return {name: torch.as_tensor(images)}
    tensors = [torch.as_tensor(image) for image in images]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(len(shape) != 3 for shape in shapes) or len({shape[0] for shape in shapes}) != 1:
        raise MediaError(
            f"{name}: images of several sizes must be [C, H, W] each, of one C; they are {shapes}"
        )
    height = max(shape[1] for shape in shapes)
    width = max(shape[2] for shape in shapes)
    padded = [F.pad(t, (0, width - t.shape[2], 0, height - t.shape[1])) for t in tensors]
    sizes = [shape[1:] for shape in shapes] if exact_sizes is None else exact_sizes
    return {
        name: torch.stack(padded),
        EXACT_SIZES: torch.as_tensor(sizes).to(torch.int32),
    }


def pack(
    parts: Sequence[Mapping[str, torch.Tensor]], dims: Mapping[str, int], *, pads: bool
) -> dict[str, torch.Tensor]:
    """Inputs of several messages one after the other.

    Args:
        parts: The inputs of each message, all of the same names.
        dims: Along which dimension each is packed; 0 where it is not said.
        pads: Pad ``pixel_values`` to the largest height and width.

    Raises:
        MediaError: Names or shapes differ.
    """
    if not parts:
        return {}
    names = list(parts[0])
    if any(set(part) != set(names) for part in parts):
        raise MediaError(f"messages have different inputs: {[sorted(part) for part in parts]}")
    return {name: _joined(name, [part[name] for part in parts], dims, pads) for name in names}


def _joined(
    name: str, tensors: Sequence[torch.Tensor], dims: Mapping[str, int], pads: bool
) -> torch.Tensor:
    dim = dims.get(name, 0)
    rests = {(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}
    if len(rests) > 1:
        if not pads or name != "pixel_values" or any(t.ndim < 3 for t in tensors):
            raise MediaError(
                f"{name}: shapes {[tuple(t.shape) for t in tensors]} do not fit one tensor; set "
                "pad_dynamic_image_shapes"
            )
        height = max(t.shape[-2] for t in tensors)
        width = max(t.shape[-1] for t in tensors)
        tensors = [F.pad(t, (0, width - t.shape[-1], 0, height - t.shape[-2])) for t in tensors]
    return torch.cat(list(tensors), dim=dim)
