"""What messages of requests hold: texts, and images where they may be."""

from __future__ import annotations

from typing import Any

import msgspec

from gymrl.errors import GenerationRequestError


class Part(msgspec.Struct):
    """One part of a message's content: text, a refusal, or an image in either API's form."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    image: Any = None
    url: Any = None
    file_id: str | None = None


Content = str | list[Part] | None


def content_text(content: Content, where: str) -> str:
    """The text of a message's content; parts are joined as they are.

    Raises:
        GenerationRequestError: A part is not text, naming its place.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def content_parts(content: Content, where: str) -> str | list[dict[str, Any]]:
    """The content of a message that may show images: text where there is none.

    Returns:
        Text, or parts ``{"type": "text", "text"}`` and ``{"type": "image", "source", "where"}``,
        where `source` is the image's URL and `where` its place in the request.

    Raises:
        GenerationRequestError: A part is neither text nor image, or an image has no URL, naming
            its place.
    """
    if isinstance(content, list) and any(part.type in _IMAGE_PARTS for part in content):
        return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return content_text(content, where)


def _part(part: Part, where: str) -> dict[str, Any]:
    if part.type not in _IMAGE_PARTS:
        return {"type": "text", "text": _part_text(part, where)}
    if part.file_id is not None:
        raise GenerationRequestError(
            f"{where}.file_id: this server keeps no files; send the image as a data URL",
            param=f"{where}.file_id",
        )
    url = next((value for value in (part.image, part.image_url, part.url) if value), None)
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str):
        raise GenerationRequestError(
            f"{where}.image_url must be a URL, or an object with one", param=f"{where}.image_url"
        )
    return {"type": "image", "source": url, "where": where}


def _part_text(part: Part, where: str) -> str:
    if part.text is not None and part.type in (None, *_TEXT_PARTS):
        return part.text
    if part.type == "refusal":
        return part.refusal or ""
    if part.type in (None, *_TEXT_PARTS):
        raise GenerationRequestError(f"{where}.text is missing", param=f"{where}.text")
    if part.type in _IMAGE_PARTS:
        text = "no image may be here; users' and system messages and answers of tools may hold them"
        raise GenerationRequestError(f"{where}: {text}", param=f"{where}.type")
    raise GenerationRequestError(
        f"{where}: parts of type {part.type!r} are not supported; text and images are",
        param=f"{where}.type",
    )


_IMAGE_PARTS = ("input_image", "image_url", "image")
_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
