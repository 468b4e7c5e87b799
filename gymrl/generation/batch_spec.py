"""What a batch of prompts and a batch of generations look like, and what is checked of them.

Field names, padding and shapes are those of NeMo RL's generation interface. B is the number of
samples, P the longest prompt, S the longest prompt with its generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict  # noqa: TID251 - callers index them

from gymrl.errors import GenerationError, GenerationRequestError
from gymrl.extras import optional_imports
from gymrl.generation.base import WeightSpan  # noqa: TC001 - the dictionary's annotations name it
from gymrl.routed_experts import MISSING, RouteFormatError, routes_or_missing

with optional_imports():
    import torch
    from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from gymrl.generation.base import Generated
    from gymrl.types import RoutesArray


class GenerationDatumSpec(TypedDict):
    """Prompts of a batch.

    Attributes:
        input_ids: Integers ``[B, P]``: prompts, padded on the right.
        input_lengths: Integers ``[B]``: tokens of each prompt, at least one.
        stop_strings: B lists of texts that end that sample's generation, or None.
        seeds: B seeds, or None; beside what NeMo RL has.
        max_new_tokens: B limits, or None; on top of the generator's own. As well.
        vllm_images: For each sample its images in the order of the prompt, or None: pictures of
            Pillow's, :class:`~gymrl.media.EncodedImage` or data URLs. ``input_ids`` hold the region
            of each, as the model's processor writes it.
        vllm_content: B texts that the images go with, or None. Not read: the prompts are
            ``input_ids``.
        vllm_videos: Nothing but None; videos are refused.
        vllm_audios: As well.
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    stop_strings: NotRequired[Sequence[Sequence[str] | None] | None]
    seeds: NotRequired[Sequence[int | None] | None]
    max_new_tokens: NotRequired[Sequence[int | None] | None]
    vllm_images: NotRequired[Sequence[Any] | None]
    vllm_content: NotRequired[Sequence[str | None] | None]
    vllm_videos: NotRequired[Sequence[Any] | None]
    vllm_audios: NotRequired[Sequence[Any] | None]


class GenerationOutputSpec(TypedDict):
    """Generations of a batch.

    Attributes:
        output_ids: int64 ``[B, S]``: each prompt and what was sampled after it, padded on the
            right.
        generation_lengths: int64 ``[B]``: sampled tokens; 0 where the prompt filled the context.
        unpadded_sequence_lengths: int64 ``[B]``: prompt and generation together.
        logprobs: float32 ``[B, S]``: of the sampled tokens, in their places; 0 elsewhere.
        truncated: bool ``[B]``: the token limit or the context ended it.
        weight_versions: B lists of spans over that sample's sampled tokens; beside what NeMo RL
            has. Empty lists where the generator does not say.
        routed_experts: Signed integers ``[B, S, L, K]``: the experts that each token went through,
            -1 for a sample's last token, where they are not known, and in the padding. The four
            are there where some sample has routes.
        r3_routed_experts_expected_routes: int64 ``[B]``: tokens that were computed, all but the
            last.
        r3_routed_experts_actual_routes: int64 ``[B]``: those of them that have routes.
        r3_routed_experts_missing_routes: int64 ``[B]``: those that have none.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: torch.Tensor
    weight_versions: NotRequired[list[list[WeightSpan]]]
    routed_experts: NotRequired[torch.Tensor]
    r3_routed_experts_expected_routes: NotRequired[torch.Tensor]
    r3_routed_experts_actual_routes: NotRequired[torch.Tensor]
    r3_routed_experts_missing_routes: NotRequired[torch.Tensor]


_PAIRS = (("input_ids", "input_lengths"), ("output_ids", "unpadded_sequence_lengths"))


def verify_right_padding(
    data: Mapping[str, Any] | GenerationDatumSpec | GenerationOutputSpec,
    pad_value: int = 0,
    raise_error: bool = True,
) -> tuple[bool, str | None]:
    """Whether a batch is padded on the right, and only there, as its lengths say.

    Args:
        data: ``input_ids`` with ``input_lengths``, or ``output_ids`` with
            ``unpadded_sequence_lengths``.
        pad_value: What must stand behind each sequence.
        raise_error: Raise instead of returning what is wrong.

    Returns:
        True and None; False and what is wrong, with the sample and the column.

    Raises:
        GenerationRequestError: It is not, and `raise_error` is set; a `ValueError`.
    """
    try:
        _checked(data, pad_value)
    except GenerationRequestError as error:
        if raise_error:
            raise
        return False, str(error)
    return True, None


def _checked(data: Mapping[str, Any] | Any, pad_value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids and the lengths of a sound batch."""
    names = next((pair for pair in _PAIRS if all(name in data for name in pair)), None)
    if names is None:
        raise GenerationRequestError(
            f"a batch needs input_ids and input_lengths (or output_ids and "
            f"unpadded_sequence_lengths); it has {sorted(data)}",
            param="input_ids",
        )
    ids_name, lengths_name = names
    ids, lengths = torch.as_tensor(data[ids_name]), torch.as_tensor(data[lengths_name])
    for name, tensor, ndim in ((ids_name, ids, 2), (lengths_name, lengths, 1)):
        # A batch of none has no type to speak of.
        is_whole = not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel()
        if tensor.ndim != ndim or not is_whole or tensor.dtype == torch.bool:
            raise GenerationRequestError(
                f"{name} has the shape {list(tensor.shape)} and the type {tensor.dtype}; whole "
                f"numbers of {ndim} dimension(s) are needed",
                param=name,
            )
    num_samples, width = ids.shape
    if lengths.shape[0] != num_samples:
        raise GenerationRequestError(
            f"{lengths_name} has {lengths.shape[0]} entries for {num_samples} samples",
            param=lengths_name,
        )
    wrong = ((lengths < 1) | (lengths > width)).nonzero()
    if len(wrong):
        sample = int(wrong[0])
        raise GenerationRequestError(
            f"sample {sample} of the batch: {lengths_name} says {int(lengths[sample])} tokens, and "
            f"{ids_name} is {width} wide; a length from 1 to that is needed",
            param=lengths_name,
            position=sample,
        )
    columns = torch.arange(width, device=ids.device)
    behind = columns.unsqueeze(0) >= lengths.to(ids.device).unsqueeze(1)
    stray = (behind & (ids != pad_value)).nonzero()
    if len(stray):
        sample, place = (int(value) for value in stray[0])
        raise GenerationRequestError(
            f"sample {sample} of the batch: {ids_name} has token {int(ids[sample, place])} in "
            f"column {place}, behind its {int(lengths[sample])} tokens, where the pad token "
            f"{pad_value} must stand; pad on the right, with that token",
            param=ids_name,
            position=place,
        )
    return ids, lengths


def prompts_of(data: Mapping[str, Any] | GenerationDatumSpec, pad_token_id: int) -> list[list[int]]:
    """The prompts without their padding.

    Raises:
        GenerationRequestError: See :func:`verify_right_padding`.
    """
    ids, lengths = _checked(data, pad_token_id)
    return [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]


_NO_COLUMNS = {
    "ignore_eos": None,
    "max_tokens": "max_new_tokens",
    "seed": "seeds",
    "stop": "stop_strings",
    "stop_token_ids": None,
    "temperature": None,
    "top_k": None,
    "top_p": None,
}
"""Settings of a generator that no sample has of its own, and the columns that come near them."""


def refuse_settings(data: Mapping[str, Any] | Any) -> None:
    """Refuse columns that ask for another distribution, and would be ignored like any that is unknown.

    Raises:
        GenerationRequestError: Naming the first.
    """
    for name, instead in _NO_COLUMNS.items():
        if data.get(name) is not None:
            remedy = (
                f"a batch has {instead}" if instead else "set it for all samples (sampling=...)"
            )
            raise GenerationRequestError(f"{name} is no column of a batch: {remedy}", param=name)


def column(data: Mapping[str, Any] | Any, name: str, count: int) -> list[Any]:
    """An optional column as a list of `count` entries; None for those that say nothing.

    Raises:
        GenerationRequestError: It has another length, or ``stop_strings`` holds something else
            than lists of texts.
    """
    given = data.get(name)
    if given is None:
        return [None] * count
    values = given.tolist() if hasattr(given, "tolist") else list(given)
    if len(values) != count:
        raise GenerationRequestError(
            f"{name} has {len(values)} entries for {count} samples", param=name
        )
    for sample, value in enumerate(values):
        if value is None:
            continue
        if name == "stop_strings":
            is_sound = (
                isinstance(value, Sequence)
                and not isinstance(value, str)
                and all(isinstance(text, str) for text in value)
            )
        else:
            is_sound = isinstance(value, int) and not isinstance(value, bool)
        if not is_sound:
            needed = "a list of texts" if name == "stop_strings" else "a whole number"
            raise GenerationRequestError(
                f"sample {sample} of the batch: {name} holds {value!r:.100}; {needed} or None is "
                "needed",
                param=name,
                position=sample,
            )
    return values


def output_of(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Generated],
    pad_token_id: int,
    device: torch.device | None = None,
) -> GenerationOutputSpec:
    """The batch of some generations.

    Args:
        prompts: B of them.
        answers: What was sampled after each.
        pad_token_id: Fills rows up.
        device: Of the tensors; None: the CPU.
    """
    num_prompt = [len(prompt) for prompt in prompts]
    num_sampled = [len(answer.token_ids) for answer in answers]
    totals = [p + g for p, g in zip(num_prompt, num_sampled, strict=True)]
    shape = (len(prompts), max(totals, default=0))
    output_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros(shape, dtype=torch.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = num_prompt[row], totals[row]
        output_ids[row, :end] = torch.tensor([*prompt, *answer.token_ids])
        logprobs[row, start:end] = torch.tensor(answer.logprobs, dtype=torch.float32)
    output: GenerationOutputSpec = {
        "output_ids": output_ids.to(device),
        "generation_lengths": torch.tensor(num_sampled, dtype=torch.int64, device=device),
        "unpadded_sequence_lengths": torch.tensor(totals, dtype=torch.int64, device=device),
        "logprobs": logprobs.to(device),
        "truncated": torch.tensor(
            [answer.finish_reason == "length" for answer in answers],
            dtype=torch.bool,
            device=device,
        ),
        "weight_versions": [list(answer.weight_versions) for answer in answers],
    }
    _add_routes(output, [answer.routed_experts for answer in answers], totals)
    return output


def _add_routes(
    output: GenerationOutputSpec, given: Sequence[RoutesArray | None], totals: Sequence[int]
) -> None:
    try:
        arrays = routes_or_missing(given, totals)
    except RouteFormatError as error:
        raise GenerationError(f"routed_experts of the batch: {error}") from error
    if arrays is None:
        return
    device = output["output_ids"].device
    columns = [pad_sequence([torch.tensor(a) for a in arrays], True, padding_value=MISSING)]
    expected = [max(total - 1, 0) for total in totals]
    missing = [
        int((array[:count] == MISSING).all(axis=(1, 2)).sum())
        for array, count in zip(arrays, expected, strict=True)
    ]
    actual = [count - gone for count, gone in zip(expected, missing, strict=True)]
    columns += [torch.tensor(counts, dtype=torch.int64) for counts in (expected, actual, missing)]
    routes, expected_B, actual_B, missing_B = (column.to(device) for column in columns)
    output["routed_experts"] = routes
    output["r3_routed_experts_expected_routes"] = expected_B
    output["r3_routed_experts_actual_routes"] = actual_B
    output["r3_routed_experts_missing_routes"] = missing_B
