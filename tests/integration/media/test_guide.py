"""What the guide on images shows, run."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from gymrl.config import MediaConfig
from gymrl.media import inspect_image
from gymrl.testing import build_image, build_tiny_vision_model
from gymrl.types import ImageRef, Reward, RolloutGroup, Row, Trajectory, Turn

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "images.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
NAMED = "Qwen/Qwen2.5-VL-3B-Instruct"

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def model(directory):
    return transformers.AutoModelForImageTextToText.from_pretrained(directory).float().eval()


def rollout(pad: int, *sizes: tuple[int, int]) -> Trajectory:
    """One turn an image: its region, a word, and three sampled tokens."""
    tokens: list[int] = []
    turns, images, media = [], [], {}
    for seed, (width, height) in enumerate(sizes):
        start = len(tokens)
        tokens += [1, *[pad] * (width * height // 28**2), 2]
        turns.append(Turn(start=start, generation_start=len(tokens), end=len(tokens) + 3))
        tokens += [10 + seed, 11, 12]
        image = inspect_image(build_image(width, height, seed), MediaConfig())
        images.append((ImageRef(image.digest, image.media_type, width, height),))
        media[image.digest] = image.data
    return Trajectory(
        agent="cat_agent",
        token_ids=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        turns=tuple(turns),
        reward=Reward(1.0),
        images=tuple(images),
        media=media,
    )


def test_images_of_a_trajectory_are_saved(tmp_path):
    sample = rollout(99, (56, 84), (28, 56))
    (block,) = [block for block in BLOCKS if "encoded_images" in block]
    with contextlib.chdir(tmp_path):
        exec(compile(block, str(GUIDE), "exec"), {"trajectory": sample})
    saved = {
        path.stem: inspect_image(path.read_bytes(), MediaConfig()) for path in tmp_path.iterdir()
    }
    assert {(image.width, image.height) for image in saved.values()} == {(56, 84), (28, 56)}
    assert set(saved) == set(sample.media)


@torch.inference_mode()
def test_a_padded_batch_with_pixels_gives_what_each_sample_gives_alone(directory, model):
    pad = model.config.image_token_id
    samples = (rollout(pad, (56, 84), (28, 56)), rollout(pad, (112, 56)))
    rows = tuple(
        Row(
            index=index,
            task_index=0,
            rollout_index=index,
            route="cat_agent",
            rollout_id=f"r{index}",
            body=b"{}",
        )
        for index in range(len(samples))
    )
    groups = [RolloutGroup(index=0, task_index=0, rows=rows, samples=samples)]
    (block,) = [block for block in BLOCKS if "media_inputs" in block]
    names = {"groups": groups, "model": model}
    exec(compile(block.replace(NAMED, str(directory)), str(GUIDE), "exec"), names)
    batch, images = names["batch"], names["images"]
    assert batch.media_inputs["mm_token_type_ids"].sum(dim=1).tolist() == [6 + 2, 8]
    for place, messages in enumerate(batch.final_batch["message_log"]):
        ids = torch.cat([message["token_ids"] for message in messages])[None]
        own = [
            {name: message[name] for name in images.pack_dims}
            for message in messages
            if "pixel_values" in message
        ]
        alone = model(input_ids=ids, **images.pack(own), **images.token_types(ids)).logits[0]
        together = names["logits"][place, : ids.shape[1]]
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
