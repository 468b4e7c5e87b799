"""Which experts of a mixture-of-experts model each token went through, for router replay.

*Routes* are an array ``[T, L, K]``: for each token, in each of L mixture-of-experts layers, the ids
of the K experts that the router chose. A trainer that replays them computes the policy through the
very experts that the tokens were sampled with. :data:`MISSING` stands for "not known": the trainer's
own router decides there.

Here is what both sides of the wire share: the types (:func:`routes_dtype`), the text form
(:func:`encode_routes`, :func:`decode_routes`) and the alignment of calls to the tokens of a
trajectory (:class:`RouteSequence`). See ``docs/guides/router-replay.md``.
"""

from gymrl.routed_experts.envelope import (
    MAGIC,
    decode_last_routes,
    decode_routes,
    encode_routes,
    routes_of_npy,
)
from gymrl.routed_experts.experts import (
    MISSING,
    ROUTES_DTYPES,
    RouteFormatError,
    count_experts,
    fit_routes,
    missing_routes,
    routes_dtype,
    signed_routes,
)
from gymrl.routed_experts.sequence import (
    TURNS_WITHOUT_ROUTES,
    RouteCountError,
    RouteSequence,
    num_expected_routes,
    padded_routes,
    routes_or_missing,
    unknown_routes,
)

__all__ = [
    "MAGIC",
    "MISSING",
    "ROUTES_DTYPES",
    "TURNS_WITHOUT_ROUTES",
    "RouteCountError",
    "RouteFormatError",
    "RouteSequence",
    "count_experts",
    "decode_last_routes",
    "decode_routes",
    "encode_routes",
    "fit_routes",
    "missing_routes",
    "num_expected_routes",
    "padded_routes",
    "routes_dtype",
    "routes_of_npy",
    "routes_or_missing",
    "signed_routes",
    "unknown_routes",
]
