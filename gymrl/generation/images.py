"""Images in prompts: what a model's processor writes for one, and where they lie among the tokens.

A chat template writes the same few tokens for every image, its *placeholder*; the model's processor
makes of each as many tokens as the image has for the model, its *region*::

    template:  user  look  <start><pad><end>                        and  <start><pad><end>
    prompt:    user  look  <start><pad><pad><pad><pad><pad><pad><end> and  <start><pad><pad><end>

Prompts here hold regions, as they do in the batch that a trainer gets. The next turn's prompt keeps
those of earlier turns with the rest of the true prefix; only what the template adds after it holds
placeholders, which become regions. An engine is told the placeholders and the images, and makes the
regions itself: :meth:`PromptImages.shortened`. That both sides make the same is checked at every call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import anyio
import anyio.to_thread
import msgspec

from gymrl.errors import ConfigError, MediaError
from gymrl.media import EncodedImage, open_image

if TYPE_CHECKING:
    from PIL import Image

    from gymrl.config import SamplingParams
    from gymrl.generation.base import Generated, TokenCallback
    from gymrl.generation.chat import ChatFormat

PIXELS_BYTES = 256 << 20
"""Memory for decoded images that may be asked for again."""

MAX_REGIONS = 4096
"""Images whose regions are remembered."""


class ConversationImage(msgspec.Struct, frozen=True):
    """An image of a conversation.

    Attributes:
        place: Of its message.
        encoded: The file.
        region: Its tokens in a prompt.
    """

    place: int
    encoded: EncodedImage
    region: tuple[int, ...]


class PixelCache:
    """Decoded images by digest, the latest ones, within `max_bytes`. Threads may share it."""

    def __init__(self, max_bytes: int = PIXELS_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[str, Image.Image] = OrderedDict()
        self._lock = threading.Lock()
        self.num_decoded = 0

    def open(self, encoded: EncodedImage) -> Image.Image:
        """The pixels; not to be changed.

        Raises:
            MediaError: They are broken.
        """
        with self._lock:
            found = self._images.get(encoded.digest)
            if found is not None:
                self._images.move_to_end(encoded.digest)
                return found
        image = open_image(encoded)
        with self._lock:
            self.num_decoded += 1
            if encoded.digest not in self._images:
                self._images[encoded.digest] = image
                self._num_bytes += _num_bytes(image)
            while self._num_bytes > self._max_bytes:
                _, oldest = self._images.popitem(last=False)
                self._num_bytes -= _num_bytes(oldest)
        return image


def _num_bytes(image: Image.Image) -> int:
    return image.width * image.height * 3


class PromptImages:
    """The images of one prompt, and where its regions are.

    Attributes:
        images: In the order of the prompt.
        spans: Of each region, ``[start, end)``.
        placeholder: What stands for each of them in what an engine is told.
        pixels: Decodes them.
    """

    def __init__(
        self,
        images: Sequence[EncodedImage],
        spans: Sequence[tuple[int, int]],
        placeholder: Sequence[int],
        pixels: PixelCache,
    ) -> None:
        self.images = tuple(images)
        self.spans = tuple(spans)
        self.placeholder = tuple(placeholder)
        self.pixels = pixels

    def shortened(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt with a placeholder for each region."""
        ids: list[int] = []
        done = 0
        for start, end in self.spans:
            ids += prompt_ids[done:start]
            ids += self.placeholder
            done = end
        return [*ids, *prompt_ids[done:]]

    def opened(self) -> list[Image.Image]:
        """The pixels of each; decodes those that are not remembered, so call it in a thread.

        Raises:
            MediaError: They are broken.
        """
        return [self.pixels.open(image) for image in self.images]


@runtime_checkable
class ImageGenerator(Protocol):
    """A generator whose model sees images."""

    async def generate_with_images(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages,
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """As :meth:`gymrl.generation.base.Generator.generate`, for a prompt that holds images.

        Args:
            prompt_ids: With the regions of all its images.
            images: What they show.
            sampling: Of this call.
            on_token: As there.

        Raises:
            MediaError: The pixels of an image are broken, or the engine makes other tokens of the
                images than `prompt_ids` has.
            GenerationRequestError: The model reads no images, or not so many in one prompt.
            GenerationError: As there.
        """
        ...


class ImageFormat:
    """How one model's prompts hold images. Threads may share it.

    Args:
        processor: The model's transformers processor. Its tokenizer is its own: no other thread
            uses it.
        chat: Renders the template.
        image_token_id: The token that regions are made of.

    Raises:
        ConfigError: The template writes no special token for an image, so that there is no place
            to find again.
    """

    def __init__(self, processor: Any, chat: ChatFormat, image_token_id: int) -> None:
        self.image_token_id = image_token_id
        self.pixels = PixelCache()
        self._processor = processor
        self.placeholder = _placeholder(chat)
        self._placeholder_text = chat.tokenizer.decode(self.placeholder, skip_special_tokens=False)
        self._regions: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def known_region(self, encoded: EncodedImage) -> tuple[int, ...] | None:
        """The tokens of an image that was seen before; takes no time."""
        return self._regions.get(encoded.digest)

    def region(self, encoded: EncodedImage) -> tuple[int, ...]:
        """The tokens of an image. Decodes and processes one that is new, so call it in a thread.

        Raises:
            MediaError: Its pixels are broken, or the processor refuses it.
        """
        # One at a time: a processor's tokenizer is set up anew by each call.
        with self._lock:
            found = self._regions.get(encoded.digest)
            if found is None:
                found = self._processed(encoded)
                self._regions[encoded.digest] = found
                if len(self._regions) > MAX_REGIONS:
                    self._regions.popitem(last=False)
            self._regions.move_to_end(encoded.digest)
            return found

    def _processed(self, encoded: EncodedImage) -> tuple[int, ...]:
        image = self.pixels.open(encoded)
        try:
            inputs = self._processor(
                text=[self._placeholder_text], images=[image], add_special_tokens=False
            )
        except Exception as error:  # whatever a processor raises, about this image
            raise MediaError(
                f"the model's processor refused an image of {encoded.width}x{encoded.height} "
                f"pixels: {type(error).__name__}: {error}",
                source=f"sha256:{encoded.digest}",
            ) from error
        return tuple(int(i) for i in inputs["input_ids"][0])

    def expanded(
        self, ids: list[int], images: Sequence[ConversationImage], start: int = 0
    ) -> list[int]:
        """A rendered prompt with the region of each image in place of its placeholder.

        Args:
            ids: As the template wrote them, from `start` on.
            images: Those that it wrote there, in order.
            start: Length of the true prefix, which holds regions already.

        Raises:
            MediaError: There are not as many placeholders as images.
        """
        made = list(ids[:start])
        done = start
        places = _places(self.placeholder, ids, start)
        for image, place in zip(images, places, strict=False):
            made += ids[done:place]
            made += image.region
            done = place + len(self.placeholder)
        num_found = len(places)
        if num_found != len(images):
            raise MediaError(
                f"the chat template wrote {num_found} places for {len(images)} images: it leaves "
                "images out where these are, or a text spells an image's tokens",
                expected=len(images),
                received=num_found,
            )
        return [*made, *ids[done:]]

    def located(self, prompt_ids: list[int], images: Sequence[ConversationImage]) -> PromptImages:
        """Where the images are in a whole prompt.

        Raises:
            MediaError: The prompt does not hold the region of every image in their order, or has
                tokens of images beside them.
        """
        spans: list[tuple[int, int]] = []
        position = 0
        for image in images:
            place = _place(image.region, prompt_ids, position)
            if place is None:
                break
            position = place + len(image.region)
            spans.append((place, position))
        if len(spans) != len(images):
            missing = images[len(spans)]
            raise MediaError(
                f"the prompt holds {len(spans)} of {len(images)} images in their order: image "
                f"{len(spans)} ({missing.encoded.width}x{missing.encoded.height} pixels, of "
                f"message {missing.place}) is not where its {len(missing.region)} tokens should "
                "be. Send images of earlier turns back as they were",
                expected=len(images),
                received=len(spans),
            )
        num_tokens = sum(image.region.count(self.image_token_id) for image in images)
        num_strays = prompt_ids.count(self.image_token_id) - num_tokens
        if num_strays:
            raise MediaError(
                f"{num_strays} image tokens of the prompt belong to none of its {len(images)} "
                "images: the model sampled them, a text spells them, or images of earlier turns "
                "were left out",
                expected=num_tokens,
                received=num_tokens + num_strays,
            )
        encoded = [image.encoded for image in images]
        return PromptImages(encoded, spans, self.placeholder, self.pixels)


class RegionReader:
    """Regions of images without holding the event loop. Belongs to one loop.

    One image is worked on at a time, in one thread: a format lets no more in, and threads that wait
    for it would be missing elsewhere.

    Args:
        format: Of the model.
    """

    def __init__(self, format: ImageFormat) -> None:
        self._format = format
        self._limiter = anyio.CapacityLimiter(1)

    async def region(self, encoded: EncodedImage) -> tuple[int, ...]:
        """As :meth:`ImageFormat.region`."""
        known = self._format.known_region(encoded)
        if known is not None:
            return known
        return await anyio.to_thread.run_sync(self._format.region, encoded, limiter=self._limiter)


def check_regions(prompt_ids: list[int], engine_ids: list[int], images: PromptImages) -> None:
    """Hold an engine to the prompt: what it made of the placeholders is what the prompt has.

    Raises:
        MediaError: It made something else; names the first token that differs.
    """
    if engine_ids == prompt_ids:
        return
    pairs = enumerate(zip(prompt_ids, engine_ids, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(prompt_ids), len(engine_ids)))
    sizes = ", ".join(f"{image.width}x{image.height}" for image in images.images)
    raise MediaError(
        f"vLLM makes other tokens of the images ({sizes} pixels) than the model's transformers "
        f"processor: {len(engine_ids)} tokens in all instead of {len(prompt_ids)}, the first that "
        f"differs at {place}. Rollouts with images of this model can't be token-exact",
        expected=len(prompt_ids),
        received=len(engine_ids),
    )


def _place(part: Sequence[int], ids: list[int], start: int) -> int | None:
    """Where `part` is next."""
    wanted = list(part)
    while True:
        try:
            start = ids.index(part[0], start)
        except ValueError:
            return None
        if ids[start : start + len(part)] == wanted:
            return start
        start += 1


def _places(part: Sequence[int], ids: list[int], start: int) -> list[int]:
    """Where `part` is, from `start` on."""
    found: list[int] = []
    place = _place(part, ids, start)
    while place is not None:
        found.append(place)
        place = _place(part, ids, place + len(part))
    return found


def _placeholder(chat: ChatFormat) -> tuple[int, ...]:
    """What the template writes for an image, from its first special token to its last."""
    written = chat.image_text()
    if written is None:
        raise ConfigError("the chat template writes nothing for an image", setting="model")
    special = {*chat.tokenizer.all_special_ids, *chat.tokenizer.added_tokens_decoder}
    ids = chat.encode(written)
    places = [place for place, token_id in enumerate(ids) if token_id in special]
    if not places:
        raise ConfigError(
            f"the chat template writes {written!r} for an image, which has no special token",
            setting="model",
        )
    return tuple(ids[places[0] : places[-1] + 1])
