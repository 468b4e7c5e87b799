"""From a source to an encoded image, as far as the configuration lets it."""

from __future__ import annotations

import os
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import anyio.to_thread

from gymrl.media.fetch import fetch
from gymrl.media.images import EncodedImage, inspect_image
from gymrl.media.sources import decode_data_url, refused, scheme_of, too_large

if TYPE_CHECKING:
    from gymrl.config import MediaConfig

INLINE_CHARS = 64 << 10
"""Longer data URLs are read in a thread."""


async def load_image(source: str, config: MediaConfig) -> EncodedImage:
    """Read an image from a data URL, and from http, https or file where they are allowed.

    Nothing but the header is decoded; :func:`~gymrl.media.open_image` finds out about broken
    pixels. Cancellation ends a download at once.

    Args:
        source: The URL. Its scheme may be in any case of letters.
        config: What is allowed.

    Raises:
        MediaError: The source is not allowed, not an image, broken, or over a limit.
        MediaFetchError: Its host can't be reached, or is not well; a later try may do.
    """
    scheme = scheme_of(source)
    if scheme not in ("data", "http", "https", "file"):
        raise refused(source, "not an image source; it begins with data:, http:, https: or file:")
    if scheme not in config.schemes:
        raise refused(
            source,
            f"{scheme} is not in media.schemes={list(config.schemes)}; images of other schemes "
            "are neither fetched nor read",
        )
    if scheme == "data":
        read = partial(load_data_url, source, config)
        return read() if len(source) <= INLINE_CHARS else await anyio.to_thread.run_sync(read)
    if scheme == "file":
        return await anyio.to_thread.run_sync(partial(_load_file, source, config))
    data = await fetch(source, config)
    return await anyio.to_thread.run_sync(partial(inspect_image, data, config, source=source))


def load_data_url(url: str, config: MediaConfig) -> EncodedImage:
    """Read a data URL.

    Raises:
        MediaError: It holds no image, a broken one, or one over a limit.
    """
    return inspect_image(decode_data_url(url, config), config, source=url)


def _load_file(source: str, config: MediaConfig) -> EncodedImage:
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise refused(source, "a file URL reads file:///absolute/path")
    try:
        path = Path(unquote(parts.path)).resolve(strict=True)
        roots = [Path(root).resolve() for root in config.allowed_roots]
    except (OSError, ValueError, RuntimeError) as error:
        raise refused(source, f"there is no such file ({error})") from error
    if not any(path.is_relative_to(root) for root in roots):
        raise refused(source, "it lies outside media.allowed_roots")
    return inspect_image(_read_regular(path, source, config), config, source=source)


def _read_regular(path: Path, source: str, config: MediaConfig) -> bytes:
    """The bytes of a regular file, at most as many as are allowed; never a link, never a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise refused(source, "not a regular file")
            data = file.read(config.max_image_bytes + 1)
    except OSError as error:
        raise refused(source, f"it can't be read ({error.strerror or error})") from error
    if len(data) > config.max_image_bytes:
        raise too_large(source, len(data), config)
    return data
