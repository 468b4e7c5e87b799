"""Images of native episodes: read from messages, given their tokens, and kept by turn.

A message names its images; reading them gives each its file and its region, the tokens that it is in
a prompt. What a message adds to a prompt is then a :class:`PromptSegment`, which can only be cut
between regions, so that at all times there are as many images as regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import anyio
import msgspec

from gymrl.concurrency import gather_bounded, growing_pause
from gymrl.errors import (
    EnvironmentContractError,
    MediaError,
    MediaFetchError,
    RolloutRedispatchExhausted,
    RowValueError,
)
from gymrl.generation.images import ConversationImage, PromptImages, RegionReader
from gymrl.media import EncodedImage, lift_images, load_image, to_data_url
from gymrl.media.parts import content_sources, is_image_part
from gymrl.media.regions import check_sampled
from gymrl.rollout.retry import LONGEST_DELAY_S
from gymrl.types import ImageRef

if TYPE_CHECKING:
    from gymrl.config import MediaConfig
    from gymrl.environments.base import Message, Step
    from gymrl.generation.images import ImageFormat
    from gymrl.rollout.episode import Episode
    from gymrl.rollout.native_rows import NativeConfig, NativePrompt

MAX_LOADS = 8
"""Prompts, or images of one message, that are read at a time."""

Images = tuple[ConversationImage, ...]


@runtime_checkable
class WritesImages(Protocol):
    """A codec that writes the placeholder of its model for each image of a message."""

    @property
    def images(self) -> ImageFormat | None:
        """How the model's prompts hold images, None where it writes text only."""
        ...


def format_of(codec: object) -> ImageFormat | None:
    """How a codec's prompts hold images; None where it writes text only."""
    return codec.images if isinstance(codec, WritesImages) else None


class PromptSegment(msgspec.Struct, frozen=True):
    """Tokens that go into a prompt together, and the images among them.

    Attributes:
        token_ids: With the regions of all its images.
        images: In order.
        spans: Of each image's region in `token_ids`, ``[start, end)``.
    """

    token_ids: list[int]
    images: tuple[EncodedImage, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def written(
        cls, ids: list[int], images: Sequence[ConversationImage], format: ImageFormat | None
    ) -> PromptSegment:
        """What a codec wrote, with a region in place of each placeholder.

        Raises:
            MediaError: There are not as many placeholders as images, or a text spells the tokens
                of an image.
        """
        if format is None:
            return cls(ids)
        return cls.located(format.expanded(ids, images), images, format)

    @classmethod
    def located(
        cls, ids: list[int], images: Sequence[ConversationImage], format: ImageFormat | None
    ) -> PromptSegment:
        """Tokens that hold the regions of their images already.

        Raises:
            MediaError: They do not, or hold tokens of images beside them.
        """
        if format is None:
            return cls(ids)
        shown = format.located(ids, images)
        return cls(ids, shown.images, shown.spans)

    def cut(self, length: int) -> PromptSegment:
        """At most the first `length` tokens, and the images that are whole among them.

        Where that would part a region, the cut is before it.
        """
        end = next((start for start, end in self.spans if start < length < end), length)
        num_whole = sum(1 for _, stop in self.spans if stop <= end)
        return PromptSegment(self.token_ids[:end], self.images[:num_whole], self.spans[:num_whole])


class EpisodeImages:
    """The images of one episode, by turn.

    Args:
        format: How prompts hold images; None: they hold none.
    """

    def __init__(self, format: ImageFormat | None) -> None:
        self._format = format
        self._images: list[EncodedImage] = []
        self._spans: list[tuple[int, int]] = []
        self._turns: list[tuple[EncodedImage, ...]] = []
        self._num_taken = 0

    @property
    def count(self) -> int:
        """Images among the tokens."""
        return len(self._images)

    def add(self, segment: PromptSegment, offset: int) -> None:
        """Take a segment that was appended to the tokens at `offset`."""
        self._images += segment.images
        self._spans += [(start + offset, end + offset) for start, end in segment.spans]

    def end_turn(self, token_ids: Sequence[int], turn: int) -> None:
        """A turn was sampled: the images since the one before are its.

        Raises:
            MediaError: It holds tokens of images, for which there is no image.
        """
        if self._format is not None:
            check_sampled(token_ids, self._format.image_token_id, turn)
        self._turns.append(tuple(self._images[self._num_taken :]))
        self._num_taken = len(self._images)

    def shown(self) -> PromptImages | None:
        """Those of the whole prompt, as a generator takes them; None without any."""
        if self._format is None or not self._images:
            return None
        format = self._format
        return PromptImages(self._images, self._spans, format.placeholder, format.pixels)

    def refs(self, num_turns: int) -> tuple[tuple[ImageRef, ...], ...]:
        """Of the first `num_turns` turns; empty where no turn of them has any."""
        turns = self._turns[:num_turns]
        if not any(turns):
            return ()
        return tuple(
            tuple(ImageRef(i.digest, i.media_type, i.width, i.height) for i in turn)
            for turn in turns
        )

    def media(self, num_turns: int) -> dict[str, bytes]:
        """The files of the first `num_turns` turns by SHA-256."""
        return {image.digest: image.data for turn in self._turns[:num_turns] for image in turn}


class PromptImagesRead(msgspec.Struct, frozen=True):
    """The images of a prompt.

    Attributes:
        images: In the order of its messages.
        error: Why they can't be shown; the prompt's rows fail with it.
    """

    images: Images = ()
    error: MediaError | None = None


class SeenStep(NamedTuple):
    """What an environment said, and the images that it showed."""

    step: Step | Exception
    images: Images = ()


class NativeImageReader:
    """Reads the images of prompts and of observations.

    Args:
        format: Of the codec; None: images are refused.
        media: Where they may come from, how large and how many they may be.
    """

    def __init__(self, format: ImageFormat | None, media: MediaConfig) -> None:
        self._format = format
        self._regions = None if format is None else RegionReader(format)
        self._media = media

    async def read_prompts(
        self, prompts: Sequence[NativePrompt], num_generations: int, config: NativeConfig
    ) -> list[PromptImagesRead]:
        """The images of all prompts, each read once for all attempts at it.

        Cancelling it ends downloads at once.

        Raises:
            RowValueError: A prompt has images and the codec writes none; names its first row.
            RolloutRedispatchExhausted: A host could not be reached `max_infra_attempts` times.
        """

        async def read(number: int) -> PromptImagesRead:
            row = number * num_generations
            prompt = prompts[number]
            try:
                sources = prompt_sources(prompt)
                if sources and self._format is None:
                    raise RowValueError(
                        f"row {row}: the prompt shows {len(sources)} images, and the codec writes "
                        "text only; give it the model's image format "
                        "(ChatText.from_tokenizer(tokenizer, images=load_image_format(model)))",
                        row=row,
                    )
                return PromptImagesRead(await self._read_anew(sources, row, config))
            except MediaError as error:
                error = MediaError(f"the prompt: {error.message}", **error.fields)
                return PromptImagesRead(error=error)

        return await gather_bounded(read, range(len(prompts)), MAX_LOADS)

    async def _read_anew(
        self, sources: Sequence[tuple[int, str]], row: int, config: NativeConfig
    ) -> Images:
        """The images, after trouble of their hosts once more, as often as is allowed."""
        for attempt in range(1, config.max_infra_attempts):
            try:
                return await self._read(sources)
            except MediaFetchError:
                await anyio.sleep(growing_pause(config.retry_delay_s, attempt, LONGEST_DELAY_S))
        try:
            return await self._read(sources)
        except MediaFetchError as error:
            raise RolloutRedispatchExhausted(
                f"row {row}: an image of the prompt could not be downloaded "
                f"{config.max_infra_attempts} times (max_infra_attempts); the last: {error}",
                row=row,
                attempts=config.max_infra_attempts,
            ) from error

    async def read_steps(
        self, steps: Sequence[Step | Exception], episodes: Sequence[Episode]
    ) -> list[SeenStep]:
        """Steps with the images of their observations; an error of these in place of its step.

        Raises:
            EnvironmentContractError: An observation has images and the codec writes none.
        """

        async def read(place: int) -> SeenStep:
            step = steps[place]
            if isinstance(step, Exception):
                return SeenStep(step)
            try:
                sources = [(0, s) for s in content_sources(step.observation["content"])]
                if sources and self._format is None:
                    name = episodes[place].sample.task_name
                    raise EnvironmentContractError(
                        f"environment {name!r} shows images, and the codec writes text only; give "
                        "it the model's image format",
                        task_name=name,
                    )
                images = await self._read(sources, num_before=episodes[place].num_images)
            except (MediaError, MediaFetchError) as error:
                turn = episodes[place].turn
                told = f"the observation after turn {turn}: {error.message}"
                return SeenStep(type(error)(told, **{**error.fields, "turn": turn}))
            return SeenStep(step, images)

        return await gather_bounded(read, range(len(steps)))

    async def _read(self, sources: Sequence[tuple[int, str]], num_before: int = 0) -> Images:
        limit = self._media.max_images_per_row
        if len(sources) + num_before > limit:
            raise MediaError(
                f"{len(sources) + num_before} images are more than media.max_images_per_row={limit}"
            )
        regions = self._regions
        if not sources or regions is None:
            return ()

        async def read(named: tuple[int, str]) -> ConversationImage:
            place, source = named
            encoded = await load_image(source, self._media)
            return ConversationImage(place, encoded, await regions.region(encoded))

        return tuple(await gather_bounded(read, sources, MAX_LOADS))


def prompt_sources(prompt: NativePrompt) -> list[tuple[int, str]]:
    """The place of the message and the source of each of a prompt's images, in order.

    Raises:
        MediaError: A part that says it is an image names none.
    """
    if prompt.images is not None:
        return [(0, source) for source in prompt.images]
    return [
        (place, source)
        for place, message in enumerate(prompt.messages)
        for source in content_sources(message["content"])
    ]


def recorded_message(message: Message, images: Sequence[EncodedImage]) -> Message:
    """A message as results and bodies keep it: in parts of the Responses API, images as data URLs.

    Args:
        message: A text stays as it is.
        images: What its image parts show, in order; where there are fewer, as after a failure to
            read them, parts stay as they were given.
    """
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": content}
    left = iter(images)
    parts: list[Any] = []
    for part in content:
        if not is_image_part(part):
            kind = "output_text" if message["role"] == "assistant" else "input_text"
            parts.append({"type": kind, "text": part["text"]})
            continue
        image = next(left, None)
        parts.append(part if image is None else image_part(image))
    return {"role": message["role"], "content": parts}


def image_part(image: EncodedImage) -> dict[str, str]:
    """An image as a part of the Responses API."""
    return {"type": "input_image", "image_url": to_data_url(image.data, image.media_type)}


def lifted(body: bytes, images: Sequence[EncodedImage]) -> tuple[bytes, dict[str, bytes]]:
    """JSON bytes without their images, and those by SHA-256; equal ones are the same object."""
    if not images:
        return body, {}
    own = {image.digest: image.data for image in images}
    thin, media = lift_images(body)
    return thin, {digest: own.get(digest, data) for digest, data in media.items()}
