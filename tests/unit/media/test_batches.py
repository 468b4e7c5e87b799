"""Images of trajectories in a batch: by user turn, in the order of the tokens, shared by a group."""

from __future__ import annotations

import io

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from gymrl.config import MediaConfig
from gymrl.errors import MediaError, RowValueError
from gymrl.media import inspect_image
from gymrl.media.batches import encoded_images
from gymrl.media.processing import ImageProcessor
from gymrl.tensors import to_batch
from gymrl.types import (
    Failure,
    FailureKind,
    ImageRef,
    Reward,
    RolloutGroup,
    Row,
    Trajectory,
    Turn,
)


class MeanColours:
    """A processor whose model sees the mean colour of an image."""

    image_processor = object()
    image_token = "<image>"
    image_token_id = 9
    tokenizer = None

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *, text, images, return_tensors):
        self.calls += 1
        means = [np.asarray(each).mean(axis=(0, 1)) for each in images]
        ids = torch.tensor([[9] * len(images)])
        pixels = torch.tensor(np.array(means))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def image(red: int):
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (red, 0, 0)).save(file, "PNG")
    return inspect_image(file.getvalue(), MediaConfig())


A, B, C = (image(red) for red in (10, 20, 30))


def sample(*turns) -> Trajectory:
    spans = tuple(
        Turn(start=3 * k, generation_start=3 * k + 2, end=3 * k + 3) for k in range(len(turns))
    )
    refs = tuple(
        tuple(ImageRef(i.digest, i.media_type, i.width, i.height) for i in images)
        for images in turns
    )
    return Trajectory(
        agent="eye",
        token_ids=np.arange(3 * len(turns), dtype=np.int32),
        logprobs=np.zeros(3 * len(turns), np.float32),
        turns=spans,
        reward=Reward(1.0),
        images=refs,
        media={i.digest: i.data for images in turns for i in images},
    )


def group(*samples) -> RolloutGroup:
    rows = tuple(
        Row(
            index=index,
            task_index=0,
            rollout_index=index,
            route="eye",
            rollout_id=f"r{index}",
            body=b"{}",
        )
        for index in range(len(samples))
    )
    return RolloutGroup(index=0, task_index=0, rows=rows, samples=samples)


def reds(inputs) -> list[int]:
    return inputs["pixel_values"][:, 0].int().tolist()


def test_each_user_turn_has_its_own_images_also_after_turns_without_any():
    """NVIDIA-NeMo/RL#2296: the log-probability path was rebuilt without pixels."""
    batch = to_batch(
        [group(sample([A], [], [B, C]), sample([], [C]))],
        pad_token_id=0,
        images=ImageProcessor(MeanColours()),
    )
    first, second = batch.final_batch["message_log"]
    users = [m for m in first if m["role"] == "user"]
    assert reds(users[0]) == [10]
    assert "pixel_values" not in users[1]
    assert reds(users[2]) == [20, 30]
    assert [reds(m) for m in second if "pixel_values" in m] == [[30]]
    assert all("pixel_values" not in m for m in first + second if m["role"] == "assistant")
    assert reds(batch.media_inputs) == [10, 20, 30, 30]
    assert set(batch.media_inputs) == {"pixel_values"}


def test_the_attempts_at_one_prompt_share_what_was_made_of_its_image():
    processor = MeanColours()
    images = ImageProcessor(processor)
    before = processor.calls
    batch = to_batch([group(*[sample([A], [B])] * 8)], pad_token_id=0, images=images)
    assert processor.calls - before == 2
    logs = batch.final_batch["message_log"]
    assert len({log[0]["pixel_values"].data_ptr() for log in logs}) == 1
    assert reds(batch.media_inputs) == [10, 20] * 8


def test_a_failed_row_shows_nothing():
    failure = Failure(kind=FailureKind.DATA, error="E", message="")
    batch = to_batch(
        [group(sample([A]), failure)], pad_token_id=0, images=ImageProcessor(MeanColours())
    )
    assert reds(batch.media_inputs) == [10]


def test_images_are_not_left_out_of_a_batch_silently():
    with pytest.raises(RowValueError, match="row 1 has 2 images"):
        to_batch([group(sample([]), sample([A], [B]))], pad_token_id=0)
    unread = msgspec.structs.replace(sample([]), notes={"images_not_read": 1})
    with pytest.raises(RowValueError, match=r"set gym\.media"):
        to_batch([group(unread)], pad_token_id=0, images=ImageProcessor(MeanColours()))


def test_a_batch_of_text_has_no_inputs_of_images():
    text = sample([])
    assert to_batch([group(text)], pad_token_id=0).media_inputs == {}
    images = ImageProcessor(MeanColours())
    assert to_batch([group(text)], pad_token_id=0, images=images).media_inputs == {}


def test_a_trajectory_that_lost_an_image_says_which():
    lost = msgspec.structs.replace(sample([A]), media={})
    with pytest.raises(MediaError, match=A.digest):
        encoded_images(lost)
