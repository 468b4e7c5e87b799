"""Router replay under NeMo RL's names: routes on the messages of logs, and what fell back.

For loops of one's own over message logs. Rollouts of gymrl's bring routes already laid out: see
:mod:`gymrl.routed_experts` and :func:`gymrl.tensors.to_batch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from gymrl.errors import RowValueError
from gymrl.routed_experts import MISSING

Message = MutableMapping[str, Any]

ROUTED_EXPERTS_DTYPES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
}
"""The types of routes by name: signed, so that they hold the sentinel -1."""

_SIGNED = {torch.uint8: torch.int16, torch.uint16: torch.int32, torch.uint32: torch.int64}


def attach_routed_experts_to_message_log_prefix(
    message_log: Sequence[Message], routed_experts: torch.Tensor
) -> int:
    """Give each tokenised message its slice of the routes of a call over all of them, in place.

    Args:
        message_log: Messages that the call was prompted with, in order; those without
            ``token_ids`` are passed over.
        routed_experts: ``[T, L, K]`` of the call, from its first prompt token on.

    Returns:
        The messages' tokens, which is where what the call sampled begins.

    Raises:
        RowValueError: The routes have another rank, or fewer rows than the messages have tokens.
            Nothing was attached.
    """
    tokenised = list(_tokenised(message_log))
    total = sum(len(message["token_ids"]) for message in tokenised)
    if routed_experts.ndim != 3 or len(routed_experts) < total:
        raise RowValueError(
            f"routed_experts of shape {list(routed_experts.shape)} for {total} prompt tokens: rank "
            "3 and one row a token are needed"
        )
    cursor = 0
    for message in tokenised:
        end = cursor + len(message["token_ids"])
        message["routed_experts"] = routed_experts[cursor:end]
        cursor = end
    return cursor


def find_routed_experts_template(message_log: Sequence[Message]) -> torch.Tensor | None:
    """The first routes of a log, whose layers, experts a token and type others can take."""
    found = (message.get("routed_experts") for message in message_log)
    return next((r for r in found if isinstance(r, torch.Tensor) and r.ndim == 3), None)


def dummy_routed_experts_for_tokens(
    token_ids: torch.Tensor, template: torch.Tensor
) -> torch.Tensor:
    """Routes for an observation, which no engine has computed yet: experts 0 to K - 1 everywhere.

    The next call over the log replaces them
    (:func:`attach_routed_experts_to_message_log_prefix`).

    Args:
        token_ids: Integers ``[T]``.
        template: ``[*, L, K]``, see :func:`find_routed_experts_template`.

    Returns:
        ``[T, L, K]``, of the template's type and on its device; a view that is not to be written
        to.
    """
    num_layers, top_k = template.shape[-2:]
    experts = torch.arange(top_k, dtype=template.dtype, device=template.device)
    return experts.expand(len(token_ids), num_layers, top_k)


def backfill_missing_routed_experts(message_logs: Sequence[Sequence[Message]]) -> list[int]:
    """Give every tokenised message of a batch routes, in place: -1 where it has none.

    A batch in which no message has routes is left alone. Routes of an unsigned type, which can't
    hold -1, become signed in the whole batch, as do narrower types beside wider ones.

    Args:
        message_logs: One log a sample; messages without ``token_ids`` are passed over.

    Returns:
        For each log how many of its messages had none.

    Raises:
        RowValueError: Routes have another number of rows than their message has tokens, or not
            all the same layers and experts a token; names the log and the message. Nothing was
            changed.
    """
    known = [
        (f"message {place} of log {number}", message)
        for number, log in enumerate(message_logs)
        for place, message in enumerate(log)
        if _has_tokens(message) and message.get("routed_experts") is not None
    ]
    if not known:
        return [0] * len(message_logs)
    for where, message in known:
        _check_shape(where, message, known[0])
    dtype = _common_type([message["routed_experts"].dtype for _, message in known])
    template = known[0][1]["routed_experts"]
    counts = []
    for log in message_logs:
        filled = 0
        for message in _tokenised(log):
            routes = message.get("routed_experts")
            if routes is None:
                shape = (len(message["token_ids"]), *template.shape[1:])
                routes = torch.full(shape, MISSING, dtype=dtype, device=template.device)
                filled += 1
            message["routed_experts"] = routes.to(dtype)
        counts.append(filled)
    return counts


def _check_shape(where: str, message: Message, first: tuple[str, Message]) -> None:
    routes, num_tokens = message["routed_experts"], len(message["token_ids"])
    if routes.ndim != 3:
        raise RowValueError(
            f"{where}: routed_experts has shape {list(routes.shape)}; rank 3 is needed"
        )
    if len(routes) != num_tokens:
        raise RowValueError(f"{where}: {len(routes)} rows of routes for {num_tokens} tokens")
    expected = first[1]["routed_experts"].shape[1:]
    if routes.shape[1:] != expected:
        raise RowValueError(
            f"{where}: routes of {list(routes.shape[1:])} (layers, experts a token) where "
            f"{first[0]} has {list(expected)}"
        )


def _common_type(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    signed = [_SIGNED.get(dtype, dtype) for dtype in dtypes]
    return max(signed, key=lambda dtype: dtype.itemsize)


def _tokenised(message_log: Sequence[Message]) -> Iterator[Message]:
    return (message for message in message_log if _has_tokens(message))


def _has_tokens(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("token_ids"), torch.Tensor)


def add_r3_fallback_metrics(
    gen_metrics: MutableMapping[str, Any], generation_outputs: Mapping[str, Any]
) -> None:
    """Add to a call's metrics how many of its tokens fell back to the trainer's own router.

    Nothing is added where the outputs say nothing of routes. The metrics are those of
    :func:`gymrl.scoring.metrics.route_stats`, here of single calls.

    Args:
        gen_metrics: Changed in place.
        generation_outputs: Of a policy, with ``r3_routed_experts_missing_routes``,
            ``r3_routed_experts_expected_routes`` and ``r3_routed_experts_actual_routes``, integers
            ``[B]`` each (see :class:`gymrl.generation.batch_spec.GenerationOutputSpec`).
    """
    missing = generation_outputs.get("r3_routed_experts_missing_routes")
    if missing is None:
        return
    per_sample = torch.as_tensor(missing)
    expected, actual = (
        _sum(generation_outputs.get(f"r3_routed_experts_{name}_routes"))
        for name in ("expected", "actual")
    )
    fallback = _sum(per_sample)
    gen_metrics["r3/routed_experts_fallback_samples"] = _sum(per_sample > 0)
    gen_metrics["r3/routed_experts_fallback_token_routes"] = fallback
    gen_metrics["r3/routed_experts_expected_token_routes"] = expected
    gen_metrics["r3/routed_experts_actual_token_routes"] = actual
    gen_metrics["r3/routed_experts_fallback_token_route_fraction"] = (
        fallback / expected if expected else 0.0
    )


def _sum(counts: Any) -> int:
    return 0 if counts is None else int(torch.as_tensor(counts).sum())
