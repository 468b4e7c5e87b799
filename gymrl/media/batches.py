"""The images of trajectories as model inputs, message by message and for a whole batch.

Needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymrl.errors import MediaError
from gymrl.media.images import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from gymrl.media.processing import ImageProcessor
    from gymrl.types import ImageRef, Trajectory

Inputs = dict[str, "torch.Tensor"]


def encoded_images(trajectory: Trajectory) -> tuple[tuple[EncodedImage, ...], ...]:
    """The images of each turn with their bytes.

    Raises:
        MediaError: The trajectory has lost an image's bytes.
    """
    return tuple(
        tuple(_encoded(ref, trajectory, turn) for ref in refs)
        for turn, refs in enumerate(trajectory.images)
    )


def _encoded(ref: ImageRef, trajectory: Trajectory, turn: int) -> EncodedImage:
    data = trajectory.media.get(ref.digest)
    if data is None:
        raise MediaError(
            f"turn {turn}: the bytes of image sha256:{ref.digest} are not in the trajectory's "
            "media; where it was read from a file, the images beside it are missing",
            turn=turn,
            source=f"sha256:{ref.digest}",
        )
    return EncodedImage(data, ref.digest, ref.media_type, ref.width, ref.height)


class BatchImages:
    """Model inputs of many trajectories; messages that show the same images share theirs.

    Args:
        processor: Makes them.
    """

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        self._made: dict[tuple[str, ...], Inputs] = {}
        self._parts: list[Inputs] = []

    def attach(self, trajectory: Trajectory, messages: Sequence[dict[str, Any]]) -> None:
        """Add the inputs of each turn's images to its user message.

        Args:
            trajectory: Its turn k is the k-th user message's, whatever turns have no images.
            messages: Its message log, ``user`` and ``assistant`` in turn. Changed.

        Raises:
            MediaError: An image is broken, or the processor refuses one.
        """
        users = [message for message in messages if message["role"] == "user"]
        for turn, images in enumerate(encoded_images(trajectory)):
            if images:
                inputs = self._inputs(images)
                users[turn].update(inputs)
                self._parts.append(inputs)

    def _inputs(self, images: Sequence[EncodedImage]) -> Inputs:
        key = tuple(image.digest for image in images)
        if key not in self._made:
            self._made[key] = self._processor.model_inputs(images)
        return self._made[key]

    def packed(self) -> Inputs:
        """The inputs of all messages so far, in the order in which they were attached.

        Raises:
            MediaError: Shapes differ and the processor does not pad.
        """
        return self._processor.pack(self._parts)
