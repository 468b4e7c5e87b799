"""Images as model inputs, by real processors that need Pillow alone, and by one that is ragged."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)

from gymrl.config import MediaConfig
from gymrl.errors import ConfigError, MediaError, UnsupportedOptionError
from gymrl.media import inspect_image
from gymrl.media.packing import pack, padded_stack
from gymrl.media.processing import ImageProcessor
from gymrl.testing.vision import build_tiny_vision_tokenizer

torch.set_num_threads(1)

LLAVA = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
    "image_token": "<|image_pad|>",
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_vision_tokenizer()


@pytest.fixture(scope="module")
def paddle(tokenizer):
    pixels = PaddleOCRVLImageProcessorPil(min_pixels=28 * 28, max_pixels=64 * 28 * 28)
    return ImageProcessor(
        transformers.PaddleOCRVLProcessor(image_processor=pixels, tokenizer=tokenizer)
    )


def image(width: int, height: int, seed: int = 0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return inspect_image(file.getvalue(), MediaConfig())


def test_a_model_that_packs_patches_gets_those_of_all_images_in_order(paddle):
    small, wide = image(56, 84), image(112, 56, 1)
    assert paddle.pack_dims == {"pixel_values": 0, "image_grid_thw": 0}
    assert (paddle.tokens_of(56, 84), paddle.tokens_of(112, 56)) == (6, 8)
    both = paddle.model_inputs([small, wide])
    assert both["image_grid_thw"].tolist() == [[1, 6, 4], [1, 4, 8]]
    assert both["pixel_values"].shape[0] == 24 + 32
    alone = [paddle.model_inputs([each]) for each in (small, wide)]
    packed = paddle.pack(alone)
    assert packed.keys() == both.keys()
    assert all(torch.equal(packed[name], both[name]) for name in both)


def test_a_model_that_asks_is_told_which_tokens_are_images(paddle, tokenizer):
    pad = paddle.image_token_id
    ids = torch.tensor([[1, pad, pad, 2], [pad, 1, 0, 0]])
    assert paddle.token_type_names == ("mm_token_type_ids",)
    types = paddle.token_types(ids)["mm_token_type_ids"]
    assert types.tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]
    assert ImageProcessor(Ragged()).token_types(ids) == {}


def test_the_tokens_of_an_image_are_those_of_the_processor(paddle):
    for width, height in ((28, 28), (100, 60), (500, 300), (31, 200)):
        shown = paddle._processor(
            text="<|image_pad|>", images=[Image.new("RGB", (width, height))], return_tensors="pt"
        )
        expected = int((shown["input_ids"] == paddle.image_token_id).sum())
        assert paddle.tokens_of(width, height) == expected


def test_a_model_of_fixed_sizes_gets_one_entry_an_image(tokenizer):
    pixels = CLIPImageProcessorPil(
        size={"height": 28, "width": 28}, crop_size={"height": 28, "width": 28}
    )
    processor = ImageProcessor(
        transformers.LlavaProcessor(image_processor=pixels, tokenizer=tokenizer, **LLAVA)
    )
    assert processor.pack_dims == {"pixel_values": 0}
    assert processor.tokens_of(300, 20) == 4
    assert processor.model_inputs([image(30, 40), image(50, 20)])["pixel_values"].shape == (
        2,
        3,
        28,
        28,
    )


def test_a_model_of_tiles_is_packed_along_its_tiles(tokenizer):
    processor = ImageProcessor(
        transformers.Idefics3Processor(
            image_processor=Idefics3ImageProcessorPil(
                size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
            ),
            tokenizer=tokenizer,
        )
    )
    assert processor.pack_dims == {"pixel_values": 1, "pixel_attention_mask": 1}
    one, two = (processor.model_inputs([image(40, 40, seed)]) for seed in (0, 1))
    packed = processor.pack([one, two])
    tiles = one["pixel_values"].shape[1]
    assert packed["pixel_values"].shape[:2] == (1, 2 * tiles)
    assert torch.equal(packed["pixel_values"][:, tiles:], two["pixel_values"])


def test_a_model_of_grids_keeps_each_images_size(tokenizer):
    pixels = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )
    processor = ImageProcessor(
        transformers.LlavaNextProcessor(image_processor=pixels, tokenizer=tokenizer, **LLAVA)
    )
    inputs = processor.model_inputs([image(56, 28), image(28, 56, 1)])
    assert inputs["image_sizes"].tolist() == [[28, 56], [56, 28]]


class NoPlaceholder:
    image_processor = object()


class OneForAll:
    """Writes one placeholder however many images there are."""

    image_processor = object()
    image_token = "<image>"
    image_token_id = 9
    tokenizer = None

    def __call__(self, *, text, images, return_tensors):
        pixels = torch.zeros(len(images), 3, 4, 4)
        return {"input_ids": torch.tensor([[9, 1]]), "pixel_values": pixels}


class SquareOfImages(OneForAll):
    """Gives an input that no dimension of counts images."""

    def __call__(self, *, text, images, return_tensors):
        n = len(images)
        return {"input_ids": torch.tensor([[9] * n]), "pixel_values": torch.zeros(n, n, 4, 4)}


class Failing(OneForAll):
    def __call__(self, *, text, images, return_tensors):
        raise RuntimeError("no images today")


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (NoPlaceholder(), "no image_token"),
        (OneForAll(), "can't be told apart"),
        (SquareOfImages(), "exactly one dimension must count images"),
        (Failing(), "no images today"),
        (object(), "no image_processor"),
    ],
)
def test_a_processor_that_can_not_be_used_is_refused_before_any_work(processor, said):
    with pytest.raises(UnsupportedOptionError, match=said) as caught:
        ImageProcessor(processor)
    assert type(processor).__name__ in str(caught.value)


def test_a_directory_without_a_processor_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="processor="):
        ImageProcessor.load(str(tmp_path))


class Ragged:
    """A model of any size: its processor gives a list of tensors where sizes differ."""

    image_processor = object()
    image_token = "<image>"
    tokenizer = None
    image_token_id = 9

    def __call__(self, *, text, images, return_tensors):
        assert text == "<image>" * len(images)
        pixels = [torch.ones(3, each.height, each.width) for each in images]
        ids = [[9] * len(images)]
        if return_tensors == "pt":
            return {"input_ids": torch.tensor(ids), "pixel_values": torch.stack(pixels)}
        return {"input_ids": ids, "pixel_values": pixels}


def test_images_of_several_sizes_are_padded_and_keep_their_sizes():
    processor = ImageProcessor(Ragged(), pad_dynamic_image_shapes=True)
    inputs = processor.model_inputs([image(4, 2), image(4, 6)])
    pixels = inputs["pixel_values"]
    assert pixels.shape == (2, 3, 6, 4)
    assert pixels[0, :, :2].eq(1).all()
    assert pixels[0, :, 2:].eq(0).all()
    assert inputs["imgs_sizes"].tolist() == [[2, 4], [6, 4]]
    assert inputs["imgs_sizes"].dtype == torch.int32
    packed = processor.pack([inputs, processor.model_inputs([image(8, 3)])])
    assert packed["pixel_values"].shape == (3, 3, 6, 8)
    assert packed["imgs_sizes"].tolist() == [[2, 4], [6, 4], [3, 8]]


def test_without_the_setting_images_of_several_sizes_are_refused_and_it_is_named():
    processor = ImageProcessor(Ragged())
    with pytest.raises(MediaError, match="pad_dynamic_image_shapes"):
        processor.model_inputs([image(4, 2), image(4, 6)])
    parts = [processor.model_inputs([image(4, 2)]), processor.model_inputs([image(4, 6)])]
    with pytest.raises(MediaError, match="pad_dynamic_image_shapes"):
        processor.pack(parts)


@pytest.mark.parametrize("shapes", [((3, 2, 4), (2, 4)), ((3, 2, 4), (1, 2, 4))])
def test_only_images_of_channels_height_and_width_are_padded(shapes):
    with pytest.raises(MediaError, match=r"\[C, H, W\]"):
        padded_stack("pixel_values", [torch.ones(shape) for shape in shapes])


def test_messages_with_different_inputs_are_not_packed():
    parts = [{"pixel_values": torch.ones(1, 2)}, {"pixels": torch.ones(1, 2)}]
    with pytest.raises(MediaError, match="different inputs"):
        pack(parts, {}, pads=False)
    assert pack([], {}, pads=False) == {}
