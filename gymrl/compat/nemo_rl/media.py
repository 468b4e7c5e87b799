"""Images of rows and answers put into message logs, under NeMo RL's names.

What becomes of them there is in :mod:`gymrl.compat.nemo_rl.message_media`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.compat.nemo_rl.message_media import OMITTED_MARK, PackedTensor, media_of
from gymrl.config import MediaConfig
from gymrl.errors import ConfigError, MediaError, RowValueError, UnsupportedOptionError
from gymrl.gym.images import ImageBins, bin_images, read_items
from gymrl.media import EncodedImage, open_image
from gymrl.media.loading import load_data_url
from gymrl.media.packing import EXACT_SIZES
from gymrl.media.parts import IMAGE_PARTS
from gymrl.media.processing import ImageProcessor
from gymrl.media.sources import scheme_of
from gymrl.types import Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping, Sequence

    import torch
    from PIL import Image

    from gymrl.types import RolloutGroup


def get_pad_dynamic_image_shapes(env_config: Mapping[str, Any]) -> bool:
    """``nemo_gym.pad_dynamic_image_shapes`` of an ``env`` configuration; false without it.

    Raises:
        ConfigError: It is no boolean.
    """
    value = (env_config.get("nemo_gym") or {}).get("pad_dynamic_image_shapes", False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ConfigError(
            f"pad_dynamic_image_shapes={value!r}: true or false is needed",
            setting="pad_dynamic_image_shapes",
        )
    return value


def has_image_processor(tokenizer: Any) -> bool:
    """Whether a tokenizer is a processor that reads images."""
    return getattr(tokenizer, "image_processor", None) is not None


def extract_input_images_from_message(
    item: Mapping[str, Any], media: MediaConfig | None = None
) -> list[Image.Image]:
    """The images of an item of the Responses API; see ``gymrl.gym.images.image_sources``.

    Only data URLs are read here; rollouts read others, where their configuration says so.

    Raises:
        MediaError: An image is refused or broken, or a part that says it is one names none.
    """
    (read,) = read_items(msgspec.json.encode([item]))
    bins = ImageBins(media or MediaConfig())
    bins.add(read)
    return [open_image(_read(source, media)) for source in bins.pending]


def index_per_turn_images(
    output: Sequence[Mapping[str, Any]],
    input_messages: Sequence[Mapping[str, Any]] | None = None,
    media: MediaConfig | None = None,
) -> list[list[Image.Image]]:
    """The images of each trainable turn; see ``gymrl.gym.images.bin_images``.

    Raises:
        MediaError: As :func:`extract_input_images_from_message`.
    """
    items, prompt = (
        read_items(msgspec.json.encode(part or [])) for part in (output, input_messages)
    )
    turns = bin_images(items, prompt, media or MediaConfig())
    return [[open_image(_read(source, media)) for source in turn] for turn in turns]


def image_sources_equal(left: Any, right: Any) -> bool:
    """Whether two sources name the same image: equal texts, or one and the same object."""
    if isinstance(left, str) and isinstance(right, str):
        return left == right
    return left is right


def without_initial_image_sources(
    messages: Any, initial_sources: Sequence[Any]
) -> tuple[Any, bool]:
    """Messages without one copy, in order, of the images of a prompt.

    Args:
        messages: Items of the Responses API. Not changed.
        initial_sources: Sources of the prompt's images, in order.

    Returns:
        The messages (a copy, parts that are not images as they were), and whether all of
        `initial_sources` were found. What is no list comes back as it is, and false.
    """
    if not isinstance(messages, list):
        return messages, False
    left = list(initial_sources)

    def stays(part: Any) -> bool:
        source = _part_source(part)
        if source is None or not left or not image_sources_equal(source, left[0]):
            return True
        del left[0]
        return False

    copies = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            copies.append({**message, "content": [part for part in content if stays(part)]})
        else:
            copies.append(message)
    return copies, not left


def _part_source(part: Any) -> Any:
    """What an image part names, whatever that is; None where there is nothing."""
    if not isinstance(part, Mapping) or part.get("type") not in IMAGE_PARTS:
        return None
    source = part.get("image") or part.get("image_url") or part.get("url")
    return source.get("url") if isinstance(source, Mapping) else source


def attach_multimodal_data_to_user_message(
    user_message: MutableMapping[str, Any],
    *,
    images: Sequence[EncodedImage],
    processor: ImageProcessor,
) -> None:
    """Put the policy-ready inputs of a turn's images into its user message, in place.

    Nothing happens without images.

    Raises:
        MediaError: An image is broken, or the processor refuses one.
    """
    if images:
        user_message.update(packed_inputs(processor.model_inputs(images), processor))


def packed_inputs(
    inputs: Mapping[str, torch.Tensor], processor: ImageProcessor
) -> dict[str, PackedTensor]:
    """Model inputs as message logs have them."""
    return {
        name: PackedTensor(tensor, processor.pack_dims.get(name, 0))
        for name, tensor in inputs.items()
    }


def pack_media(
    message_logs: Iterable[Sequence[MutableMapping[str, Any]]], processor: ImageProcessor
) -> None:
    """Make policy-ready values of the model inputs in message logs, in place."""
    for log in message_logs:
        for message in log:
            inputs = {name: message[name] for name in processor.pack_dims if name in message}
            if EXACT_SIZES in message:
                inputs[EXACT_SIZES] = message[EXACT_SIZES]
            message.update(packed_inputs(inputs, processor))


def omit_initial_media(
    result: MutableMapping[str, Any], trajectory: Trajectory, row: Mapping[str, Any]
) -> None:
    """Leave the prompt's media out of a result, in place, and mark it.

    Args:
        result: With its message logs.
        trajectory: What it was made of.
        row: Gym's row, with the request.
    """
    if not shows_its_prompt_alone(trajectory, row):
        return
    user = next(message for message in result["message_log"] if message["role"] == "user")
    for name in media_of(user):
        del user[name]
    result[OMITTED_MARK] = True


def shows_its_prompt_alone(trajectory: Trajectory, row: Mapping[str, Any]) -> bool:
    """Whether the first turn shows the images of the request, in their order, and no others.

    With more images (an observation before the first turn) the processor's outputs are of all of
    them, and the request's own can't take their place.
    """
    first = [ref.digest for ref in trajectory.images[0]] if trajectory.images else []
    sources = _initial_sources(row) if first else []
    if len(first) != len(sources) or any(scheme_of(source) != "data" for source in sources):
        return False
    return bool(first) and first == [_read(source, None).digest for source in sources]


def share_initial_media(
    group: RolloutGroup, message_logs: Sequence[Sequence[MutableMapping[str, Any]]], batch: Any
) -> None:
    """Put the input batch's own media of prompts into the results of its rows, in place.

    Args:
        group: Rows of the batch.
        message_logs: Of the results, in the order of its rows.
        batch: The input batch.
    """
    originals = batch.get("message_log")
    if originals is None:
        return
    for row, sample, log in zip(group.rows, group.samples, message_logs, strict=True):
        users = (m for m in originals[row.index] if m["role"] == "user")
        original: Mapping[str, Any] = next(users, {})
        media = {n: v for n, v in media_of(original).items() if isinstance(v, PackedTensor)}
        given = batch["extra_env_info"][row.index]
        if media and isinstance(sample, Trajectory) and shows_its_prompt_alone(sample, given):
            log[0].update(media)


def attach_initial_nemo_gym_image_payloads(
    batch: Mapping[str, Any], processor: Any, *, env_config: Mapping[str, Any]
) -> None:
    """Put the inputs of every prompt's images into its first user message, in place.

    For the batch before its prompts are repeated: repeats then share what was made once. A message
    that has its inputs already is left alone.

    Args:
        batch: ``extra_env_info`` are Gym's rows, ``message_log`` their message logs.
        processor: The model's.
        env_config: The ``env`` block; says whether shapes are padded, as for the turns of rollouts.

    Raises:
        MediaError: An image is refused or broken.
        RowValueError: A row has images and no user message.
        UnsupportedOptionError: There are images and `processor` can't be used for them.
    """
    made: ImageProcessor | None = None
    for index, (row, log) in enumerate(
        zip(batch["extra_env_info"], batch["message_log"], strict=True)
    ):
        sources = _initial_sources(row)
        if not sources:
            continue
        user = next((message for message in log if message["role"] == "user"), None)
        if user is None:
            raise RowValueError(f"row {index} has images and no user message", row=index)
        if media_of(user):
            continue
        if made is None:
            pads = get_pad_dynamic_image_shapes(env_config)
            made = ImageProcessor(processor, pad_dynamic_image_shapes=pads)
        images = [_read(source, None, row=index) for source in sources]
        attach_multimodal_data_to_user_message(user, images=images, processor=made)


def _initial_sources(row: Mapping[str, Any] | None) -> list[str]:
    params = (row or {}).get("responses_create_params") or {}
    bins = ImageBins(MediaConfig())
    for item in read_items(msgspec.json.encode(params.get("input") or [])):
        bins.add(item)
    return bins.pending


def _read(source: str, media: MediaConfig | None, *, row: int | None = None) -> EncodedImage:
    if scheme_of(source) != "data":
        raise UnsupportedOptionError(
            f"image {source[:60]!r}: only data URLs are read here; rollouts read others "
            "(media of the environment's configuration)",
            setting="media",
        )
    try:
        return load_data_url(source, media or MediaConfig())
    except MediaError as error:
        where = "" if row is None else f"row {row}: "
        raise MediaError(f"{where}{error.message}", **{**error.fields, "row": row}) from error
