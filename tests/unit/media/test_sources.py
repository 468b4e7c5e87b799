"""What names an image, and what comes of texts that only look so."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gymrl.config import MediaConfig
from gymrl.errors import ConfigError, MediaError
from gymrl.media import (
    encode_picture,
    inspect_image,
    is_allowed_source,
    load_image,
    looks_like_image_source,
    open_image,
    to_data_url,
)
from gymrl.media.fetch import check_address

DATA_ONLY = MediaConfig()


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8))
LARGE_NOISE = NOISE.resize((64, 64), Image.Resampling.BICUBIC)
IN_EVERY_FORMAT = [encoded(NOISE, name) for name in ("PNG", "JPEG", "GIF", "WEBP", "BMP")]
RED = encoded(Image.new("RGB", (3, 2), (255, 0, 0)))


@pytest.mark.parametrize(
    "text",
    [
        '{"x":0.65,"y":0.83}',
        "",
        "data:text/plain,hi",
        "/etc/passwd",
        "images/cat.png",
        "https://example.com is a page about cats",
        "ftp://example.com/cat.png",
        None,
        7,
        {"url": "https://example.com/cat.png"},
    ],
)
def test_what_names_no_image_is_not_taken_for_one(text):
    """NVIDIA-NeMo/RL#3414: a tool's JSON was opened as a file."""
    assert not looks_like_image_source(text)
    assert not is_allowed_source(text, DATA_ONLY)


@pytest.mark.parametrize(
    "text",
    [
        "data:image/png;base64,AAAA",
        "DATA:IMAGE/PNG;base64,AAAA",
        "http://127.0.0.1:1/x.png",
        "HTTPS://example.com/cat.png",
        "file:///tmp/cat.png",
    ],
)
def test_a_data_url_or_an_address_could_be_an_image(text):
    assert looks_like_image_source(text)


def test_only_data_urls_are_let_in_by_default():
    assert is_allowed_source("data:image/png;base64,AAAA", DATA_ONLY)
    assert not is_allowed_source("http://example.com/cat.png", DATA_ONLY)
    assert not is_allowed_source("file:///tmp/cat.png", DATA_ONLY)


def test_an_address_is_let_in_by_its_host():
    config = MediaConfig(schemes=("https",), allowed_hosts=("*.example.com", "cats.org"))
    assert is_allowed_source("https://img.example.com/cat.png", config)
    assert is_allowed_source("https://CATS.org./cat.png", config)
    assert not is_allowed_source("https://example.com/cat.png", config)
    assert not is_allowed_source("https://evilexample.com/cat.png", config)
    assert not is_allowed_source("http://cats.org/cat.png", config)


async def test_a_data_url_is_read_whatever_case_its_letters_have():
    payload = base64.b64encode(RED).decode()
    image = await load_image(f"DATA:IMAGE/PNG;charset=utf-8;BASE64,{payload}", DATA_ONLY)
    assert (image.media_type, image.width, image.height) == ("image/png", 3, 2)
    assert image.data == RED
    assert open_image(image).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("data:image/png;base64,AAAA", "no image of PNG"),
        ("data:image/png;base64,", "nothing in it"),
        ("data:image/png;base64,AA=A", "base64 is broken"),
        ("data:image/png;base64,AAA", "base64 is broken"),
        ("data:image/png;base64,AA AA", "base64 is broken"),
        ("data:image/png;base64", "not a data URL"),
        ("data:image/png,AAAA", "must be base64"),
        ("data:text/plain,hi", "not an image's"),
        ('{"x":1}', "not an image source"),
        ("/etc/passwd", "not an image source"),
        ("file:///etc/passwd", "not in media.schemes"),
        ("http://127.0.0.1:1/x.png", "not in media.schemes"),
    ],
)
async def test_a_broken_or_forbidden_source_is_a_data_failure(source, said):
    with pytest.raises(MediaError, match=said) as caught:
        await load_image(source, DATA_ONLY)
    assert caught.value.kind == "data"


async def test_a_data_url_that_is_too_large_is_refused_before_it_is_decoded():
    config = MediaConfig(max_image_bytes=100)
    with pytest.raises(MediaError, match="max_image_bytes=100"):
        await load_image("data:image/png;base64," + "!" * 40_000_000, config)


async def test_an_error_echoes_only_the_beginning_of_a_source():
    with pytest.raises(MediaError) as caught:
        await load_image("data:image/png;base64," + "A" * 4_000_000, DATA_ONLY)
    assert len(str(caught.value)) < 300
    assert len(caught.value.source) < 70


def png_header(width: int, height: int) -> bytes:
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + body
    end = b"IEND"
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", len(body))
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + struct.pack(">I", 0)
        + end
        + struct.pack(">I", zlib.crc32(end))
    )


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])
def test_a_decompression_bomb_is_refused_by_its_header(side):
    with pytest.raises(MediaError, match="max_image_pixels"):
        inspect_image(png_header(side, side), DATA_ONLY)


def test_an_image_at_the_limit_of_pixels_is_taken():
    image = encoded(Image.new("RGB", (10, 10)))
    assert inspect_image(image, MediaConfig(max_image_pixels=100)).width == 10
    with pytest.raises(MediaError, match="10x10 pixels"):
        inspect_image(image, MediaConfig(max_image_pixels=99))


def test_an_image_without_its_pixels_has_a_header_and_is_found_out_when_it_is_opened():
    cut = encoded(LARGE_NOISE)[:900]
    image = inspect_image(cut, DATA_ONLY)
    assert (image.width, image.height) == (64, 64)
    with pytest.raises(MediaError, match="can't be decoded"):
        open_image(image)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_bytes_that_are_damaged_anywhere_are_an_image_or_a_media_error(data):
    whole = data.draw(st.sampled_from(IN_EVERY_FORMAT))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(whole)))])
    try:
        image = inspect_image(cut, MediaConfig(max_image_pixels=10_000))
        assert open_image(image).size == (image.width, image.height)
    except MediaError:
        pass


def test_an_image_is_upright_and_its_transparent_parts_are_white():
    exif = Image.Exif()
    exif[0x0112] = 6
    sideways = inspect_image(encoded(NOISE, "JPEG", exif=exif), DATA_ONLY)
    assert (sideways.width, sideways.height) == (7, 9)
    assert open_image(sideways).size == (7, 9)
    clear = inspect_image(encoded(Image.new("RGBA", (4, 4), (10, 20, 30, 0))), DATA_ONLY)
    assert open_image(clear).getpixel((0, 0)) == (255, 255, 255)


def test_greys_of_16_bits_are_refused_where_they_would_come_out_white():
    """Pillow cuts them at 255, and so does every reader built on it; small ones are kept."""
    bright = Image.fromarray(np.full((3, 2), 30000, dtype=np.uint16))
    with pytest.raises(MediaError, match="up to 30000"):
        open_image(inspect_image(encoded(bright), DATA_ONLY))
    with pytest.raises(MediaError, match="up to 30000"):
        encode_picture(bright, DATA_ONLY)
    dark = Image.fromarray(np.full((3, 2), 30, dtype=np.uint16))
    assert open_image(inspect_image(encoded(dark), DATA_ONLY)).getpixel((0, 0)) == (30, 30, 30)
    assert open_image(encode_picture(dark, DATA_ONLY)).getpixel((0, 0)) == (30, 30, 30)


def test_a_jpeg_with_a_second_picture_behind_it_is_a_jpeg():
    """As phones write them; Pillow calls it MPO, which no model server and no browser knows."""
    two = encoded(NOISE, "MPO", save_all=True, append_images=[NOISE])
    image = inspect_image(two, DATA_ONLY)
    assert (image.media_type, image.width, image.height) == ("image/jpeg", 9, 7)
    assert open_image(image).size == (9, 7)


async def test_a_file_is_read_below_a_named_directory_and_nowhere_else(tmp_path):
    allowed = tmp_path / "images"
    allowed.mkdir()
    (allowed / "a red one.png").write_bytes(RED)
    (tmp_path / "secret.png").write_bytes(RED)
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(allowed / "pipe.png")
    config = MediaConfig(schemes=("data", "file"), allowed_roots=(str(allowed),))
    image = await load_image(f"FILE://{allowed}/a%20red%20one.png", config)
    assert image.data == RED
    for name, said in {
        "../secret.png": "outside",
        "%2e%2e/secret.png": "outside",
        "link.png": "outside",
        "pipe.png": "not a regular file",
        "none.png": "no such file",
        "": "can't be read",
    }.items():
        with pytest.raises(MediaError, match=said):
            await load_image(f"file://{allowed}/{name}", config)
    with pytest.raises(MediaError, match="file:///absolute/path"):
        await load_image("file://elsewhere/x.png", config)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1%eth0",
        "fd00::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "::7f00:1",
        "::ffff:0:7f00:1",
        "fec0::1",
        "64:ff9b:1::1",
        "3fff::1",
        "192.0.0.8",
    ],
)
def test_an_address_that_is_not_public_is_refused_unless_its_host_is_named(address):
    config = MediaConfig(schemes=("http",), allowed_hosts=("cats.org",))
    with pytest.raises(OSError, match="not public"):
        check_address("cats.org", address, config)
    named = MediaConfig(schemes=("http",), allowed_hosts=("cats.org",), private_hosts=("cats.org",))
    check_address("cats.org", address, named)


def test_a_public_address_is_fine():
    config = MediaConfig(schemes=("http",), allowed_hosts=("cats.org",))
    check_address("cats.org", "93.184.216.34", config)
    check_address("cats.org", "2606:2800:220:1:248:1893:25c8:1946", config)
    check_address("cats.org", "64:ff9b::808:808", config)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"schemes": ("http",)}, "allowed_hosts"),
        ({"allowed_hosts": ("cats.org",)}, "allowed_hosts"),
        ({"schemes": ("file",)}, "allowed_roots"),
        (
            {"schemes": ("https",), "allowed_hosts": ("a",), "private_hosts": ("b",)},
            "private_hosts",
        ),
        ({"max_image_pixels": 200_000_000}, "max_image_pixels"),
        ({"max_image_bytes": 0}, "max_image_bytes"),
        ({"max_redirects": -1}, "max_redirects"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        MediaConfig(**settings)


def test_a_data_url_says_its_bytes_and_type():
    assert to_data_url(b"\x00\x01", "image/gif") == "data:image/gif;base64,AAE="
