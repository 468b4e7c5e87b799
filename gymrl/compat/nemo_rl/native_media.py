"""Images of native batches under NeMo RL's names: to a rollout, to a policy, and into its result.

A rollout is shown the vLLM-ready images (``vllm_images``), or those that the messages name in their
parts; policy-ready media go back into the results that they came with.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from gymrl.compat.nemo_rl.media import has_image_processor, packed_inputs
from gymrl.compat.nemo_rl.message_media import (
    VLLM_MEDIA_KEYS,
    PackedTensor,
    add_multimodal_generation_payload,
    media_of,
    sends_vllm_media_alone,
)
from gymrl.errors import GymrlError, RowValueError, UnsupportedOptionError
from gymrl.generation.batch_media import images_of
from gymrl.generation.chat import ChatFormat
from gymrl.generation.images import ImageFormat
from gymrl.media import encode_picture, to_data_url
from gymrl.media.packing import EXACT_SIZES
from gymrl.media.parts import is_image_part
from gymrl.media.processing import ImageProcessor

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from gymrl.config import MediaConfig
    from gymrl.generation.images import PromptImages
    from gymrl.rollout.native_rows import NativePrompt
    from gymrl.types import RolloutGroup


def prompt_media(
    input_batch: Mapping[str, Any], media: MediaConfig
) -> list[tuple[list[dict[str, Any]], list[str] | None]]:
    """Each row's messages with their contents, and the images beside them.

    Args:
        input_batch: ``message_log``, and ``vllm_images`` as a column or in its messages. Not
            changed.
        media: Limits of images.

    Returns:
        For each row ``role`` and ``content`` of its messages, and the sources of the images that
        its tokens show where the messages have no parts for them; None: they have, or there are
        none.

    Raises:
        GenerationRequestError, MediaError: An image is broken or of another kind, or there are
            videos or audios.
        RowValueError: A row's messages have another number of image parts than it has images.
        UnsupportedOptionError: A row has policy-ready media alone, from which nobody can sample.
    """
    logs = list(input_batch["message_log"])
    columns = {
        name: _column(input_batch, name, logs) for name in VLLM_MEDIA_KEYS if name != "vllm_content"
    }
    given = images_of(columns, len(logs), media)
    rows = []
    for index, (log, images) in enumerate(zip(logs, given, strict=True)):
        sources = [to_data_url(image.data, image.media_type) for image in images]
        rows.append(_row(log, sources, index, media))
    return rows


def has_images(prompt: NativePrompt) -> bool:
    """Whether a prompt shows images, sound ones or not."""
    if prompt.images is not None:
        return bool(prompt.images)
    contents = [message["content"] for message in prompt.messages]
    return any(is_image_part(part) for c in contents if isinstance(c, list) for part in c)


def _column(input_batch: Mapping[str, Any], name: str, logs: Sequence[Any]) -> Any:
    """A column, else what the messages of each row have under its name."""
    if input_batch.get(name) is not None:
        return input_batch[name]
    rows: list[list[Any]] = []
    for log in logs:
        row: list[Any] = []
        for message in log:
            value = message.get(name)
            if value is not None:
                row += value if isinstance(value, list | tuple) else [value]
        rows.append(row)
    return rows


def _row(
    log: Sequence[Mapping[str, Any]], sources: list[str], index: int, media: MediaConfig
) -> tuple[list[dict[str, Any]], list[str] | None]:
    messages = [
        {"role": message["role"], "content": _content(message["content"], media)} for message in log
    ]
    parts = [
        part
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if is_image_part(part)
    ]
    if not sources and not parts:
        names = sorted({name for message in log for name in media_of(message)})
        if names:
            raise UnsupportedOptionError(
                f"row {index} has {', '.join(names)} and no images: a rollout is shown images; "
                "give the batch its vllm_images as well",
                setting="vllm_images",
            )
    if not sources:
        return messages, None
    if not parts:
        return messages, sources
    if len(parts) != len(sources):
        raise RowValueError(
            f"row {index}: its messages have {len(parts)} image parts, and vllm_images "
            f"{len(sources)} images",
            row=index,
        )
    for part, source in zip(parts, sources, strict=True):
        kind = part["type"]
        part.clear()
        part.update({"type": kind, "image_url": source})
    return messages, None


def _content(content: Any, media: MediaConfig) -> Any:
    """A copy whose pictures are data URLs."""
    if not isinstance(content, list | tuple):
        return content
    return [_part(part, media) if is_image_part(part) else part for part in content]


def _part(part: Mapping[str, Any], media: MediaConfig) -> dict[str, Any]:
    picture: Any = part.get("image")
    if not callable(getattr(picture, "save", None)):
        return dict(part)
    image = encode_picture(picture, media)
    return {"type": part["type"], "image_url": to_data_url(image.data, image.media_type)}


def image_format_of(tokenizer: Any, *, is_needed: bool) -> ImageFormat | None:
    """How prompts of a processor's model hold images; None for a tokenizer.

    Args:
        tokenizer: Neither it nor its tokenizer is changed.
        is_needed: There are images to show; otherwise a processor that can't be used is none.

    Raises:
        UnsupportedOptionError: There are images, and `tokenizer` is no processor, or can't be used.
        GymrlError: The processor can't be used; says why.
    """
    if not has_image_processor(tokenizer):
        if is_needed:
            raise UnsupportedOptionError(
                "the batch has images: give the model's processor as tokenizer",
                setting="tokenizer",
            )
        return None
    own = copy.deepcopy(tokenizer)
    writer = copy.deepcopy(own.tokenizer)
    if not writer.chat_template:
        writer.chat_template = getattr(own, "chat_template", None)
    try:
        return ImageFormat(own, ChatFormat(writer), ImageProcessor(own).image_token_id)
    except GymrlError:
        if is_needed:
            raise
        return None


def batch_processor(
    groups: Sequence[RolloutGroup], input_batch: Mapping[str, Any], tokenizer: Any
) -> ImageProcessor | None:
    """What makes policy-ready media of the images of a result; None where it has no images."""
    if not any(any(t.images) for group in groups for t in group.trajectories):
        return None
    pads = any(EXACT_SIZES in message for log in input_batch["message_log"] for message in log)
    return ImageProcessor(tokenizer, pad_dynamic_image_shapes=pads)


def keep_prompt_media(
    message_logs: Sequence[Sequence[MutableMapping[str, Any]]],
    originals: Sequence[Sequence[Mapping[str, Any]]],
) -> None:
    """Put the policy-ready media that prompts came with into their results, in place.

    Prompts whose media are spread over several messages get those that were made anew: a result
    has one message for a whole prompt.
    """
    for log, original in zip(message_logs, originals, strict=True):
        found = [
            {n: v for n, v in media_of(message).items() if isinstance(v, PackedTensor)}
            for message in original
        ]
        found = [media for media in found if media]
        if len(found) == 1 and any(isinstance(value, PackedTensor) for value in log[0].values()):
            log[0].update(found[0])


class PolicyMedia:
    """The media columns of a batch for a policy with NeMo RL's batch face.

    Args:
        tokenizer: The model's processor.
        deduplicates: Leave policy-ready media out where vLLM generates and looks at its own.
    """

    def __init__(self, tokenizer: Any, *, deduplicates: bool) -> None:
        self._given = tokenizer
        self._deduplicates = deduplicates

    @functools.cached_property
    def _own(self) -> Any:
        # What a processor is called with changes its tokenizer, which rollouts encode with.
        return copy.deepcopy(self._given)

    @functools.cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(self._own)

    def add(
        self,
        data: MutableMapping[str, Any],
        prompts: Sequence[Sequence[int]],
        images: Sequence[PromptImages | None],
        policy: Any,
    ) -> None:
        """Put the columns into a batch, in place.

        ``vllm_content`` is the prompt with a placeholder for each image, as text; ``vllm_images``
        are pictures. Policy-ready media are those of all rows in order.
        """
        vllm_ready: dict[str, Any] = {
            "vllm_content": [
                None
                if shown is None
                else self._own.tokenizer.decode(shown.shortened(ids), skip_special_tokens=False)
                for ids, shown in zip(prompts, images, strict=True)
            ],
            "vllm_images": [
                [] if shown is None else [shown.pixels.open(image) for image in shown.images]
                for shown in images
            ],
        }
        flat: dict[str, Any] = {}
        if not sends_vllm_media_alone(vllm_ready, policy, is_asked=self._deduplicates):
            made = [self._processor.model_inputs(s.images) for s in images if s is not None]
            flat = dict(packed_inputs(self._processor.pack(made), self._processor))
        add_multimodal_generation_payload(
            data, flat, vllm_ready, policy, deduplicate_multimodal_data=self._deduplicates
        )
