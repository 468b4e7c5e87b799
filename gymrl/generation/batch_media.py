"""The media of a batch: what its columns hold, and where it is in the prompts.

The columns are NeMo RL's. ``vllm_images`` are shown; ``vllm_content`` is the text that they go with,
and is not read: the prompts are ``input_ids``, in which every image has its region already, and a
generator continues those tokens and no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from gymrl.concurrency import gather_bounded
from gymrl.errors import GenerationRequestError, MediaError
from gymrl.generation.images import ConversationImage
from gymrl.media import EncodedImage, encode_picture
from gymrl.media.loading import load_data_url
from gymrl.media.sources import scheme_of, shown

if TYPE_CHECKING:
    from gymrl.config import MediaConfig
    from gymrl.generation.image_inputs import RequestImageReader
    from gymrl.generation.images import PromptImages

UNSHOWN_MEDIA = ("vllm_videos", "vllm_audios")
"""Columns of media that no generator takes here."""


def images_of(data: Mapping[str, Any], count: int, config: MediaConfig) -> list[list[EncodedImage]]:
    """The images of each sample of a batch, in the order of its prompt.

    Args:
        data: ``vllm_images``: for each sample None, an image, or a list of them; an image is a
            picture of Pillow's, an :class:`~gymrl.media.EncodedImage`, or a data URL.
        count: Samples of the batch.
        config: Limits of images.

    Raises:
        GenerationRequestError: A column has another length, or holds something else, or there are
            videos or audios; names the sample.
        MediaError: An image is broken, or over a limit; names the sample.
    """
    for name in UNSHOWN_MEDIA:
        for sample, value in enumerate(_entries(data, name, count)):
            if _as_list(value):
                raise GenerationRequestError(
                    f"sample {sample} of the batch has {name}; images alone can be shown",
                    param=name,
                )
    # Rows that are attempts at one prompt have the same objects: each is read once.
    known: dict[int, EncodedImage] = {}
    images: list[list[EncodedImage]] = []
    for sample, entry in enumerate(_entries(data, "vllm_images", count)):
        values = _as_list(entry)
        for value in values:
            if id(value) not in known:
                known[id(value)] = _image(value, sample, config)
        images.append([known[id(value)] for value in values])
    return images


def _entries(data: Mapping[str, Any], name: str, count: int) -> list[Any]:
    given = data.get(name)
    if given is None:
        return [None] * count
    entries = list(given)
    if len(entries) != count:
        raise GenerationRequestError(
            f"{name} has {len(entries)} entries for {count} samples", param=name
        )
    return entries


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _image(value: Any, sample: int, config: MediaConfig) -> EncodedImage:
    where = f"sample {sample} of the batch"
    try:
        if isinstance(value, EncodedImage):
            return value
        if isinstance(value, str) and scheme_of(value) == "data":
            return load_data_url(value, config)
        if callable(getattr(value, "save", None)) and hasattr(value, "mode"):
            return encode_picture(value, config)
    except MediaError as error:
        raise MediaError(f"{where}: {error.message}", **error.fields) from error
    found = shown(value) if isinstance(value, str) else type(value).__name__
    raise GenerationRequestError(
        f"{where}: vllm_images holds {found!r}; a picture of Pillow's, an EncodedImage, or an "
        "image's data URL is needed",
        param="vllm_images",
    )


async def located_images(
    prompts: Sequence[list[int]], data: Mapping[str, Any], reader: RequestImageReader
) -> list[PromptImages | None]:
    """What each prompt of a batch shows, and where; None for one without images.

    Args:
        prompts: With the regions of their images.
        data: The batch.
        reader: Says how the model's prompts hold images.

    Raises:
        GenerationRequestError: There are images and the model reads none, or too many of them, or
            as :func:`images_of`.
        MediaError: A prompt does not hold the regions of its images in order, or holds tokens of
            images beside them; or as :func:`images_of`. Names the sample.
    """
    given = await anyio.to_thread.run_sync(images_of, data, len(prompts), reader.media)
    limit = reader.media.max_images_per_row
    for sample, images in enumerate(given):
        where = f"sample {sample} of the batch"
        if images and reader.format is None:
            raise GenerationRequestError(f"{where}: {reader.refusal}", param="vllm_images")
        if len(images) > limit:
            raise GenerationRequestError(
                f"{where}: {len(images)} images are more than media.max_images_per_row={limit}",
                param="vllm_images",
            )
    if reader.format is None:
        return [None] * len(prompts)
    format = reader.format

    def locate(sample: int) -> PromptImages | None:
        try:
            images = [ConversationImage(0, i, format.region(i)) for i in given[sample]]
            found = format.located(prompts[sample], images)
        except MediaError as error:
            hint = "" if given[sample] else " (vllm_images has none for it)"
            text = f"sample {sample} of the batch: {error.message}{hint}"
            raise MediaError(text, **error.fields) from error
        return found if images else None

    async def one(sample: int) -> PromptImages | None:
        if not given[sample]:
            return locate(sample)
        return await anyio.to_thread.run_sync(locate, sample)

    # One at a time: a format lets no more in, and threads that wait for it are missing elsewhere.
    return await gather_bounded(one, range(len(prompts)), 1)
