"""The pixels of an image are the same for the model that samples and for the trainer."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from gymrl.config import MediaConfig
from gymrl.media import inspect_image, open_image

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8))


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@pytest.mark.vllm
def test_vllm_sees_the_pixels_that_a_trainer_sees():
    from vllm.multimodal.media import ImageMediaIO

    exif = Image.Exif()
    exif[0x0112] = 6
    sideways = encoded(NOISE, "JPEG", exif=exif)
    clear = encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 100)))
    late = encoded(Image.new("P", (4, 6)), exif=exif)
    palette = encoded(Image.new("P", (4, 4), 1), transparency=1)
    grey = encoded(Image.new("LA", (4, 4), (9, 80)))
    for data in (sideways, clear, late, palette, grey):
        image = inspect_image(data, MediaConfig())
        ours = open_image(image)
        theirs = ImageMediaIO().load_bytes(data).media
        assert ours.size == theirs.size == (image.width, image.height)
        assert ours.tobytes() == theirs.tobytes()
