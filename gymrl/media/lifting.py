"""Images out of JSON bytes and back in, so that equal images are held and sent once.

The data URL of an image that is a whole JSON string becomes a short reference; its bytes are kept
by their digest. Putting it back gives the same bytes that were there. A data URL in another
spelling (base64 that does not read back the same, escapes inside) stays where it is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

REFERENCE = b"gymrl-image:"
_START = re.compile(rb'"(data:image/[a-z0-9.+-]{1,40};base64,)', re.IGNORECASE)
_REFERENCE = re.compile(
    rb'"' + REFERENCE + rb'([0-9a-f]{64}):(data:image/[a-z0-9.+-]{1,40};base64,)"', re.IGNORECASE
)


class ImageLifter:
    """Takes images out of many bodies; what it has seen once it does not decode again.

    Equal images of all its bodies are one ``bytes`` object.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[str, bytes]] = {}

    def lift(self, body: bytes) -> tuple[bytes, dict[str, bytes]]:
        """A JSON text without its images, and those by SHA-256.

        A text that has the form of a reference somewhere stays as it is, with its images, so that
        nothing is put in where nothing was taken out.
        """
        if REFERENCE in body:
            return body, {}
        pieces: list[bytes] = []
        media: dict[str, bytes] = {}
        position = 0
        for start in _START.finditer(body):
            if body[start.start() - 1 : start.start()] == b"\\":
                continue  # inside a string, not its beginning
            end = body.find(b'"', start.end())
            lifted = self._image(body[start.end() : end]) if end > start.end() else None
            if lifted is None:
                continue
            digest, data = lifted
            media[digest] = data
            pieces += (body[position : start.start()], b'"', REFERENCE, digest.encode())
            pieces += (b":", start[1], b'"')
            position = end + 1
        return (b"".join((*pieces, body[position:])), media) if media else (body, {})

    def _image(self, text: bytes) -> tuple[str, bytes] | None:
        known = self._known.get(text)
        if known is not None:
            return known
        try:
            data = base64.b64decode(text, validate=True)
        except binascii.Error:
            return None
        if base64.b64encode(data) != text:
            return None
        self._known[text] = (hashlib.sha256(data).hexdigest(), data)
        return self._known[text]


def reference_digest(text: str) -> str | None:
    """The digest of the image that a text refers to; None where it is no reference."""
    match = _REFERENCE.fullmatch(f'"{text}"'.encode("utf-8", "replace"))
    return None if match is None else match[1].decode()


def lift_images(body: bytes) -> tuple[bytes, dict[str, bytes]]:
    """One JSON text without its images, and those by SHA-256; see :meth:`ImageLifter.lift`."""
    return ImageLifter().lift(body)


def restore_images(body: bytes, media: Mapping[str, bytes]) -> bytes:
    """The JSON text with its images back in their places, byte for byte.

    Args:
        body: What :func:`lift_images` left (:attr:`gymrl.types.Row.body`,
            :attr:`gymrl.types.Trajectory.result`).
        media: The images by SHA-256. A reference to none of these is plain text and stays.
    """
    if not media or REFERENCE not in body:
        return body

    def image(match: re.Match[bytes]) -> bytes:
        data = media.get(match[1].decode())
        if data is None:
            return match.group()
        return b"".join((b'"', match[2], base64.b64encode(data), b'"'))

    return _REFERENCE.sub(image, body)
