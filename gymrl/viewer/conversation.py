"""What a model and its environment said, from the request and the server's answer of one row.

Items of the Responses API, and messages of chat, become :class:`Item`; an item of a kind that is not
known here keeps its JSON. Nothing is fetched: an image that is only a link stays a link.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gymrl.media import reference_digest

TEXT_CHARS = 20_000
"""A longer text is cut in the page; the raw JSON has all of it."""


class Text(msgspec.Struct, frozen=True):
    """A text, or its beginning.

    Attributes:
        text: At most :data:`TEXT_CHARS` characters.
        chars: How many there are.
    """

    text: str
    chars: int

    @classmethod
    def of(cls, text: str) -> Text:
        """The text, cut where it is too long for a page."""
        return cls(text[:TEXT_CHARS], len(text))


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a message: a text, or an image.

    Attributes:
        image: Number among the row's images; -1 where it is none, or only a link.
        link: Of an image that is somewhere else. It is shown, not fetched.
    """

    text: Text | None = None
    image: int = -1
    link: str = ""


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of a conversation.

    Attributes:
        kind: ``message``, ``reasoning``, ``call``, ``result``, or the type of an unknown item.
        role: Who spoke, for a message.
        name: Of the tool, for a call.
        call_id: Which call a result answers.
        sampled: It came back from the rollout, rather than with the request.
    """

    kind: str
    parts: tuple[Part, ...]
    role: str = ""
    name: str = ""
    call_id: str = ""
    sampled: bool = False


class Conversation(msgspec.Struct, frozen=True):
    """All items in order, and the sources of their images.

    Attributes:
        images: For each image of :attr:`Part.image` where it is: a ``data:`` URL or another
            reference that the row itself resolves.
    """

    items: tuple[Item, ...]
    images: tuple[str, ...]


def conversation_of(task: Any, result: Any) -> Conversation:
    """The conversation of a row.

    Args:
        task: The decoded body of its ``/run`` call.
        result: The decoded answer.
    """
    reader = _Reader()
    parameters = _member(task, "responses_create_params") or _member(
        result, "responses_create_params"
    )
    given = _member(parameters, "input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    instructions = _member(parameters, "instructions")
    if isinstance(instructions, str):
        given = [{"role": "system", "content": instructions}, *(given or [])]
    output = _member(_member(result, "response"), "output")
    items = [
        *(reader.item(entry, sampled=False) for entry in _list(given)),
        *(reader.item(entry, sampled=True) for entry in _list(output)),
    ]
    return Conversation(tuple(items), tuple(reader.images))


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _json(value: Any) -> Part:
    return Part(text=Text.of(msgspec.json.encode(value).decode()))


class _Reader:
    """Items of one row; collects their images on the way."""

    def __init__(self) -> None:
        self.images: list[str] = []
        self._place: dict[str, int] = {}

    def item(self, entry: Any, *, sampled: bool) -> Item:
        kind = _text(_member(entry, "type")) or ("message" if _member(entry, "role") else "")
        if kind == "message":
            return self._message(entry, sampled)
        if kind == "reasoning":
            said = [*_list(_member(entry, "content")), *_list(_member(entry, "summary"))]
            return Item("reasoning", self._parts(said), sampled=sampled)
        name, call_id = _text(_member(entry, "name")), _text(_member(entry, "call_id"))
        if kind in ("function_call", "custom_tool_call"):
            said = _member(entry, "arguments") or _member(entry, "input")
            return Item("call", self._parts(said), name=name, call_id=call_id, sampled=sampled)
        if kind in ("function_call_output", "custom_tool_call_output"):
            output = self._parts(_member(entry, "output"))
            return Item("result", output, call_id=call_id, sampled=sampled)
        return Item(kind or "item", (_json(entry),), sampled=sampled)

    def _message(self, entry: Any, sampled: bool) -> Item:
        parts = self._parts(_member(entry, "content"))
        for call in _list(_member(entry, "tool_calls")):
            parts = (*parts, _json(call))
        role = _text(_member(entry, "role"))
        if role == "tool":
            return Item(
                "result", parts, call_id=_text(_member(entry, "tool_call_id")), sampled=sampled
            )
        return Item("message", parts, role=role, sampled=sampled)

    def _parts(self, content: Any) -> tuple[Part, ...]:
        if isinstance(content, str):
            shown = reference_digest(content) is not None
            return (self._image(content) if shown else Part(text=Text.of(content)),)
        if isinstance(content, list):
            return tuple(self._part(part) for part in content)
        return () if content is None else (_json(content),)

    def _part(self, part: Any) -> Part:
        if isinstance(part, str):
            return Part(text=Text.of(part))
        for name in ("text", "refusal"):
            if isinstance(_member(part, name), str):
                return Part(text=Text.of(part[name]))
        source = _member(part, "image_url")
        if isinstance(source, dict):
            source = source.get("url")
        if isinstance(source, str):
            return self._image(source)
        return _json(part)

    def _image(self, source: str) -> Part:
        if source.startswith(("http:", "https:", "file:")):
            return Part(link=source[:TEXT_CHARS])
        place = self._place.get(source)
        if place is None:
            place = self._place[source] = len(self.images)
            self.images.append(source)
        return Part(image=place)
