"""Do recorded log-probabilities agree with the model's own? The proof behind on-policy training.

Recorded sequences are run through a plain forward pass, as a trainer would, and the log-probability
of every sampled token is computed again with the arithmetic of :mod:`gymrl.generation.sampling`.
What differs is how the numbers came about: one pass over known tokens here, token by token in a
padded, changing batch there. In float32 on a CPU the two agree within 1e-4 on average and 1e-3 at
most; a larger gap means that tokens, weights, template or sampling parameters are not what the
record says.

Memory is bounded by `max_tokens` times the vocabulary, whatever the sequences' lengths: they are
run in pieces along their length, with a key-value cache, and logits are kept only at columns where
some sequence has a sampled token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from gymrl.config import LogprobsMode, SamplingParams
from gymrl.errors import BadLogprobsError, GenerationRequestError
from gymrl.extras import optional_imports
from gymrl.generation.decoding import cache_argument
from gymrl.generation.sampling import sampled_logprob
from gymrl.types import Float32Array, Int32Array

with optional_imports():
    import torch
    from transformers import DynamicCache

if TYPE_CHECKING:
    from gymrl.types import Trajectory

MEAN_TOLERANCE = 1e-4
MAX_TOLERANCE = 1e-3
"""Nats, for float32 on a CPU."""


class RecordedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to check.

    Attributes:
        token_ids: int32 ``[T]``.
        logprobs: float32 ``[T]``; read where `mask` is true.
        mask: bool ``[T]``: sampled tokens. The first token can't be one: nothing precedes it.
        sampling: What they were sampled with.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    mask: npt.NDArray[np.bool_]
    sampling: SamplingParams = SamplingParams()

    @classmethod
    def of(cls, trajectory: Trajectory, sampling: SamplingParams) -> RecordedSequence:
        """The sequence of a trajectory."""
        return cls(
            token_ids=trajectory.token_ids,
            logprobs=trajectory.logprobs,
            mask=trajectory.token_mask(),
            sampling=sampling,
        )

    @classmethod
    def of_call(
        cls,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        sampling: SamplingParams,
    ) -> RecordedSequence:
        """The sequence of one model call."""
        num_prompt, num_sampled = len(prompt_ids), len(token_ids)
        return cls(
            token_ids=np.array([*prompt_ids, *token_ids], dtype=np.int32),
            logprobs=np.array([0.0] * num_prompt + list(logprobs), dtype=np.float32),
            mask=np.array([False] * num_prompt + [True] * num_sampled),
            sampling=sampling,
        )


class FidelityReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far recorded and recomputed log-probabilities are apart.

    Attributes:
        num_sequences: Sequences checked.
        num_tokens: Sampled tokens checked.
        mean_gap: Mean of the absolute differences, in nats; 0 with no token.
        max_gap: The largest of them; infinite where a filter excludes the recorded token.
        worst: Sequence and position of the largest; None with no token.
    """

    num_sequences: int
    num_tokens: int
    mean_gap: float
    max_gap: float
    worst: tuple[int, int] | None

    def agrees(
        self, mean_tolerance: float = MEAN_TOLERANCE, max_tolerance: float = MAX_TOLERANCE
    ) -> bool:
        """Whether both gaps are within tolerance, and there was something to compare."""
        return (
            self.num_tokens > 0
            and self.mean_gap <= mean_tolerance
            and self.max_gap <= max_tolerance
        )


def check_fidelity(
    model: Any,
    sequences: Sequence[RecordedSequence],
    *,
    mode: LogprobsMode = "processed",
    max_tokens: int = 512,
) -> FidelityReport:
    """Compare recorded log-probabilities with the model's.

    Args:
        model: A transformers causal language model in eval mode.
        sequences: In any order.
        mode: What the recorded numbers are.
        max_tokens: Tokens of one piece of work, over all its sequences.

    Raises:
        BadLogprobsError: A recorded log-probability is not finite, or the arrays of a sequence
            don't fit together.
        GenerationRequestError: A sequence holds a token that the model does not have.
    """
    recomputed = recompute_logprobs(model, sequences, mode=mode, max_tokens=max_tokens)
    total, count = 0.0, 0
    largest, worst = 0.0, None
    for index, (sequence, values) in enumerate(zip(sequences, recomputed, strict=True)):
        places = np.flatnonzero(sequence.mask)
        if places.size == 0:
            continue
        gaps = np.abs(sequence.logprobs[places].astype(np.float64) - values[places])
        total += float(gaps.sum())
        count += places.size
        top = int(gaps.argmax())
        if worst is None or gaps[top] > largest:
            largest, worst = float(gaps[top]), (index, int(places[top]))
    return FidelityReport(
        num_sequences=len(sequences),
        num_tokens=count,
        mean_gap=total / count if count else 0.0,
        max_gap=largest,
        worst=worst,
    )


@torch.inference_mode()
def recompute_logprobs(
    model: Any,
    sequences: Sequence[RecordedSequence],
    *,
    mode: LogprobsMode = "processed",
    max_tokens: int = 512,
) -> list[Float32Array]:
    """Log-probabilities of the sampled tokens, by a plain forward pass.

    Args:
        model: A transformers causal language model in eval mode.
        sequences: In any order.
        mode: As they were recorded.
        max_tokens: Tokens of one piece of work, over all its sequences.

    Returns:
        For each sequence float32 ``[T]``: zero where no token was sampled.

    Raises:
        BadLogprobsError: A sequence's arrays don't fit together, or hold no finite number.
        GenerationRequestError: A sequence holds a token that the model does not have.
    """
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    for index, sequence in enumerate(sequences):
        _check(sequence, index)
        _check_vocabulary(sequence, index, vocab_size)
    results = [np.zeros(len(s.token_ids), dtype=np.float32) for s in sequences]
    for batch in _batches([len(s.token_ids) for s in sequences], max_tokens):
        piece = max(max_tokens // len(batch), 1)
        _run(model, [sequences[i] for i in batch], [results[i] for i in batch], piece, mode)
    return results


def _check(sequence: RecordedSequence, index: int) -> None:
    lengths = {len(sequence.token_ids), len(sequence.logprobs), len(sequence.mask)}
    if len(lengths) != 1:
        raise BadLogprobsError(
            f"sequence {index}: {len(sequence.token_ids)} tokens, {len(sequence.logprobs)} "
            f"log-probabilities and a mask of {len(sequence.mask)} don't fit together",
            row=index,
        )
    if len(sequence.mask) and sequence.mask[0]:
        raise BadLogprobsError(
            f"sequence {index}: its first token is marked as sampled, but nothing precedes it",
            row=index,
            position=0,
        )
    bad = np.flatnonzero(sequence.mask & ~np.isfinite(sequence.logprobs))
    if bad.size:
        position = int(bad[0])
        raise BadLogprobsError(
            f"sequence {index}: the recorded log-probability at position {position} is "
            f"{sequence.logprobs[position]}",
            row=index,
            position=position,
        )


def _check_vocabulary(sequence: RecordedSequence, index: int, vocab_size: int) -> None:
    outside = np.flatnonzero((sequence.token_ids < 0) | (sequence.token_ids >= vocab_size))
    if outside.size:
        position = int(outside[0])
        raise GenerationRequestError(
            f"sequence {index}: token {sequence.token_ids[position]} at position {position} is outside the "
            f"vocabulary of {vocab_size} tokens: this is not the model that sampled it",
            position=position,
        )


def _batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Sequences of similar length together, padded within `max_tokens`; a longer one goes alone."""
    batches: list[list[int]] = []
    for index in sorted(
        (i for i, length in enumerate(lengths) if length), key=lambda i: lengths[i]
    ):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _run(
    model: Any,
    sequences: Sequence[RecordedSequence],
    results: Sequence[Float32Array],
    piece: int,
    mode: LogprobsMode,
) -> None:
    """Fill `results` for sequences that run together, padded on the right, piece by piece."""
    width = max(len(s.token_ids) for s in sequences)
    token_ids = np.zeros((len(sequences), width), dtype=np.int64)
    mask = np.zeros((len(sequences), width), dtype=np.bool_)
    for row, sequence in enumerate(sequences):
        token_ids[row, : len(sequence.token_ids)] = sequence.token_ids
        mask[row, : len(sequence.mask)] = sequence.mask
    # The logits of column t are about the token of column t + 1. The last column predicts nothing.
    inputs = torch.from_numpy(token_ids).to(model.device)
    cache, cached_as = DynamicCache(), cache_argument(model)
    for start in range(0, width - 1, piece):
        end = min(start + piece, width - 1)
        columns = np.flatnonzero(mask[:, start + 1 : end + 1].any(axis=0))
        # Padding comes last, so causal attention never sees it and no mask is needed.
        outputs = model(
            input_ids=inputs[:, start:end],
            **{cached_as: cache},
            use_cache=True,
            logits_to_keep=torch.from_numpy(columns).to(model.device) if columns.size else 1,
        )
        if not columns.size:
            continue
        rows, kept = np.nonzero(mask[:, start + 1 + columns])
        positions = start + 1 + columns[kept]
        picked = sampled_logprob(
            outputs.logits[torch.from_numpy(rows), torch.from_numpy(kept)],
            inputs[torch.from_numpy(rows), torch.from_numpy(positions)],
            [sequences[row].sampling for row in rows],
            mode,
        )
        for row, position, value in zip(rows, positions, picked.tolist(), strict=True):
            results[row][position] = value
