"""Calls as a server's ledger keeps them, and what tells their prompts apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from gymrl.token_ledger import LedgerCall, LedgerImage
from gymrl.types import Float32Array, Int32Array, RoutesArray

if TYPE_CHECKING:
    from gymrl.generation.images import PromptImages
    from gymrl.media import EncodedImage

CALL_BYTES = 512
"""What a call costs beside its ids, about."""

IMAGE_BYTES = 128
"""What an image of a call costs beside its file, about."""


class StoredCall(msgspec.Struct, frozen=True):
    """A call as it is kept; `new_keys` are its new ids, the first of each image told apart."""

    call: LedgerCall
    new_ids: Int32Array
    new_keys: npt.NDArray[np.integer[Any]]
    logprobs: Float32Array
    routes: RoutesArray | None = None

    @property
    def length(self) -> int:
        """Of its whole sequence."""
        return self.call.num_prompt + self.call.num_sampled

    @property
    def nbytes(self) -> int:
        """What it takes, files of images left out."""
        arrays = self.new_ids.nbytes + self.logprobs.nbytes
        if self.new_keys is not self.new_ids:
            arrays += self.new_keys.nbytes
        if self.routes is not None:
            arrays += self.routes.nbytes
        images = IMAGE_BYTES * len(self.call.images)
        return CALL_BYTES + arrays + images + 4 * len(self.call.content)


def shown_images(images: PromptImages) -> tuple[LedgerImage, ...]:
    """The images of a prompt, by their places and digests."""
    pairs = zip(images.images, images.spans, strict=True)
    return tuple(LedgerImage(start, image.digest) for image, (start, _) in pairs)


def tree_keys(ids: Int32Array, images: Sequence[LedgerImage]) -> npt.NDArray[np.integer[Any]]:
    """`ids` with a number of its file, below 0, for the first token of each image."""
    if not images:
        return ids
    keys = ids.astype(np.int64)
    for image in images:
        keys[image.start] = -1 - int(image.digest[:15], 16)
    return keys


def num_equal(first: npt.NDArray[np.integer[Any]], second: npt.NDArray[np.integer[Any]]) -> int:
    """How many ids both begin with."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length


class MediaShelf:
    """Files of images that rollouts show, each held once for all of them.

    Args:
        is_wanted: Somebody will take them; as long as nobody will, none is held.

    Attributes:
        nbytes: Of the files.
    """

    def __init__(self, *, is_wanted: bool = False) -> None:
        self.is_wanted = is_wanted
        self.nbytes = 0
        self._files: dict[str, bytes] = {}
        self._holders: Counter[str] = Counter()

    def hold(self, images: Iterable[EncodedImage], held: set[str]) -> None:
        """Hold the files of images for a rollout.

        Args:
            images: Those of a prompt.
            held: Digests that the rollout holds; the new ones are added.
        """
        if not self.is_wanted:
            return
        for image in images:
            if image.digest in held:
                continue
            held.add(image.digest)
            self._holders[image.digest] += 1
            if image.digest not in self._files:
                self._files[image.digest] = image.data
                self.nbytes += len(image.data)

    def release(self, held: set[str]) -> None:
        """A rollout is gone; what it held alone goes with it."""
        for digest in held:
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                self.nbytes -= len(self._files.pop(digest))

    def files(self, held: Iterable[str]) -> dict[str, bytes]:
        """The files that a rollout holds, by digest."""
        return {digest: self._files[digest] for digest in held}
