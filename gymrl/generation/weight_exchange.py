"""New weights for a transformers model in this process: checked as a whole, then copied in place.

Reading and checking happen in a thread of the caller's while the model goes on sampling; the copy
happens in the decoding thread, between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from gymrl.errors import WeightUpdateError
from gymrl.extras import optional_imports
from gymrl.generation.checkpoints import checkpoint_entries, model_manifest, torch_tensor
from gymrl.generation.weights import (
    DirectoryWeights,
    PauseMode,
    TransferWeights,
    WeightSource,
    describe,
)

with optional_imports():
    import safetensors
    import torch

Tensors = Mapping[str, torch.Tensor]


class WeightUpdate:
    """One exchange that waits for its turn.

    Args:
        tensors: Checked; of any float type, on any device.
        version: Of the new weights.
        pause: What becomes of the calls in flight.
    """

    def __init__(self, tensors: Tensors, version: str, pause: PauseMode) -> None:
        self.tensors = tensors
        self.version = version
        self.pause: PauseMode = pause
        self.future: Future[None] = Future()


def read_weights(model: Any, source: WeightSource) -> Tensors:
    """The tensors of `source`, known to fit `model`, which is not touched.

    A directory is loaded as transformers loads it, so that checkpoints whose names differ from the
    module's are understood; for a moment there are two models in memory.

    Raises:
        WeightUpdateError: They can't be read, or they are not a whole set of the model's weights.
    """
    manifest = model_manifest(model)
    if isinstance(source, TransferWeights):
        raise WeightUpdateError(
            "only a vLLM engine takes weights by transfer; give TensorWeights or DirectoryWeights"
        )
    if not isinstance(source, DirectoryWeights):
        manifest.check(describe(source.tensors))
        return {name: torch_tensor(tensor) for name, tensor in source.tensors.items()}
    # Headers first: it finds files that are cut short, in a few milliseconds.
    checkpoint_entries(source.path)
    loaded = _load(model, source.path)
    tensors: Tensors = loaded.state_dict()
    manifest.check(
        {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        }
    )
    return tensors


def _load(model: Any, path: str) -> Any:
    try:
        loaded, report = type(model).from_pretrained(
            path, dtype=model.dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, safetensors.SafetensorError) as error:
        raise WeightUpdateError(f"the weights in {path} can't be loaded: {error}") from error
    faults = {
        "missing": report.get("missing_keys"),
        "unknown": report.get("unexpected_keys"),
        "of another shape": report.get("mismatched_keys"),
    }
    said = [
        f"{what}: {', '.join(sorted(map(str, names))[:3])}"
        for what, names in faults.items()
        if names
    ]
    if said:
        raise WeightUpdateError(f"the weights in {path} don't fit the model; {'; '.join(said)}")
    return loaded


@torch.no_grad()
def copy_weights(model: Any, tensors: Tensors) -> None:
    """Copy checked tensors into the model's own, cast to their type."""
    own = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        # Names that are tied to another one may be offered although the model leaves them out.
        if name in own:
            own[name].data.copy_(tensor)
