"""As many image regions among a turn's tokens as it has images, each as long as its image asks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import MediaError
from gymrl.media.regions import check_regions, regions_fit, runs_of
from gymrl.types import ImageRef, Reward, Trajectory, Turn

PAD = 99


class OneTokenAPixelOfWidth:
    """An image of width w is w tokens."""

    image_token_id = PAD

    def tokens_of(self, width: int, height: int) -> int:
        return width


def image(width: int) -> ImageRef:
    return ImageRef(digest=f"{width:064x}", media_type="image/png", width=width, height=1)


def trajectory(turns: list[tuple[list[int], list[int]]], images) -> Trajectory:
    tokens: list[int] = []
    spans = []
    for prompt, sampled in turns:
        start = len(tokens)
        tokens += prompt + sampled
        spans.append(Turn(start=start, generation_start=start + len(prompt), end=len(tokens)))
    return Trajectory(
        agent="eye",
        token_ids=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        turns=tuple(spans),
        reward=Reward(0.0),
        images=images,
    )


def test_turns_that_show_what_they_have_pass():
    turns = [([1, PAD, PAD, 2, PAD, 3], [4]), ([5], [6]), ([PAD, PAD, PAD], [7])]
    check_regions(
        trajectory(turns, ((image(2), image(1)), (), (image(3),))), OneTokenAPixelOfWidth()
    )


def test_adjacent_images_are_one_run_and_a_broken_up_image_is_several():
    assert regions_fit([5], [2, 3])
    assert regions_fit([2, 2, 2], [6])
    assert regions_fit([2, 2, 3], [4, 3])
    assert not regions_fit([5], [2, 2])
    assert not regions_fit([3, 2], [2, 3])
    assert not regions_fit([], [2])
    assert not regions_fit([2], [])
    assert regions_fit([], [])


@pytest.mark.parametrize(
    ("turns", "images", "turn", "expected", "received"),
    [
        ([([1, PAD, PAD, 3], [4])], ((image(2), image(1)),), 0, 2, 1),
        ([([1], [4]), ([PAD, 5], [6])], ((), ()), 1, 0, 1),
        ([([1], [4])], ((image(2),),), 0, 1, 0),
        ([([1, PAD, 2, PAD, PAD], [4])], ((image(2), image(1)),), 0, 2, 2),
        ([([1], [4, PAD, PAD, 5])], ((),), 0, 0, 2),
    ],
)
def test_a_turn_that_shows_other_images_fails_and_both_numbers_are_named(
    turns, images, turn, expected, received
):
    """NVIDIA-NeMo/RL#2296: pixels and placeholders must agree turn by turn."""
    with pytest.raises(MediaError) as caught:
        check_regions(trajectory(turns, images), OneTokenAPixelOfWidth())
    error = caught.value
    assert (error.turn, error.expected, error.received) == (turn, expected, received)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 4), max_size=5), st.data())
def test_images_laid_out_in_any_way_fit(sizes, data):
    tokens: list[int] = [1]
    for size in sizes:
        tokens += [PAD] * size
        tokens += [2] * data.draw(st.integers(0, 1))
    runs = runs_of(np.array(tokens, np.int32), PAD)
    assert sum(runs) == sum(sizes)
    assert regions_fit(runs, sizes)
