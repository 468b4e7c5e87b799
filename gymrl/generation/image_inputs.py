"""The images of requests: fetched as far as is allowed, counted, and given their tokens.

A request names images by URL. Reading them puts each one's digest in the place of its URL, so that a
conversation is known again by what it shows, however it was sent.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.concurrency import gather_bounded
from gymrl.errors import ConfigError, GenerationRequestError, MediaError, MediaFetchError
from gymrl.generation.images import ConversationImage, ImageFormat, RegionReader
from gymrl.media import EncodedImage, is_allowed_source, load_image

if TYPE_CHECKING:
    from gymrl.config import GenerationConfig, MediaConfig
    from gymrl.generation.chat import ChatFormat
    from gymrl.generation.policy import Conversation

logger = logging.getLogger(__name__)

MAX_LOADS = 8
"""Images of one request that are fetched at a time."""


class RequestImageReader:
    """Reads the images of requests for one model.

    Args:
        format: How its prompts hold images; None: it reads none.
        media: Where images may come from, and how large and how many they may be.
        refusal: Why it reads none.
    """

    def __init__(
        self,
        format: ImageFormat | None,
        media: MediaConfig,
        refusal: str = "this server's model reads text only",
    ) -> None:
        self.format = format
        self._regions = None if format is None else RegionReader(format)
        self.media = media
        self.refusal = refusal

    async def read(self, conversation: Conversation) -> Conversation:
        """The conversation with its images.

        A tool's answer that is a text and names an image by a data URL, or by a URL that may be
        read here, is that image where the model sees images; elsewhere it is text.

        Raises:
            GenerationRequestError: The model reads no images, there are too many, or one is
                refused or broken; names its place.
            MediaFetchError: A host can't be reached now.
        """
        messages = conversation.messages
        if self.format is not None:
            messages = [self._seen(message, place) for place, message in enumerate(messages)]
        found = [
            (place, part)
            for place, message in enumerate(messages)
            if isinstance(message.get("content"), list)
            for part in message["content"]
            if part["type"] == "image"
        ]
        if not found:
            return conversation
        regions = self._checked(len(found), found[0][1]["where"])

        async def read_one(item: tuple[int, dict[str, Any]]) -> ConversationImage:
            place, part = item
            encoded, region = await self._read(regions, part["source"], part["where"])
            return ConversationImage(place, encoded, region)

        images = await gather_bounded(read_one, found, MAX_LOADS)
        digests = iter([image.encoded.digest for image in images])
        messages = [_with_digests(message, digests) for message in messages]
        return msgspec.structs.replace(conversation, messages=messages, images=tuple(images))

    def _seen(self, message: dict[str, Any], place: int) -> dict[str, Any]:
        """A message, its text in the form of an image where it is the URL of one."""
        content = message.get("content")
        if message["role"] != "tool" or not is_allowed_source(content, self.media):
            return message
        part = {"type": "image", "source": content, "where": f"message {place}"}
        return {**message, "content": [part]}

    def _checked(self, num_images: int, where: str) -> RegionReader:
        if self._regions is None:
            raise GenerationRequestError(f"{where}: {self.refusal}", param=where)
        limit = self.media.max_images_per_row
        if num_images > limit:
            raise GenerationRequestError(
                f"{num_images} images in one request are more than "
                f"media.max_images_per_row={limit}",
                param=where,
            )
        return self._regions

    async def _read(
        self, regions: RegionReader, source: str, where: str
    ) -> tuple[EncodedImage, tuple[int, ...]]:
        try:
            encoded = await load_image(source, self.media)
            region = await regions.region(encoded)
        except MediaFetchError as error:
            raise MediaFetchError(f"{where}: {error}", source=error.source) from error
        except MediaError as error:
            raise GenerationRequestError(f"{where}: {error}", param=where) from error
        return encoded, region


def _with_digests(message: dict[str, Any], digests: Any) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "image", "digest": next(digests)} if part["type"] == "image" else part
        for part in content
    ]
    return {**message, "content": parts}


def load_image_reader(config: GenerationConfig, chat: ChatFormat) -> RequestImageReader:
    """The reader of a server's model; blocks while the model's processor is loaded.

    A model that sees, and whose processor can't be used here, is served for text: requests with
    images are told why.
    """
    # transformers takes seconds to import, and a model of text needs no more than its tokenizer.
    from gymrl.generation.processors import sees_images  # noqa: PLC0415

    if not sees_images(config.model):
        return RequestImageReader(
            None,
            config.media,
            f"model={config.model!r} reads text only; serve a vision-language model",
        )
    try:
        image_format = _format(config.model, chat)
    except ConfigError as error:
        logger.warning("requests with images will be refused: %s", error)
        return RequestImageReader(None, config.media, str(error))
    return RequestImageReader(image_format, config.media)


def load_image_format(model: str, tokenizer: Any = None) -> ImageFormat:
    """How the prompts of a model hold images; blocks while its processor is loaded.

    Args:
        model: A directory or hub id.
        tokenizer: The model's; None: it is loaded.

    Raises:
        ConfigError: The model sees no images, or its processor can't be used here.
        GenerationRequestError: Its tokenizer has no chat template.
    """
    # Loading a model's files imports transformers, which takes seconds.
    from gymrl.generation.chat import ChatFormat  # noqa: PLC0415
    from gymrl.generation.checkpoints import load_tokenizer  # noqa: PLC0415
    from gymrl.generation.models import resolve_model  # noqa: PLC0415
    from gymrl.generation.processors import sees_images  # noqa: PLC0415

    if not sees_images(model):
        raise ConfigError(f"model={model!r} reads text only", setting="model")
    if tokenizer is None:
        tokenizer, _ = load_tokenizer(resolve_model(model))
    return _format(model, ChatFormat(tokenizer))


def _format(model: str, chat: ChatFormat) -> ImageFormat:
    from gymrl.generation.processors import load_processor  # noqa: PLC0415 - imports transformers

    processor, image_token_id = load_processor(model)
    return ImageFormat(processor, chat, image_token_id)
