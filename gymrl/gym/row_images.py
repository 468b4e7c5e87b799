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

from gymrl.errors import (
    GymrlError,
    LedgerLostError,
    LedgerMismatchError,
    MediaError,
    MediaFetchError,
)
from gymrl.gym.images import HELD, ImageBins, held_source, read_items
from gymrl.gym.schema import ABSENT
from gymrl.media import (
    ImageLifter,
    inspect_image,
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
    from collections.abc import Callable, Mapping, Sequence

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

    async def load(self, source: str, held: Mapping[str, bytes] | None = None) -> EncodedImage:
        """An image of the row; each source is read once.

        Args:
            source: A URL, or the digest of a file that is in `held`.
            held: Files by digest.

        Raises:
            LedgerLostError: Its file did not come.
            MediaError: It is refused or broken.
            MediaFetchError: It could not be downloaded.
        """
        image = self._loaded.get(source)
        if image is None:
            if held is not None and source.startswith(HELD):
                image = await self._reader.load_held(source, held)
            else:
                image = await self._reader.load(source)
            self._loaded[source] = image
        return image

    async def attach(
        self, trajectory: Trajectory, row: int, held: Mapping[str, bytes] | None = None
    ) -> Trajectory:
        """The trajectory with the images of its turns, its result without their bytes.

        Args:
            trajectory: Without images.
            row: Its index.
            held: Files that came with the ledger, by digest.

        Raises:
            LedgerMismatchError: The policy server showed other images than the agent's answer has.
            MediaError: An image is refused or broken, there are too many, or the prompt's tokens
                do not show as many as there are; names row and turn.
            MediaFetchError: An image could not be downloaded.
        """
        self._reader.check_count(sum(map(len, self.bins.turns)))
        media: dict[str, bytes] = {}
        binned = _Binned(self, row, held or {}, media)
        turns = await binned.refs(self.bins.turns)
        sides = [
            msgspec.structs.replace(side, images=await binned.refs(sources))
            for side, sources in zip(trajectory.side_trajectories, self.bins.sides, strict=True)
        ]
        if not trajectory.placeholder:
            _require_served(turns, self.bins.served, row)
        trajectory = msgspec.structs.replace(
            trajectory, images=turns, side_trajectories=tuple(sides)
        )
        try:
            await self._reader.check(trajectory)
        except MediaError as error:
            raise _at(error, row, error.turn) from error
        lift = partial(ImageLifter().lift, trajectory.result)
        result, lifted = await _run(lift, len(trajectory.result))
        return msgspec.structs.replace(trajectory, result=result, media={**lifted, **media})


class _Binned:
    """Sources of images to references, their files collected on the way."""

    def __init__(
        self, images: RowImages, row: int, held: Mapping[str, bytes], media: dict[str, bytes]
    ) -> None:
        self._images = images
        self._row = row
        self._held = held
        self._media = media

    async def refs(self, turns: Sequence[Sequence[str]]) -> tuple[tuple[ImageRef, ...], ...]:
        """The references of each turn."""
        found: list[tuple[ImageRef, ...]] = []
        for turn, sources in enumerate(turns):
            try:
                images = [await self._images.load(source, self._held) for source in sources]
            except (MediaError, MediaFetchError) as error:
                raise _at(error, self._row, turn) from error
            self._media.update((image.digest, image.data) for image in images)
            found.append(tuple(ImageRef(i.digest, i.media_type, i.width, i.height) for i in images))
        return tuple(found)


def _require_served(
    turns: Sequence[Sequence[ImageRef]], served: Sequence[Sequence[str]] | None, row: int
) -> None:
    """Hold the images of an answer to those that the policy server showed."""
    if served is None:
        return
    for turn, (refs, expected) in enumerate(zip(turns, served, strict=False)):
        received = [held_source(ref.digest) for ref in refs]
        if received != list(expected):
            raise LedgerMismatchError(
                f"row {row}, turn {turn}: the policy server showed {len(expected)} images to the "
                f"model ({', '.join(expected) or 'none'}), the agent's answer has {len(received)} "
                f"({', '.join(received) or 'none'}). The agent changed, lost or left out images; "
                "token_source='ledger' takes the server's word",
                row=row,
                turn=turn,
                field="images",
            )


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
        await self._decode(image)
        return image

    async def load_held(self, source: str, held: Mapping[str, bytes]) -> EncodedImage:
        """Read an image whose file came with the ledger; as :meth:`load`.

        Raises:
            LedgerLostError: It did not come.
        """
        data = held.get(source.removeprefix(HELD))
        if data is None:
            raise LedgerLostError(
                f"the ledger came without the file of image {source}: the policy server did not "
                "know yet that files are wanted",
                reason="an image is missing",
            )
        inspect = partial(inspect_image, data, self._config, source=source)
        image = await _run(inspect, len(data))
        if held_source(image.digest) != source:
            raise MediaError(f"{source}: the ledger has another file", source=source)
        await self._decode(image)
        return image

    async def _decode(self, image: EncodedImage) -> None:
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

    async def check(self, trajectory: Trajectory) -> None:
        """Hold the tokens to the images, where a layout says how.

        Raises:
            MediaError: As :func:`gymrl.media.regions.check_regions`.
        """
        if self.layout is not None:
            check = partial(check_regions, trajectory, self.layout)
            await anyio.to_thread.run_sync(check, limiter=self._processing)

    def check_count(self, count: int) -> None:
        """Refuse more images than a row may have.

        Raises:
            MediaError: `count` is above `max_images_per_row`.
        """
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
