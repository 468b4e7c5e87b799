"""Which images an agent showed its model, turn by turn. Pure.

The items of a request and of its answer are walked in order: images wait until an item that was
sampled, and belong to the prompt of that turn. What is such an item is
``gymrl.gym.schema.is_turn``, which decides for tokens and images alike; were there two rules,
every later turn could get another turn's images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gymrl.errors import MediaError
from gymrl.gym.schema import OutputItem, is_turn, plain
from gymrl.media import is_allowed_source
from gymrl.media.parts import content_sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gymrl.config import MediaConfig
    from gymrl.gym.ledger_episode import TurnImages

HELD = "sha256:"
"""What the sources of images begin with whose files came with the ledger; no row can name one."""

_items_decoder = msgspec.json.Decoder(list[OutputItem])


def image_sources(item: OutputItem, config: MediaConfig) -> list[str]:
    """The sources of an item's images, in order.

    A part of type ``input_image``, ``image`` or ``image_url`` is an image; its source is in
    ``image``, ``image_url`` or ``url``, a text or ``{"url": text}``. A tool's output that is a text
    is an image when that is a data URL of an image, or a URL that the configuration would fetch;
    any other text (JSON, a path, prose) is text. Assistant messages have none.

    Raises:
        MediaError: A part that says it is an image names none.
    """
    if plain(item.role) == "assistant":
        return []
    if plain(item.type) == "function_call_output":
        output = plain(item.output)
        if isinstance(output, str):
            return [output] if is_allowed_source(output, config) else []
        return content_sources(output)
    return content_sources(plain(item.content))


def held_source(digest: str) -> str:
    """The source of an image whose file came with the ledger."""
    return f"{HELD}{digest}"


class ImageBins:
    """The images of one attempt by the turn whose prompt shows them.

    Args:
        config: What is an image.

    Attributes:
        turns: For each turn so far, its images' sources.
        pending: Those that wait for a turn.
        served: For each turn the images that the policy server says it showed, as sources; None:
            it was not asked.
        sides: The same of each side trajectory.
    """

    def __init__(self, config: MediaConfig) -> None:
        self.turns: list[tuple[str, ...]] = []
        self.pending: list[str] = []
        self.served: list[tuple[str, ...]] | None = None
        self.sides: list[list[tuple[str, ...]]] = []
        self._config = config
        self._unanswered: tuple[str, ...] | None = None

    def add(self, item: OutputItem) -> None:
        """Take the images of an item that is no turn.

        Raises:
            MediaError: As :func:`image_sources`; `turn` is the one that they would belong to.
        """
        try:
            self.pending += image_sources(item, self._config)
        except MediaError as error:
            raise MediaError(error.message, **{**error.fields, "turn": len(self.turns)}) from None

    def flush(self) -> None:
        """A turn was sampled; what waits is its prompt's."""
        self.turns.append(tuple(self.pending))
        self.pending = []

    def mark_unanswered(self) -> None:
        """A prompt got no answer; it is a placeholder's, if no turn follows."""
        self._unanswered = tuple(self.pending)

    def settle_placeholder(self, *, has_prompt: bool) -> None:
        """There was no turn at all: one stands for it, with the unanswered prompt's images."""
        self.turns = [(self._unanswered or ()) if has_prompt else ()]

    def take_served(self, served: Sequence[TurnImages], *, are_turns: bool) -> None:
        """Note what the policy server showed, of the trajectory and then of its sides.

        Args:
            served: The digests of each turn.
            are_turns: There is nothing else to know the images from, so they are the turns'.
        """
        named = [[tuple(map(held_source, turn)) for turn in turns] for turns in served]
        self.served, self.sides = (named[0], named[1:]) if named else ([()], [])
        if are_turns:
            self.turns = self.served


def read_items(items: bytes | msgspec.Raw) -> list[OutputItem]:
    """The items of a request's ``input``; none where that is a text, or no list of objects."""
    try:
        return _items_decoder.decode(items)
    except msgspec.ValidationError:
        return []


def bin_images(
    output: Sequence[OutputItem], prompt: Iterable[OutputItem], config: MediaConfig
) -> list[tuple[str, ...]]:
    """The sources of the images of each turn of `output`.

    Args:
        output: The answer's items.
        prompt: The request's items; their images are the first turn's.
        config: What is an image.

    Raises:
        MediaError: A part that says it is an image names none.
    """
    bins = ImageBins(config)
    for item in prompt:
        bins.add(item)
    for item in output:
        if is_turn(item):
            bins.flush()
        else:
            bins.add(item)
    return bins.turns
