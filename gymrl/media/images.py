"""Encoded images: what is in their header, and their pixels.

Pillow is imported inside the functions: whoever reads no image does not load it.
"""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import ConfigError, MediaError
from gymrl.media.sources import refused, too_large

if TYPE_CHECKING:
    from PIL import Image

    from gymrl.config import MediaConfig

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is read, by Pillow's names. Few decoders, so that few meet untrusted bytes."""

_MEDIA_TYPES = {"MPO": "image/jpeg"}
"""MPO is what Pillow calls a JPEG with another picture behind it, as many phones write them."""

_WIDE_MODES = ("I", "F")
"""What the modes of more than 8 bits a channel begin with: ``I``, ``I;16``, ``F``."""

_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA"})
_ORIENTATION = 0x0112
_SWAPS_AXES = range(5, 9)


class EncodedImage(msgspec.Struct, frozen=True):
    """An image as it came, with what its header says.

    Attributes:
        data: The file's bytes.
        digest: SHA-256 of `data`, hexadecimal. Equal digests are one image.
        media_type: Of the bytes, whatever a URL said: ``image/png``, ...
        width: In pixels, upright (as the header's orientation asks).
        height: In pixels, upright.
    """

    data: bytes
    digest: str
    media_type: str
    width: int
    height: int


def digest_of(data: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def inspect_image(data: bytes, config: MediaConfig, *, source: str = "") -> EncodedImage:
    """What the header of an encoded image says. No pixel is decoded.

    Args:
        data: PNG, JPEG, WebP, GIF or BMP.
        config: Holds the limits.
        source: What named it, for errors.

    Raises:
        MediaError: It is none of these formats, broken, or over a limit.
        ConfigError: Pillow is not installed.
    """
    if len(data) > config.max_image_bytes:
        raise too_large(source, len(data), config)
    with _opened(data, source, config.max_image_pixels) as image:
        media_type = _MEDIA_TYPES.get(str(image.format), f"image/{str(image.format).lower()}")
        width, height = image.size
        if _orientation(image, data) in _SWAPS_AXES:
            width, height = height, width
    return EncodedImage(data, digest_of(data), media_type, width, height)


def encode_picture(picture: Image.Image, config: MediaConfig) -> EncodedImage:
    """A picture of Pillow's as the PNG of its pixels, as they lie; nothing of them is lost.

    Args:
        picture: Not changed. Of a mode that PNG does not have, it is kept as RGB.
        config: Holds the limits.

    Raises:
        MediaError: It is over a limit, or has brighter greys than 8 bits can say.
    """
    source = f"a picture of {picture.size}"
    _refuse_wide(picture, source)
    kept = picture if picture.mode in _PNG_MODES else picture.convert("RGB")
    file = io.BytesIO()
    kept.save(file, format="PNG", compress_level=1, exif=b"")
    return inspect_image(file.getvalue(), config, source=source)


def open_image(encoded: EncodedImage) -> Image.Image:
    """The pixels: RGB, upright, transparent parts on white, the first frame of an animation.

    This is what vLLM's own reader makes of the same bytes. Greys of 16 bits it cuts at 255, and a
    picture of them comes out white; so they are refused.

    Raises:
        MediaError: The pixel data is broken, has brighter greys than 8 bits can say, or the header
            is not what it was.
    """
    from PIL import Image  # noqa: PLC0415 - see the module

    source = f"sha256:{encoded.digest}"
    with _opened(encoded.data, source, encoded.width * encoded.height) as image:
        try:
            image.load()
            _refuse_wide(image, source)
            upright = _upright(image)
            if upright.mode == "RGB" and "transparency" not in upright.info:
                pixels = upright.copy()
            elif upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
                layer = upright.convert("RGBA")
                pixels = Image.new("RGB", layer.size, (255, 255, 255))
                pixels.paste(layer, mask=layer.getchannel("A"))
            else:
                pixels = upright.convert("RGB")
        except MediaError:
            raise
        except Exception as error:  # decoders raise nearly anything for broken bytes
            raise refused(source, f"its pixels can't be decoded: {error}") from error
    if pixels.size != (encoded.width, encoded.height):
        raise refused(
            source,
            f"it has {pixels.width}x{pixels.height} pixels, its header said "
            f"{encoded.width}x{encoded.height}",
        )
    return pixels


def _refuse_wide(image: Image.Image, source: str) -> None:
    """Refuse values that a conversion to 8 bits would cut, instead of scaling them."""
    if not image.mode.startswith(_WIDE_MODES):
        return
    brightest: Any = image.getextrema()[1]  # of one channel, so it is a number
    if brightest > 255:
        raise refused(
            source,
            f"its greys go up to {brightest:g} (mode {image.mode}), and models read 8 bits, cut at "
            "255: nearly all of it would be white; scale it to 8 bits",
        )


def _opened(data: bytes, source: str, max_pixels: int) -> Image.Image:
    """The image with its header read, its pixels not."""
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - see the module
    except ImportError as error:
        raise ConfigError(
            "images need Pillow: install gymrl[images]", setting="gymrl[images]"
        ) from error
    try:
        # The constructor refuses or warns far above `max_pixels`, which is at most its own limit.
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise refused(source, f"more than media.max_image_pixels={max_pixels}: {error}") from error
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise refused(source, f"its {len(data)} bytes are no image of {known}") from error
    except Exception as error:  # readers raise nearly anything for broken bytes
        raise refused(source, f"its header is broken: {error}") from error
    width, height = image.size
    if width * height > max_pixels or width <= 0 or height <= 0:
        image.close()
        raise refused(
            source,
            f"{width}x{height} pixels are not between 1 and media.max_image_pixels={max_pixels}",
        )
    return image


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its EXIF orientation asks; as it lies where that can't be read."""
    from PIL import ImageOps  # noqa: PLC0415 - see the module

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001 - readers raise nearly anything; vLLM goes on as well
        return image


def _orientation(image: Image.Image, data: bytes) -> int | None:
    """The EXIF orientation, without decoding pixels unless a PNG keeps it behind them."""
    late = image.format == "PNG" and (b"eXIf" in data or b"Raw profile type" in data)
    if "exif" not in image.info and not late:
        return None
    try:
        value = image.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001 - see _upright
        return None
    return value if isinstance(value, int) else None
