"""Media that are in message logs: told apart, put back, handed to a generation.

A message's media are of two kinds, which are never mixed up. *Policy-ready*: what the model's
processor made, each value a :class:`PackedTensor`; for log-probabilities and training.
*vLLM-ready*: what vLLM's own processor is to be given, under the names of :data:`VLLM_MEDIA_KEYS`.
Anything else in a message is no medium and is left alone.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from gymrl.compat.nemo_rl.settings import section
from gymrl.errors import MediaError
from gymrl.media.packing import pack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping, Sequence

VLLM_MEDIA_KEYS = ("vllm_content", "vllm_images", "vllm_videos", "vllm_audios")
"""Columns and message fields that are vLLM-ready; ``vllm_content`` is the text they go with."""

OMITTED_MARK = "_initial_multimodal_data_omitted"
"""Set in a result whose prompt's media were left out, as they are known where it goes."""

LOGS = ("input_message_log", "message_log")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PackedTensor:
    """A model input of all images of a message.

    Attributes:
        tensor: As the processor made it.
        dim_to_pack: Along which dimension other messages' are put behind it.
    """

    tensor: torch.Tensor
    dim_to_pack: int = 0

    def as_tensor(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The tensor, on a device where one is named."""
        return self.tensor if device is None else self.tensor.to(device)

    @staticmethod
    def concat(parts: Sequence[PackedTensor]) -> PackedTensor:
        """Those of several messages as one.

        Raises:
            MediaError: There is none, or their shapes differ but for the packed dimension.
        """
        if not parts:
            raise MediaError("no tensors to pack")
        dim = parts[0].dim_to_pack
        joined = pack([{"media": part.tensor} for part in parts], {"media": dim}, pads=False)
        return PackedTensor(joined["media"], dim)


def media_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """The media of a message: policy-ready values and named vLLM-ready ones, nothing else."""
    return {
        name: value
        for name, value in message.items()
        if isinstance(value, PackedTensor) or (name in VLLM_MEDIA_KEYS and value is not None)
    }


def reattach_original_multimodal_payloads(
    results: Iterable[MutableMapping[str, Any]],
    original_message_logs: Iterable[Sequence[Mapping[str, Any]]],
) -> None:
    """Put the media of prompts back into results that came without them, in place.

    The k-th user message of a result gets the media of the k-th user message of the original log,
    whether or not others before it have any. Only results that say so (:data:`OMITTED_MARK`) are
    touched.

    Raises:
        MediaError: A result has fewer user messages than its original has up to the last with
            media.
    """
    for result, original in zip(results, original_message_logs, strict=True):
        if result.pop(OMITTED_MARK, False):
            done: set[int] = set()
            for name in LOGS:
                if result.get(name):
                    is_whole = name == "message_log"
                    _copy_media(result[name], original, done, _no_check, is_whole=is_whole)


def reattach_static_multimodal_payloads_to_result(
    result: Mapping[str, Any],
    source_message_log: Sequence[Mapping[str, Any]],
    tokenizer: Any = None,
) -> None:
    """:func:`attach_static_multimodal_payload` for every message log of a result."""
    done: set[int] = set()
    for name in LOGS:
        if result.get(name):
            attach_static_multimodal_payload(result[name], source_message_log, done, tokenizer)


def attach_static_multimodal_payload(
    target_message_log: Sequence[MutableMapping[str, Any]],
    source_message_log: Sequence[Mapping[str, Any]],
    processed_target_ids: set[int] | None = None,
    tokenizer: Any = None,
) -> None:
    """Copy the media of a source log's user messages to those of a target, in place, by ordinal.

    Args:
        target_message_log: As Gym's agent wrote it. It may have fewer user messages.
        source_message_log: With policy-ready media.
        processed_target_ids: ``id`` of messages that are done; shared between logs whose messages
            are the same objects, so that each is done once.
        tokenizer: Where it is given, with ``image_token_id`` or ``video_token_id``: a target must
            hold as many of these tokens, in runs of the same lengths, as its source.

    Raises:
        MediaError: It does not; nothing of that message was copied.
    """
    done = set() if processed_target_ids is None else processed_target_ids
    tokens = [
        token
        for name in ("image_token_id", "video_token_id")
        if isinstance(token := getattr(tokenizer, name, None), int)
    ]

    def check(target: Mapping[str, Any], source: Mapping[str, Any], ordinal: int) -> None:
        for token in tokens:
            has, needs = (_runs(message, token) for message in (target, source))
            if has != needs:
                raise MediaError(
                    f"user message {ordinal} has runs of {has} placeholder tokens {token}, its "
                    f"media fill runs of {needs}",
                    turn=ordinal,
                    expected=sum(needs),
                    received=sum(has),
                )

    _copy_media(target_message_log, source_message_log, done, check, is_whole=False)


def _runs(message: Mapping[str, Any], token: int) -> list[int]:
    runs: list[int] = []
    before = None
    for current in torch.as_tensor(message["token_ids"]).tolist():
        if current == token:
            if before == token:
                runs[-1] += 1
            else:
                runs.append(1)
        before = current
    return runs


def _no_check(target: Mapping[str, Any], source: Mapping[str, Any], ordinal: int) -> None:
    """Copy as it is."""


def _copy_media(
    target_log: Sequence[MutableMapping[str, Any]],
    source_log: Sequence[Mapping[str, Any]],
    done: set[int],
    check: Any,
    *,
    is_whole: bool,
) -> None:
    targets = [message for message in target_log if message["role"] == "user"]
    sources = [message for message in source_log if message["role"] == "user"]
    for ordinal, source in enumerate(sources):
        media = media_of(source)
        if not media:
            continue
        if ordinal >= len(targets):
            if not is_whole:
                return
            raise MediaError(
                f"the result has {len(targets)} user messages, and media for message {ordinal}",
                turn=ordinal,
                expected=ordinal + 1,
                received=len(targets),
            )
        target = targets[ordinal]
        if id(target) in done:
            continue
        check(target, source, ordinal)
        done.add(id(target))
        target.update(media)


def add_multimodal_generation_payload(
    generation_input_data: MutableMapping[str, Any],
    flat_messages: Mapping[str, Any],
    active_batch: Mapping[str, Any],
    policy_generation: Any,
    *,
    deduplicate_multimodal_data: bool,
) -> None:
    """Put media into the input of a generation, in place: one representation, or both.

    vLLM-ready columns always go along. Policy-ready ones go too, unless
    `deduplicate_multimodal_data` is set, vLLM generates, and every row has vLLM-ready media: they
    would not be looked at then.

    Args:
        generation_input_data: Gets them.
        flat_messages: Columns of messages; :class:`PackedTensor` values are policy-ready.
        active_batch: May have columns of :data:`VLLM_MEDIA_KEYS`.
        policy_generation: ``cfg["backend"]`` says who generates.
        deduplicate_multimodal_data: As above.
    """
    is_vllm_alone = sends_vllm_media_alone(
        active_batch, policy_generation, is_asked=deduplicate_multimodal_data
    )
    if not is_vllm_alone:
        generation_input_data.update(
            {name: v for name, v in flat_messages.items() if isinstance(v, PackedTensor)}
        )
    generation_input_data.update(
        {name: active_batch[name] for name in VLLM_MEDIA_KEYS if name in active_batch}
    )


def sends_vllm_media_alone(
    active_batch: Mapping[str, Any], policy_generation: Any, *, is_asked: bool
) -> bool:
    """Whether policy-ready media need not go along, where that `is_asked` for.

    They need not where vLLM generates and every row has media that are ready for it.
    """
    cfg = section(policy_generation, "cfg") or {}
    content = active_batch.get("vllm_content")
    return (
        is_asked
        and section(cfg, "backend") == "vllm"
        and content is not None
        and all(_has_vllm_media(active_batch, row) for row in range(len(content)))
    )


def _has_vllm_media(batch: Mapping[str, Any], row: int) -> bool:
    for name in VLLM_MEDIA_KEYS[1:]:
        column = batch.get(name)
        if column is not None and row < len(column):
            value = column[row]
            if value is not None and (not hasattr(value, "__len__") or len(value) > 0):
                return True
    return False
