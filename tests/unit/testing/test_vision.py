"""The tiny vision-language model is a real one: its processor and its forward pass see images."""

import io

import pytest
import torch
import transformers
from PIL import Image

from gymrl.config import MediaConfig
from gymrl.generation.image_inputs import load_image_format
from gymrl.media import inspect_image
from gymrl.testing import build_image, build_tiny_image_format, build_tiny_vision_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.set_num_threads(1)
    return build_tiny_vision_model(tmp_path_factory.mktemp("vision"))


def picture(width, height, seed=0):
    return Image.open(io.BytesIO(build_image(width, height, seed)))


def processed(directory, images):
    processor = transformers.AutoProcessor.from_pretrained(directory)
    content = [{"type": "text", "text": "what is "}, *({"type": "image"} for _ in images)]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return processor(text=[text], images=images, return_tensors="pt")


def test_an_image_of_56_by_84_pixels_is_six_tokens(directory):
    inputs = processed(directory, [picture(56, 84), picture(28, 28)])
    image_token = transformers.AutoConfig.from_pretrained(directory).image_token_id
    assert inputs["image_grid_thw"].tolist() == [[1, 6, 4], [1, 2, 2]]
    assert int((inputs["input_ids"] == image_token).sum()) == 6 + 1
    assert inputs["pixel_values"].shape[0] == 24 + 4


def test_the_image_format_without_a_model_is_that_of_the_model(directory):
    made, loaded = build_tiny_image_format(), load_image_format(str(directory))
    image = inspect_image(build_image(84, 56), MediaConfig())
    assert made.region(image) == loaded.region(image)
    assert (made.placeholder, made.image_token_id) == (loaded.placeholder, loaded.image_token_id)


def test_what_an_image_shows_changes_the_next_token(directory):
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    with torch.no_grad():
        logits = [
            model(**processed(directory, [picture(56, 56, seed)])).logits[0, -1] for seed in (1, 2)
        ]
    assert (logits[0] - logits[1]).abs().max() > 0.5


@pytest.mark.parametrize("images", [[], [(56, 84)], [(112, 28), (28, 28)]])
def test_the_model_does_not_sample_the_tokens_of_images(directory, images):
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    config = model.config
    marks = [config.image_token_id, config.vision_start_token_id, config.vision_end_token_id]
    shown = [picture(*size) for size in images]
    inputs = processed(directory, shown) if shown else {"input_ids": torch.arange(300)[None]}
    with torch.no_grad():
        probabilities = model(**inputs).logits[0].softmax(-1)
    assert probabilities[:, marks].max() < 1e-6
    assert probabilities.max() < 0.9


def test_the_weights_are_a_function_of_the_seed(tmp_path, directory):
    same = build_tiny_vision_model(tmp_path / "same", seed=0)
    other = build_tiny_vision_model(tmp_path / "other", seed=1)
    weights = [(path / "model.safetensors").read_bytes() for path in (directory, same, other)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]
