"""The arithmetic of group-relative policy optimisation, on plain tensors.

Axes: B samples, T tokens. GRPO is Shao et al. 2024 (arXiv:2402.03300); the leave-one-out baseline is
RLOO, Ahmadian et al. 2024 (arXiv:2402.14740); the decoupled objective, with its own correction for
stale tokens, is Hilton et al. 2022 (arXiv:2110.00641), as asynchronous trainers use it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from gymrl.config import Config

Advantage = Literal["standardised", "leave_one_out"]

_EPSILON = 1e-4


def group_advantages(
    rewards: torch.Tensor, valid: torch.Tensor, group_index: torch.Tensor, kind: Advantage
) -> torch.Tensor:
    """How much better each sample is than its group's others.

    ``standardised``: distance from the group's mean in standard deviations (n - 1).
    ``leave_one_out``: distance from the mean of the others.

    Args:
        rewards: float ``[B]``.
        valid: bool ``[B]``; samples without a reward are in no mean and get 0.
        group_index: int64 ``[B]``.
        kind: One of the two above.

    Returns:
        float32 ``[B]``; 0 in groups where all rewards are the same, or only one is there.
    """
    advantages = torch.zeros_like(rewards, dtype=torch.float32)
    for number in torch.unique(group_index):
        members = (group_index == number) & valid
        count = int(members.sum())
        if count < 2:
            continue
        values = rewards[members].float()
        centred = values - values.mean()
        if kind == "leave_one_out":
            advantages[members] = centred * count / (count - 1)
        elif float(values.max() - values.min()) > 0:
            advantages[members] = centred / (values.std() + _EPSILON)
    return advantages


class LossSettings(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far one step may go.

    Attributes:
        clip_low: How far the ratio of probabilities may fall.
        clip_high: How far it may rise.
        max_importance_weight: Largest correction of a token that other weights sampled.
        corrected: Which tokens are weighted by how much likelier the weights of the step make them
            than the generator did: those that older weights sampled (``stale``), or ``all``, which
            also evens out a generator that computes otherwise than the trainer.
        max_token_age: Tokens that were sampled more weight updates ago train nothing; None: all do.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    max_importance_weight: float = 2.0
    corrected: Literal["stale", "all"] = "stale"
    max_token_age: int | None = None


class OtherLogprobs(NamedTuple):
    """Log-probabilities of the same tokens by other weights, float ``[B, T]`` but for `is_stale`.

    Attributes:
        proximal: Of the weights at the start of this step.
        sampled: Of the generator, when it sampled.
        is_stale: bool ``[B, T]``: tokens that weights older than those of the step sampled.
        reference: Of the policy to stay near, if there is one.
    """

    proximal: torch.Tensor
    sampled: torch.Tensor
    is_stale: torch.Tensor
    reference: torch.Tensor | None = None


class LossTerms(NamedTuple):
    """Sums over the tokens that count, each a scalar."""

    policy: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor
    weight: torch.Tensor


def token_loss(
    logprobs: torch.Tensor,
    others: OtherLogprobs,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    settings: LossSettings,
) -> LossTerms:
    r"""Clipped loss, summed over tokens; divide by the number of tokens of all ranks.

    With :math:`r = \pi / \pi_{prox}` and :math:`w = \min(\pi_{prox} / \pi_{gen}, w_{max})`:
    :math:`-w \min(r A, clip(r, 1 - \epsilon_l, 1 + \epsilon_h) A)`; w is 1 for tokens that
    `settings.corrected` leaves alone. The divergence from the
    reference is estimated as :math:`e^d - d - 1` with :math:`d = \log \pi_{ref} - \log \pi`
    (Schulman's k3).

    Args:
        logprobs: float ``[B, T]``: of the weights that are trained.
        others: Of other weights.
        advantages: float ``[B]``.
        mask: bool ``[B, T]``: the tokens that count.
        settings: Bounds.
    """
    zero = torch.zeros_like(logprobs)
    advantage = advantages[:, None]
    # Outside the mask the numbers are padding's; they must not become inf * 0.
    ratio = torch.where(mask, logprobs - others.proximal, zero).exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    is_corrected = mask & others.is_stale if settings.corrected == "stale" else mask
    weight = torch.where(is_corrected, others.proximal - others.sampled, zero).exp()
    weight = weight.clamp(max=settings.max_importance_weight).detach()
    objective = weight * torch.minimum(ratio * advantage, bounded * advantage)
    kl = zero
    if others.reference is not None:
        d = torch.where(mask, others.reference - logprobs, zero)
        kl = d.exp() - d - 1
    is_clipped = (bounded * advantage) < (ratio * advantage)
    return LossTerms(
        policy=-(objective * mask).sum(),
        kl=(kl * mask).sum(),
        clipped=(is_clipped & mask).sum(),
        weight=(weight * mask).sum(),
    )
