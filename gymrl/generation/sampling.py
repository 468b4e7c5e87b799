"""From logits to a token and its log-probability; one arithmetic for sampling and for checking it.

Tensors are ``[B, V]``: B sequences, V vocabulary entries. All work is in float32; the cumulative
sum that a token is drawn from is in float64, so that 50,000 small probabilities still reach 1.

Temperature comes first, then top-k, then top-p over what top-k left. At temperature 0 the likeliest
token is taken and log-probabilities are those of temperature 1 with no filter: greedy decoding has
no distribution of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gymrl.extras import optional_imports

with optional_imports():
    import torch

if TYPE_CHECKING:
    from gymrl.config import LogprobsMode, SamplingParams


_SMALL_TEMPERATURE = 1e-3


def process_logits(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probabilities of the sampling distribution.

    Args:
        logits: ``[B, V]``, any floating type; left as it is.
        samplings: One per row.

    Returns:
        float32 ``[B, V]``; ``-inf`` for tokens that a filter removed.
    """
    scaled = logits.float()
    temperatures = [s.temperature if s.temperature > 0 else 1.0 for s in samplings]
    if any(t != 1.0 for t in temperatures):
        if min(temperatures) < _SMALL_TEMPERATURE:
            # The quotient of the likeliest would be infinite; the distribution is the same.
            scaled = scaled - scaled.amax(dim=-1, keepdim=True)
        tensor = torch.tensor(temperatures, device=scaled.device).unsqueeze(-1)
        scaled = scaled / tensor.clamp(min=torch.finfo(tensor.dtype).tiny)
    filtered = [
        row
        for row, s in enumerate(samplings)
        if s.temperature > 0 and (s.top_p < 1.0 or _has_top_k(s, logits.shape[-1]))
    ]
    if filtered:
        rows = torch.tensor(filtered, device=scaled.device)
        kept = _filter(scaled[rows], [samplings[row] for row in filtered])
        scaled = scaled.clone().index_copy_(0, rows, kept)
    return torch.log_softmax(scaled, dim=-1)


def _has_top_k(sampling: SamplingParams, vocab_size: int) -> bool:
    return sampling.top_k is not None and sampling.top_k < vocab_size


def _filter(scaled: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """Set what top-k and top-p remove to ``-inf``. Ties keep the lower token id."""
    vocab_size = scaled.shape[-1]
    ordered, order = torch.sort(scaled, dim=-1, descending=True, stable=True)
    top_k = torch.tensor([[s.top_k or vocab_size] for s in samplings], device=scaled.device)
    top_p = torch.tensor([[s.top_p] for s in samplings], device=scaled.device)
    beyond_k = torch.arange(vocab_size, device=scaled.device).unsqueeze(0) >= top_k
    ordered = ordered.masked_fill(beyond_k, -torch.inf)
    mass = torch.softmax(ordered, dim=-1)
    # The mass before a token decides, so that the token which crosses top_p is still in.
    before = mass.cumsum(dim=-1) - mass
    beyond_p = (before >= top_p) & (top_p < 1.0)
    beyond_p[:, 0] = False  # also where float32 makes a zero of top_p
    ordered = ordered.masked_fill(beyond_p, -torch.inf)
    return torch.full_like(scaled, -torch.inf).scatter_(-1, order, ordered)


def draw(logprobs: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """One token a row by the inverse of the cumulative distribution, in order of token id.

    A row's token depends on its own log-probabilities and its own uniform alone, so it does not
    matter what else is in the batch.

    Args:
        logprobs: ``[B, V]``.
        uniforms: One number in ``[0, 1)`` per row.

    Returns:
        int64 ``[B]``.
    """
    cumulative = logprobs.exp().double().cumsum(dim=-1)
    points = torch.tensor(list(uniforms), dtype=torch.float64, device=logprobs.device).unsqueeze(-1)
    points = points * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
    return drawn.clamp_(max=logprobs.shape[-1] - 1)


def choose(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of every row, and the processed log-probabilities it came from.

    Args:
        logits: ``[B, V]``.
        samplings: One per row; temperature 0 takes the likeliest token.
        uniforms: One number in ``[0, 1)`` per row.

    Returns:
        int64 ``[B]`` and float32 ``[B, V]``.
    """
    logprobs = process_logits(logits, samplings)
    greedy = torch.tensor([s.temperature == 0 for s in samplings], device=logits.device)
    if bool(greedy.all()):
        return logprobs.argmax(dim=-1), logprobs
    tokens = draw(logprobs, uniforms)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs


def sampled_logprob(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    samplings: Sequence[SamplingParams],
    mode: LogprobsMode = "processed",
) -> torch.Tensor:
    """Log-probability of given tokens.

    Args:
        logits: ``[B, V]``.
        token_ids: int64 ``[B]``.
        samplings: One per row.
        mode: ``processed``: of the sampling distribution. ``raw``: of the model's own.

    Returns:
        float32 ``[B]``; ``-inf`` where a filter would have removed the token.
    """
    if mode == "raw":
        logprobs = torch.log_softmax(logits.float(), dim=-1)
    else:
        logprobs = process_logits(logits, samplings)
    return logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
