"""Images in the batch face: found in the prompts, or refused before anything is sampled."""

import io

import pytest
import torch
from PIL import Image

from gymrl.config import MediaConfig
from gymrl.errors import GenerationRequestError, MediaError
from gymrl.generation.base import Generated
from gymrl.generation.batch import BatchGenerator
from gymrl.generation.image_inputs import RequestImageReader
from gymrl.media import encode_picture, inspect_image, open_image
from gymrl.testing import (
    ScriptedGenerator,
    ScriptedImageGenerator,
    build_image,
    build_image_uri,
    build_tiny_image_format,
)

torch.set_num_threads(1)

SMALL, TALL = (56, 84, 1), (56, 112, 2)


@pytest.fixture(scope="module")
def image_format():
    return build_tiny_image_format()


@pytest.fixture
def reader(image_format):
    return RequestImageReader(image_format, MediaConfig())


def picture(size):
    return Image.open(io.BytesIO(build_image(*size)))


def encoded(size):
    return inspect_image(build_image(*size), MediaConfig())


def prompt(image_format, *sizes):
    return [5, *(i for size in sizes for i in image_format.region(encoded(size))), 6]


def batch(*prompts, **columns):
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([p + [0] * (width - len(p)) for p in prompts]),
        "input_lengths": torch.tensor([len(p) for p in prompts]),
        **columns,
    }


def policy(reader, generator=None):
    script = generator or ScriptedImageGenerator(
        lambda prompt_ids, sampling: Generated(token_ids=[7], logprobs=[-0.5], finish_reason="stop")
    )
    return BatchGenerator(script, pad_token_id=0, images=reader), script


def test_each_sample_is_shown_its_images_where_its_prompt_has_them(reader, image_format):
    both, none, one = prompt(image_format, SMALL, TALL), [5, 6], prompt(image_format, TALL)
    generating, script = policy(reader)
    output = generating.generate(
        batch(
            both,
            none,
            one,
            vllm_content=["<image><image>", None, "<image>"],
            vllm_images=[[picture(SMALL), build_image_uri(*TALL)], None, encoded(TALL)],
        )
    )
    lengths = output["unpadded_sequence_lengths"].tolist()
    assert lengths == [len(both) + 1, 3, len(one) + 1]
    shown = {len(call.prompt_ids): call.images for call in script.calls}
    assert shown[2] is None
    assert shown[len(both)].spans == ((1, 9), (9, 19))
    assert [(i.width, i.height) for i in shown[len(both)].images] == [(56, 84), (56, 112)]
    assert shown[len(one)].spans == ((1, 11),)


async def test_the_stream_shows_them_too(reader, image_format):
    generating, script = policy(reader)
    data = batch(prompt(image_format, SMALL), [5], vllm_images=[[encoded(SMALL)], []])
    samples = [sample async for sample, _ in generating.generate_async(data)]
    assert sorted(samples) == [0, 1]
    assert sum(call.images is not None for call in script.calls) == 1


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "CMYK", "P"])
def test_a_picture_shows_the_pixels_that_it_has(mode):
    given = picture(SMALL).convert(mode)
    kept = open_image(encode_picture(given, MediaConfig()))
    if mode == "RGBA":
        given = picture(SMALL)
    assert kept.tobytes() == given.convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("columns", "error", "problem"),
    [
        ({"vllm_images": [[]]}, GenerationRequestError, "1 entries for 2 samples"),
        ({"vllm_images": [["cat.png"], None]}, GenerationRequestError, "sample 0 .*'cat.png'"),
        (
            {"vllm_images": [["https://example.com/cat.png"], None]},
            GenerationRequestError,
            "sample 0 .*an image's data URL is needed",
        ),
        (
            {"vllm_images": [["data:image/png;base64,aGVsbG8="], None]},
            MediaError,
            "sample 0 .*no image",
        ),
        (
            {"vllm_images": [[build_image_uri(*TALL)], None]},
            MediaError,
            "sample 0 .*holds 0 of 1 images",
        ),
        (
            {"vllm_images": [None, [build_image_uri(*TALL)]]},
            MediaError,
            "sample 0 .*6 image tokens .*vllm_images has none for it",
        ),
        ({"vllm_images": None}, MediaError, "sample 0 .*vllm_images has none for it"),
        ({"vllm_videos": [None, ["clip"]]}, GenerationRequestError, "sample 1 .* has vllm_videos"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sampled(
    reader, image_format, columns, error, problem
):
    generating, script = policy(reader)
    with pytest.raises(error, match=problem):
        generating.generate(batch(prompt(image_format, SMALL), [5], **columns))
    assert script.calls == []


def test_images_of_a_sample_are_limited(image_format):
    reader = RequestImageReader(image_format, MediaConfig(max_images_per_row=1))
    generating, _ = policy(reader)
    data = batch(prompt(image_format, SMALL, SMALL), vllm_images=[[encoded(SMALL), encoded(SMALL)]])
    with pytest.raises(GenerationRequestError, match=r"2 images are more than media\.max_images"):
        generating.generate(data)


def test_a_generator_of_text_refuses_them(reader, image_format):
    data = batch(prompt(image_format, SMALL), vllm_images=[[encoded(SMALL)]])
    generating, script = policy(reader, ScriptedGenerator([[7]]))
    with pytest.raises(GenerationRequestError, match="ScriptedGenerator samples from tokens only"):
        generating.generate(data)
    assert script.calls == []
    generating, _ = policy(None)
    with pytest.raises(GenerationRequestError, match="no image format; give it as images"):
        generating.generate(data)
