"""Images as a transformers model takes them, made once each by the model's own processor."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gymrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from gymrl.media import EncodedImage
    from gymrl.media.processing import ImageProcessor

MAX_BYTES = 256 << 20
"""Memory for inputs of images that may be asked for again."""

TOKEN_TYPES = "mm_token_type_ids"


class ImageTensors:
    """Model inputs of images by digest, the latest ones, within `max_bytes`. Threads may share it.

    Args:
        processor: The model's.
        model: Takes them.
        max_bytes: Of what is kept.

    Raises:
        ConfigError: The model reads more of a prompt with images than can be said here: images
            that attend to themselves both ways are marked by ``token_type_ids``.
    """

    def __init__(self, processor: ImageProcessor, model: Any, max_bytes: int = MAX_BYTES) -> None:
        parameters = inspect.signature(model.forward).parameters
        if "token_type_ids" in parameters:
            raise ConfigError(
                f"{type(model).__name__} marks the tokens of images by token_type_ids, which the "
                "embedded generator does not; serve it with vLLM",
                setting="model",
            )
        self.image_token_id = processor.image_token_id
        self.takes_token_types = TOKEN_TYPES in parameters
        self._processor = processor
        self._device = model.device
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._parts: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        # One at a time: a processor is no thing for two threads.
        self._lock = threading.Lock()

    @property
    def num_kept(self) -> int:
        """Images whose inputs are kept."""
        return len(self._parts)

    def of(self, images: Sequence[EncodedImage]) -> dict[str, torch.Tensor]:
        """The inputs of one prompt's images, in their order; on the model's device.

        Raises:
            MediaError: An image is broken, or the processor refuses it.
        """
        with self._lock:
            parts = [self._part(image) for image in images]
            while self._num_bytes > self._max_bytes:
                _, oldest = self._parts.popitem(last=False)
                self._num_bytes -= _num_bytes(oldest)
        packed = self._processor.pack(parts)
        return {name: tensor.to(self._device) for name, tensor in packed.items()}

    def _part(self, image: EncodedImage) -> dict[str, torch.Tensor]:
        found = self._parts.get(image.digest)
        if found is None:
            found = self._parts[image.digest] = self._processor.model_inputs([image])
            self._num_bytes += _num_bytes(found)
        self._parts.move_to_end(image.digest)
        return found


def _num_bytes(part: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in part.values())
