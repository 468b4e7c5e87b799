"""Images among the tokens: as many regions as images, and each as long as its image asks.

A vision model's prompt holds, for each image, a run of placeholder tokens; the trainer's model puts
the image's features in their places, in order. Where the two do not fit, it fails or, worse, puts
an image in another's place. So each turn is checked before its trajectory leaves the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from gymrl.errors import MediaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.types import Int32Array, Trajectory


class ImageLayout(Protocol):
    """How a model's prompts show images."""

    @property
    def image_token_id(self) -> int:
        """The placeholder token."""
        ...

    def tokens_of(self, width: int, height: int) -> int:
        """How many placeholders an image of this size takes."""
        ...


def runs_of(token_ids: Int32Array, token_id: int) -> list[int]:
    """The lengths of the runs of a token, in order."""
    is_token = np.concatenate(([False], token_ids == token_id, [False]))
    edges = np.flatnonzero(is_token[1:] != is_token[:-1])
    lengths: list[int] = (edges[1::2] - edges[::2]).tolist()
    return lengths


def regions_fit(runs: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether runs of placeholders are those of images, one after the other.

    Where nothing stands between two images their runs are one, and a model may break an image's
    run up (a token at the end of each row of patches); both fit.

    Args:
        runs: Lengths of the runs.
        sizes: Placeholders that each image takes.
    """
    if list(runs) == list(sizes):
        return True
    ends_of_runs = set(np.cumsum(runs).tolist())
    ends_of_images = set(np.cumsum(sizes).tolist())
    if sum(runs) != sum(sizes):
        return False
    return ends_of_runs <= ends_of_images or ends_of_images <= ends_of_runs


def check_regions(trajectory: Trajectory, layout: ImageLayout) -> None:
    """Refuse a trajectory whose tokens do not show the images that it has, turn by turn.

    Raises:
        MediaError: A turn's prompt has another number of image regions than images, an image's
            region has another length than the image asks, or the model sampled a placeholder;
            `turn`, `expected` and `received` say where and how many.
    """
    token = layout.image_token_id
    for turn, span in enumerate(trajectory.turns):
        images = trajectory.images[turn] if turn < len(trajectory.images) else ()
        runs = runs_of(trajectory.token_ids[span.start : span.generation_start], token)
        sizes = [layout.tokens_of(image.width, image.height) for image in images]
        if not regions_fit(runs, sizes):
            raise MediaError(
                f"its prompt has {_shown(runs)} for {len(images)} images, which take "
                f"{sizes} placeholder tokens: the agent or the model server dropped, added or "
                "resized an image",
                turn=turn,
                expected=len(images),
                received=len(runs),
            )
        check_sampled(trajectory.token_ids[span.generation_start : span.end], token, turn)


def check_sampled(token_ids: Int32Array | Sequence[int], image_token_id: int, turn: int) -> None:
    """Refuse an answer that holds placeholder tokens: there is no image for them.

    Raises:
        MediaError: It does.
    """
    sampled = int((np.asarray(token_ids) == image_token_id).sum())
    if sampled:
        raise MediaError(
            f"the model sampled {sampled} image placeholder tokens, and there is no image for them; "
            f"forbid token {image_token_id} in sampling",
            turn=turn,
            expected=0,
            received=sampled,
        )


def _shown(runs: Sequence[int]) -> str:
    return f"{len(runs)} image regions (of {list(runs)} tokens)"
