"""Weights that are offered to servers by URL: do they fit the model, and where do servers find them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gymrl.errors import WeightUpdateError
from gymrl.generation.weights import DirectoryWeights, Manifest, TensorWeights, describe

if TYPE_CHECKING:
    from gymrl.generation.checkpoints import StagedTensors


class Offers:
    """What is held against a model's names and shapes. Its methods read files: call them in a thread.

    Args:
        model: Directory of the model that the servers have, where it is known.
    """

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._manifest: Manifest | None = None

    def placed(self, source: DirectoryWeights | TensorWeights) -> tuple[str, StagedTensors | None]:
        """Where servers find the weights, now that they are known to be whole.

        Raises:
            WeightUpdateError: They don't fit, or can't be read.
        """
        # It brings torch, which only whoever hands out weights needs.
        from gymrl.generation.checkpoints import (  # noqa: PLC0415
            StagedTensors,
            checkpoint_entries,
            sweep_staged,
        )

        if isinstance(source, DirectoryWeights):
            self.check(checkpoint_entries(source.path))
            return os.path.abspath(source.path), None
        self.check(describe(source.tensors))
        sweep_staged()
        staged = StagedTensors(source.tensors)
        return str(staged.path), staged

    def check(self, offered: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Refuse what is no whole set of the model's; see :meth:`Manifest.check`.

        Raises:
            WeightUpdateError: As there.
        """
        # As above.
        from gymrl.generation.checkpoints import directory_manifest  # noqa: PLC0415

        if self._manifest is None and self._model and any_weights(self._model):
            self._manifest = directory_manifest(self._model)
        shapes = {name: shape for name, (shape, _) in offered.items()}
        (self._manifest or Manifest(shapes=shapes)).check(offered)


def check_reach(urls: Sequence[str], source: DirectoryWeights | TensorWeights) -> None:
    """Refuse to hand over tensors in memory that a server does not see.

    Raises:
        WeightUpdateError: One is not on this host.
    """
    distant = [url for url in urls if not is_on_this_host(url)]
    if distant and not isinstance(source, DirectoryWeights):
        raise WeightUpdateError(
            f"{', '.join(distant)}: tensors are handed over in this host's shared memory, which a "
            "server elsewhere does not see; save them to a directory that both see, and give "
            "DirectoryWeights, or have the trainer send them (TransferWeights)"
        )


def any_weights(directory: str) -> bool:
    """Whether a directory holds a checkpoint; one may have been given for its tokenizer alone."""
    return os.path.isdir(directory) and any(
        name.endswith(".safetensors") for name in os.listdir(directory)
    )


def is_on_this_host(url: str) -> bool:
    """Whether a URL is a loopback address: whoever listens there shares our memory."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
