"""One call in the decoding thread: its prompt, what was sampled so far, and who awaits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from gymrl.errors import BadLogprobsError
from gymrl.generation.base import FinishReason, Generated, WeightSpan
from gymrl.routed_experts import padded_routes

if TYPE_CHECKING:
    import torch

    from gymrl.config import SamplingParams
    from gymrl.types import RoutesArray

Detokenize = Callable[[Sequence[int]], str]


class Request:
    """One call: its prompt, what was sampled so far, and the future that its caller awaits.

    Args:
        prompt_ids: Checked against the vocabulary.
        sampling: Of this call.
        budget: Tokens it may sample, at least 1.
        end_ids: End-of-turn tokens of the model; `sampling.ignore_eos` turns them off.
        detokenize: Needed for stop texts only.
        deliver: Called in the decoding thread with each token and its log-probability.
        images: Model inputs of the images that the prompt holds.
    """

    def __init__(  # noqa: PLR0913 - keyword-only settings of one object
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        budget: int,
        end_ids: frozenset[int],
        detokenize: Detokenize | None = None,
        deliver: Callable[[int, float], None] | None = None,
        images: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.images = images
        # Positions of multimodal models run on behind an image by less than its tokens.
        self.position_offset = 0
        self.prompt_ids = tuple(prompt_ids)
        self.sampling = sampling
        self.future: Future[Generated] = Future()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self._versions: list[tuple[str, int]] = []
        self._routes: list[RoutesArray] = []
        self._budget = budget
        self._end_ids = frozenset() if sampling.ignore_eos else end_ids
        self._detokenize = detokenize
        self._deliver = deliver
        # A stop text of n bytes ends in the newest token and spans at most n tokens; the rest of
        # the window keeps tokenizers that strip a leading space from eating into it.
        self._stop_window = max((len(text.encode()) for text in sampling.stop), default=0) + 4
        seed = None if sampling.seed is None else sampling.seed % (1 << 64)
        self._uniforms = np.random.Generator(np.random.PCG64(seed))

    def uniform(self) -> float:
        """The next random number of this request, whatever else is in the batch."""
        return float(self._uniforms.random())

    def sampled_from(self, version: str) -> None:
        """Say which weights the next tokens come from."""
        self._versions.append((version, len(self.token_ids)))

    def computed_with(self, routes: RoutesArray) -> None:
        """Say which experts the next tokens of prompt and sample were computed with.

        Args:
            routes: ``[T, L, K]``.
        """
        self._routes.append(routes)

    def append(self, token_id: int, logprob: float) -> Generated | None:
        """Take one sampled token; the result when it was the last.

        Raises:
            BadLogprobsError: The log-probability is not a finite number.
        """
        if not math.isfinite(logprob):
            raise BadLogprobsError(
                f"the model's logits gave a log-probability of {logprob} at sampled token "
                f"{len(self.token_ids)} after a prompt of {len(self.prompt_ids)} tokens; check "
                "the weights, or use dtype float32",
                position=len(self.token_ids),
            )
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self._deliver is not None:
            self._deliver(token_id, logprob)
        if token_id in self._end_ids:
            return self.finished("stop")
        if token_id in self.sampling.stop_token_ids:
            return self.finished("stop", token_id)
        stop_text = self._matched_stop()
        if stop_text is not None:
            return self.finished("stop", stop_text)
        if len(self.token_ids) >= self._budget:
            return self.finished("length")
        return None

    def _matched_stop(self) -> str | None:
        if not self.sampling.stop or self._detokenize is None:
            return None
        tail = self._detokenize(self.token_ids[-self._stop_window :])
        return next((text for text in self.sampling.stop if text in tail), None)

    def finished(self, reason: FinishReason, stop_reason: int | str | None = None) -> Generated:
        """What the caller gets."""
        return Generated(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            weight_versions=self._spans(),
            routed_experts=self._all_routes(),
        )

    def _all_routes(self) -> RoutesArray | None:
        if not self._routes:
            return None
        routes = np.concatenate(self._routes)
        return padded_routes(routes, len(self.prompt_ids), len(self.token_ids))

    def _spans(self) -> list[WeightSpan]:
        starts = [*(start for _, start in self._versions), len(self.token_ids)]
        return [
            WeightSpan(version, start, end)
            for (version, start), end in zip(self._versions, starts[1:], strict=True)
            if end > start
        ]


def settle(future: Future[Any], outcome: Any) -> None:
    """Give the caller its outcome, unless it stopped waiting."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
