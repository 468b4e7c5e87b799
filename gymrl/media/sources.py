"""The texts that name images, and data URLs to bytes."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, TypeGuard
from urllib.parse import unquote_to_bytes, urlsplit

from gymrl.errors import MediaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.config import MediaConfig

IMAGE_SOURCE_PREFIXES = ("data:image/", "http://", "https://", "file://")
"""What an image source begins with, in any case of letters."""

SHOWN_CHARS = 60
_LONGEST_PREFIX = max(len(prefix) for prefix in IMAGE_SOURCE_PREFIXES)


def looks_like_image_source(text: object) -> TypeGuard[str]:
    """Whether `text` could name an image: an image's data URL, or a URL without white space.

    A tool may answer with anything: JSON, a path, prose that begins with a URL. None of these
    names an image. Whether a source may be read is decided later, from the configuration.
    """
    if not isinstance(text, str):
        return False
    start = text[:_LONGEST_PREFIX].lower()
    if start.startswith("data:image/"):
        return True
    return start.startswith(IMAGE_SOURCE_PREFIXES) and not any(c.isspace() for c in text)


def scheme_of(source: str) -> str:
    """The scheme in lower case; empty where there is none."""
    scheme, colon, _ = source[:_LONGEST_PREFIX].partition(":")
    return scheme.lower() if colon else ""


def is_allowed_source(text: object, config: MediaConfig) -> TypeGuard[str]:
    """Whether `text` names an image that the configuration lets in, as far as that can be seen.

    A data URL of an image, or a URL whose scheme, and host where it has one, are allowed.
    """
    if not looks_like_image_source(text):
        return False
    scheme = scheme_of(text)
    if scheme not in config.schemes:
        return False
    return scheme not in ("http", "https") or is_listed(_host_of(text), config.allowed_hosts)


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def is_listed(host: str, hosts: Sequence[str]) -> bool:
    """Whether a host is one of those listed; ``*.example.com`` stands for every host below it."""
    name = host.lower().rstrip(".")
    return any(
        name.endswith(entry[1:].lower()) if entry.startswith("*.") else name == entry.lower()
        for entry in hosts
    )


def shown(source: str) -> str:
    """The beginning of a source for an error message."""
    return source if len(source) <= SHOWN_CHARS else f"{source[:SHOWN_CHARS]}..."


def refused(source: str, why: str) -> MediaError:
    """The error for a source that is not taken."""
    return MediaError(f"image {shown(source)!r}: {why}", source=shown(source))


def decode_data_url(url: str, config: MediaConfig) -> bytes:
    """The bytes of a data URL (RFC 2397) that holds an image in base64.

    Raises:
        MediaError: It is no such URL, the base64 is not strictly valid, nothing is in it, or it is
            larger than the configuration allows. Sizes are checked before anything is decoded.
    """
    head, comma, payload = url.partition(",")
    scheme, _, kind = head.partition(":")
    media_type, *parameters = (part.strip().lower() for part in kind.split(";"))
    if scheme.lower() != "data" or not comma:
        raise refused(url, "not a data URL; it reads data:image/png;base64,...")
    if not media_type.startswith("image/"):
        raise refused(url, f"its media type is {media_type or 'text/plain'!r}, not an image's")
    if not parameters or parameters[-1] != "base64":
        raise refused(url, "its data must be base64 (data:image/png;base64,...)")
    size = len(payload) // 4 * 3
    if size - 2 > config.max_image_bytes:
        raise too_large(url, size, config)
    if "%" in payload:
        payload = unquote_to_bytes(payload).decode("latin-1")
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(url, f"its base64 is broken: {error}") from error
    if not data:
        raise refused(url, "there is nothing in it")
    if len(data) > config.max_image_bytes:
        raise too_large(url, len(data), config)
    return data


def too_large(source: str, size: int, config: MediaConfig) -> MediaError:
    """The error for an image of too many bytes."""
    return refused(
        source,
        f"{size} bytes are more than media.max_image_bytes={config.max_image_bytes}",
    )


def to_data_url(data: bytes, media_type: str) -> str:
    """A data URL that holds `data`."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"
