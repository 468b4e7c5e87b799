"""Sampling parameters and finish reasons as vLLM has them, for engines and servers alike."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import BadLogprobsError, GenerationError, GenerationRequestError
from gymrl.generation.base import FinishReason, Generated, WeightSpan
from gymrl.routed_experts import RouteCountError, RouteFormatError, padded_routes, routes_of_npy
from gymrl.telemetry import RateLimitedLog

if TYPE_CHECKING:
    import numpy.typing as npt

    from gymrl.config import RoutesDtype, SamplingParams

_log = RateLimitedLog(logging.getLogger(__name__))

MIN_TEMPERATURE = 0.01
"""vLLM raises a lower one to this, and only logs it."""

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def check_temperature(sampling: SamplingParams) -> None:
    """Refuse a temperature that vLLM would change without saying so.

    Raises:
        GenerationRequestError: It is above 0 and below what vLLM samples at.
    """
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise GenerationRequestError(
            f"temperature={sampling.temperature:g}: vLLM samples at {MIN_TEMPERATURE:g} or more; "
            "use that, or 0 for greedy",
            param="temperature",
        )


def stop_token_ids(sampling: SamplingParams, end_ids: frozenset[int]) -> list[int]:
    """Tokens that end the call: its own, and the model's end-of-turn tokens."""
    own = frozenset(sampling.stop_token_ids)
    return sorted(own if sampling.ignore_eos else own | end_ids)


def generated(
    token_ids: list[int],
    logprobs: list[float],
    *,
    finish_reason: str | None,
    stop_reason: int | str | None,
    sampling: SamplingParams,
    weight_versions: list[WeightSpan],
) -> Generated:
    """What one call sampled, checked.

    Raises:
        BadLogprobsError: One is missing or no finite number.
        GenerationError: vLLM ended the call with a reason that is none of ours, or without a
            token.
    """
    if len(logprobs) != len(token_ids):
        raise BadLogprobsError(
            f"vLLM gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens"
        )
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise BadLogprobsError(
                f"vLLM gave a log-probability of {logprob} at sampled token {position}; check the "
                "weights, or use dtype float32",
                position=position,
            )
    reason = _FINISH_REASONS.get(finish_reason or "")
    if reason is None:
        raise GenerationError(f"vLLM ended the call with {finish_reason!r}")
    if not token_ids and reason != "abort":
        raise GenerationError(f"vLLM ended the call with {finish_reason!r} and without a token")
    # An end-of-turn token of the model, which we pass as a stop token, is no reason to name.
    is_own = isinstance(stop_reason, str) or stop_reason in sampling.stop_token_ids
    return Generated(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=stop_reason if is_own else None,
        weight_versions=weight_versions,
    )


def with_routes(
    answer: Generated,
    given: str | npt.NDArray[Any] | None,
    dtype: RoutesDtype | None,
    num_prompt: int,
) -> Generated:
    """An answer with the routes that vLLM gave, one row for each token of the call.

    Args:
        answer: What was sampled.
        given: An array, or base64 of a ``.npy`` file, without a row for the last token; None: it
            gave none.
        dtype: Of the routes; None: they are not wanted.
        num_prompt: Tokens of the prompt.

    Returns:
        The answer as it was where vLLM gave none, or too few to tell which token each is of (that
        is logged): the turn is then one without routes.

    Raises:
        GenerationError: They are malformed.
    """
    if given is None or dtype is None or not answer.token_ids:
        return answer
    try:
        routes = padded_routes(routes_of_npy(given, dtype), num_prompt, len(answer.token_ids))
    except RouteCountError as error:
        _log.log("routes", logging.WARNING, "vLLM gave %s; they are left out", error)
        return answer
    except RouteFormatError as error:
        raise GenerationError(f"vLLM gave routes that can't be read: {error}") from error
    return msgspec.structs.replace(answer, routed_experts=routes)
