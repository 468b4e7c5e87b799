"""The parts of a message's content: which of them are images, and what names those."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from gymrl.errors import MediaError
from gymrl.media.sources import looks_like_image_source, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

IMAGE_PARTS = frozenset({"input_image", "image", "image_url"})
"""Types of content parts that are images."""

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of content parts that are text, in ``text``."""

_SOURCE_FIELDS = ("image", "image_url", "url")


def is_image_part(part: object) -> bool:
    """Whether a content part says that it is an image."""
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def part_source(part: Mapping[str, Any]) -> str:
    """What an image part names: in ``image``, ``image_url`` or ``url``, a text or ``{"url": text}``.

    Raises:
        MediaError: It names no image.
    """
    source: Any = next((part[name] for name in _SOURCE_FIELDS if part.get(name)), None)
    if isinstance(source, dict):
        source = source.get("url")
    if isinstance(source, str) and looks_like_image_source(source):
        return source
    if source is None:
        found = f"has none, only {', '.join(sorted(part))}"
    else:
        found = f"has {shown(source) if isinstance(source, str) else type(source).__name__!r}"
    raise MediaError(
        f"a part of type {part['type']!r} {found}; an image is named by a URL (data:image/..., "
        "https://...) in image_url",
        source=shown(source) if isinstance(source, str) else None,
    )


def content_sources(content: Any) -> list[str]:
    """The sources of the images of a content, in order; none where it is a text.

    Raises:
        MediaError: A part that says it is an image names none.
    """
    if not isinstance(content, list | tuple):
        return []
    return [part_source(part) for part in content if is_image_part(part)]


def content_text(content: Any) -> str:
    """The text of a content, parts joined, images left out."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if not is_image_part(part))


def content_problem(content: Any) -> str | None:
    """Why a content is neither a text nor a list of parts of text and images; None where it is."""
    if isinstance(content, str):
        return None
    if not isinstance(content, list | tuple):
        return f"is a {type(content).__name__}, not a text or a list of parts"
    for part in content:
        if is_image_part(part):
            continue
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            known = ", ".join(sorted(TEXT_PARTS | IMAGE_PARTS))
            return f"has a part of type {kind!r}; parts are of {known}"
        if not isinstance(part.get("text"), str):
            return f"has a part of type {part['type']!r} without a text"
    return None


def copied(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message that can be changed without changing the one that was given."""
    return {
        name: value if isinstance(value, str) else copy.deepcopy(value)
        for name, value in message.items()
    }
