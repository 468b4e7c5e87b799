"""How tokens are sampled."""

from __future__ import annotations

import math

from gymrl.settings import Config, require


class SamplingParams(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are sampled.

    Attributes:
        temperature: 0 is greedy; log-probabilities are then those of temperature 1.
        top_p: Nucleus: the smallest set of tokens whose mass reaches it. 1 is off.
        top_k: Only the k likeliest tokens. None is off.
        max_tokens: At most this many sampled tokens a call; None fills the context.
        stop: Texts that end the generation.
        stop_token_ids: Tokens that end it, beside the model's own end of turn.
        seed: Makes the call repeatable whatever else is in the batch, up to the last bits of
            a logit.
        ignore_eos: Sample on to `max_tokens` (for benchmarks).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "must be a finite number, 0 or more",
        )
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")
        require(self.top_k is None or self.top_k > 0, "top_k", self.top_k, "must be positive")
        require(
            self.max_tokens is None or self.max_tokens > 0,
            "max_tokens",
            self.max_tokens,
            "must be positive, or left out",
        )
        require(all(self.stop), "stop", self.stop, "an empty text would end every call at once")
