"""The images of a worker's rows: read before the agent runs, and out of its answer.

A prompt's images are read first: a broken one fails its row before any request, and one that is
named by a URL is put into the request as a data URL, so that the model, the tools and the trainer
all see the bytes that were read here, once.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from gymrl.errors import GymrlError, MediaError, MediaFetchError
from gymrl.gym.images import ImageBins, read_items
from gymrl.gym.schema import ABSENT
from gymrl.media import (
    ImageLifter,
    load_image,
    looks_like_image_source,
    open_image,
    restore_images,
    to_data_url,
)
from gymrl.media.parts import IMAGE_PARTS
from gymrl.media.regions import check_regions
from gymrl.media.sources import scheme_of
from gymrl.types import ImageRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.config import MediaConfig
    from gymrl.media import EncodedImage
    from gymrl.media.regions import ImageLayout
    from gymrl.types import Row, Trajectory

KEPT_DIGESTS = 4096
"""Images known to be whole, so that what many rows show is decoded once."""

INLINE_BYTES = 128 << 10
"""More is worked on in a thread."""


class _Params(msgspec.Struct, frozen=True):
    input: msgspec.Raw = ABSENT


class _Body(msgspec.Struct, frozen=True):
    responses_create_params: _Params = _Params()


_body_decoder = msgspec.json.Decoder(_Body)


T = TypeVar("T")


async def _run(work: Callable[[], T], num_bytes: int) -> T:
    """Work on so many bytes, in a thread where they would hold the event loop for long."""
    return work() if num_bytes <= INLINE_BYTES else await anyio.to_thread.run_sync(work)


async def body_with_images(row: Row) -> bytes:
    """A row's request with its images in it."""
    restore = partial(restore_images, row.body, row.media)
    return await _run(restore, sum(map(len, row.media.values())))


def _add_prompt(bins: ImageBins, body: bytes) -> None:
    for item in read_items(_body_decoder.decode(body).responses_create_params.input):
        bins.add(item)


class RowImages:
    """The images of one row under way.

    Attributes:
        body: The request's body with its images in it.
        bins: The prompt's images, to be filled on with those of the answer.
    """

    def __init__(self, reader: ImageReader, body: bytes, bins: ImageBins) -> None:
        self.body = body
        self.bins = bins
        self._reader = reader
        self._loaded: dict[str, EncodedImage] = {}

    async def load(self, source: str) -> EncodedImage:
        """An image of the row; each source is read once."""
        image = self._loaded.get(source)
        if image is None:
            image = self._loaded[source] = await self._reader.load(source)
        return image

    async def attach(self, trajectory: Trajectory, row: int) -> Trajectory:
        """The trajectory with the images of its turns, its result without their bytes.

        Raises:
            MediaError: An image is refused or broken, there are too many, or the prompt's tokens
                do not show as many as there are; names row and turn.
            MediaFetchError: An image could not be downloaded.
        """
        self._reader.check_count(sum(map(len, self.bins.turns)))
        media: dict[str, bytes] = {}
        turns: list[tuple[ImageRef, ...]] = []
        for turn, sources in enumerate(self.bins.turns):
            refs = []
            for source in sources:
                try:
                    image = await self.load(source)
                except (MediaError, MediaFetchError) as error:
                    raise _at(error, row, turn) from error
                media[image.digest] = image.data
                refs.append(ImageRef(image.digest, image.media_type, image.width, image.height))
            turns.append(tuple(refs))
        trajectory = msgspec.structs.replace(trajectory, images=tuple(turns))
        try:
            await self._reader.check(trajectory)
        except MediaError as error:
            raise _at(error, row, error.turn) from error
        lift = partial(ImageLifter().lift, trajectory.result)
        result, lifted = await _run(lift, len(trajectory.result))
        return msgspec.structs.replace(trajectory, result=result, media={**lifted, **media})


class ImageReader:
    """Reads the images of a worker's rows.

    Args:
        config: What may be read.
        layout: How many tokens an image is, where that is to be checked; None: it is not.

    Attributes:
        num_decoded: Images that were decoded; one that many rows show counts once.
    """

    def __init__(self, config: MediaConfig, layout: ImageLayout | None = None) -> None:
        self.layout = layout
        self.num_decoded = 0
        self._config = config
        self._whole: OrderedDict[str, None] = OrderedDict()
        self._decoding: dict[str, anyio.Lock] = {}
        # A processor is no thing for two threads, and takes its time with a new size of image.
        self._processing = anyio.CapacityLimiter(1)

    async def open_row(self, row: Row) -> RowImages:
        """Read the images of a row's prompt.

        Raises:
            MediaError: One is refused or broken, a part names none, or there are too many.
            MediaFetchError: One could not be downloaded.
        """
        body = await body_with_images(row)
        bins = ImageBins(self._config)
        images = RowImages(self, body, bins)
        try:
            await _run(lambda: _add_prompt(bins, body), len(body))
            self.check_count(len(bins.pending))
            by_url = {}
            for source in bins.pending:
                image = await images.load(source)
                if scheme_of(source) != "data":
                    by_url[source] = to_data_url(image.data, image.media_type)
        except (MediaError, MediaFetchError) as error:
            raise _at(error, row.index, 0) from error
        if by_url:
            images.body = _with_sources(body, by_url)
        return images

    async def load(self, source: str) -> EncodedImage:
        """Read an image, and decode it once, so that a broken one fails its row here."""
        image = await load_image(source, self._config)
        # The attempts at a prompt come at the same time: one of them decodes, the others wait.
        async with self._decoding.setdefault(image.digest, anyio.Lock()):
            try:
                if image.digest not in self._whole:
                    pixels = await anyio.to_thread.run_sync(open_image, image)
                    pixels.close()
                    self.num_decoded += 1
            finally:
                self._decoding.pop(image.digest, None)
            self._whole[image.digest] = None
            self._whole.move_to_end(image.digest)
            if len(self._whole) > KEPT_DIGESTS:
                self._whole.popitem(last=False)
        return image

    async def check(self, trajectory: Trajectory) -> None:
        """Hold the tokens to the images, where a layout says how.

        Raises:
            MediaError: As :func:`gymrl.media.regions.check_regions`.
        """
        if self.layout is not None:
            check = partial(check_regions, trajectory, self.layout)
            await anyio.to_thread.run_sync(check, limiter=self._processing)

    def check_count(self, count: int) -> None:
        """Refuse more images than a row may have."""
        limit = self._config.max_images_per_row
        if count > limit:
            raise MediaError(
                f"{count} images are more than media.max_images_per_row={limit}",
                expected=limit,
                received=count,
            )


def _at(error: GymrlError, row: int, turn: int | None) -> GymrlError:
    fields = {**error.fields, "row": row, "turn": turn}
    where = f"row {row}" if turn is None else f"row {row}, turn {turn}"
    return type(error)(f"{where}: {error.message}", **fields)


def _with_sources(body: bytes, by_url: dict[str, str]) -> bytes:
    """The body with image sources of its input replaced."""
    fields: dict[str, Any] = msgspec.json.decode(body)
    for item in fields["responses_create_params"]["input"]:
        if isinstance(item.get("output"), str):
            item["output"] = by_url.get(item["output"], item["output"])
        for name in ("content", "output"):
            parts = item.get(name)
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                    _replace_source(part, by_url)
    return msgspec.json.encode(fields)


def _replace_source(part: dict[str, Any], by_url: dict[str, str]) -> None:
    for name in ("image", "image_url", "url"):
        source = part.get(name)
        if isinstance(source, dict) and looks_like_image_source(source.get("url")):
            source["url"] = by_url.get(source["url"], source["url"])
        elif looks_like_image_source(source):
            part[name] = by_url.get(source, source)
