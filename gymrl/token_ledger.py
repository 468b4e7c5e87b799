"""What a policy server served to one rollout, as one compact value, and how its calls hang together.

The server writes a :class:`LedgerFrame` and a rollout worker reads it; neither imports the other.
A call is a *sequence*, its prompt and what it sampled, stored as the length of what it shares with
an earlier sequence and the ids that are new. So a frame is linear in the rollout's tokens, however
often an agent sends the history again::

    call 0    [ prompt 0                ][ sampled 0 ]
    call 1    └──────────── common ─────────────────┘[ more prompt ][ sampled 1 ]     parent 0
    call 2    └── common ──┘[ more prompt ][ sampled 2 ]             parent 0: a side call

A call *extends* another when its prompt begins with that call's whole sequence, and shows the same
images there. Calls that extend
each other are a *chain*, and one chain is the main one: see :func:`read_chains`.

The wire form is one msgpack array: the version, the header, a call an array, buffers of
little-endian int32 and float32, and one of routes. There is nothing in it to execute.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from gymrl.errors import ProtocolError
from gymrl.routed_experts import ROUTES_DTYPES, missing_routes

if TYPE_CHECKING:
    from gymrl.types import Float32Array, Int32Array, RoutesArray

VERSION = 2
ROLLOUT_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}"
"""What a rollout id looks like (a regular expression)."""

ROLLOUT_HEADER = "x-gymrl-rollout-id"
"""Names the rollout of a call where its path doesn't."""


def rollout_base_url(base_url: str, rollout_id: str) -> str:
    """The base URL that an agent uses for one rollout, so that the server knows whose calls it gets.

    ``http://host:port/v1`` becomes ``http://host:port/ng-rollout/<rollout_id>/v1``.

    Args:
        base_url: Of a policy server, with ``/v1``.
        rollout_id: Of the attempt, as in the row's ``_ng_rollout_id``.
    """
    root = base_url.rstrip("/").removesuffix("/v1")
    return f"{root}/ng-rollout/{rollout_id}/v1"


class LedgerImage(msgspec.Struct, frozen=True, array_like=True):
    """An image that a call's prompt shows.

    Attributes:
        start: Of its region in the prompt.
        digest: SHA-256 of its file, hexadecimal.
    """

    start: int
    digest: str


class LedgerCall(msgspec.Struct, frozen=True, array_like=True):
    """One model call, without its ids.

    Attributes:
        number: In the order in which calls began, from 0; a call that failed leaves a gap.
        parent: Place in the frame of the call whose sequence it shares the most with; -1: none.
        common: How much it shares; the ids behind that are new.
        num_prompt: Ids of its prompt, shared ones included.
        num_sampled: Ids it sampled, shared ones included (two samples of one prompt may begin
            alike).
        finish_reason: As the generator gave it.
        stop_reason: The stop token or text that ended it, if one did.
        weight_versions: ``(version, start, end)`` over the sampled ids.
        is_unmatched: Its history has answers of an assistant, and none of them is one that the
            server gave in this rollout: the agent rewrote history, or brought examples.
        content: Its text, where it made no tool call.
        num_route_rows: Rows of routes that it has, the last of them for its last id; they begin one
            before its new ids, for the last id that another call sampled. 0: it has none.
        images: Whose regions begin among its new ids, in order.
        num_ended: Calls of the frame that had ended when it began.
    """

    number: int
    parent: int
    common: int
    num_prompt: int
    num_sampled: int
    finish_reason: str
    stop_reason: int | str | None = None
    weight_versions: tuple[tuple[str, int, int], ...] = ()
    is_unmatched: bool = False
    content: str = ""
    num_route_rows: int = 0
    images: tuple[LedgerImage, ...] = ()
    num_ended: int = 0


class LedgerFrame(msgspec.Struct, frozen=True, array_like=True):
    """All calls of one rollout.

    Attributes:
        version: Of the format.
        rollout_id: Whose calls these are.
        server_id: Of the server process; another one after a restart.
        in_flight: Calls that had begun and not ended when the frame was made.
        calls: In the order in which they ended; a parent stands before its children.
        ids: Little-endian int32: the new ids of each call.
        logprobs: Little-endian float32: of the sampled ids of each call.
        routes: Little-endian rows of routes (:mod:`gymrl.routed_experts`) of each call.
        routes_dtype: Of `routes`; "" where there are none.
        routes_shape: Layers, and experts a token.
        media: The files of the calls' images by SHA-256, where they were asked for.
    """

    version: int
    rollout_id: str
    server_id: str
    in_flight: int
    calls: tuple[LedgerCall, ...]
    ids: bytes
    logprobs: bytes
    routes: bytes = b""
    routes_dtype: str = ""
    routes_shape: tuple[int, int] = (0, 0)
    media: dict[str, bytes] = {}

    def encode(self) -> bytes:
        """The wire form."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, body: bytes) -> LedgerFrame:
        """Read the wire form.

        Raises:
            ProtocolError: It is none, of another version, or its parts don't fit together.
        """
        try:
            frame = _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"the body is no token ledger: {error}") from error
        if frame.version != VERSION:
            raise ProtocolError(
                f"the token ledger has version {frame.version}, and this gymrl reads {VERSION}; "
                "run the same gymrl on both sides"
            )
        _check(frame)
        return frame


_decoder = msgspec.msgpack.Decoder(LedgerFrame)


def _check(frame: LedgerFrame) -> None:
    lengths = [call.num_prompt + call.num_sampled for call in frame.calls]
    for place, call in enumerate(frame.calls):
        limit = lengths[call.parent] if 0 <= call.parent < place else 0
        is_rooted = call.parent == -1 or 0 <= call.parent < place
        fits = 0 <= call.common <= min(limit, lengths[place])
        if not is_rooted or not fits or min(call.num_prompt, call.num_sampled) < 0:
            raise ProtocolError(
                f"call {place} of the token ledger of {frame.rollout_id} shares {call.common} "
                f"tokens with call {call.parent}, which there are not"
            )
    num_ids = sum(lengths) - sum(call.common for call in frame.calls)
    num_sampled = sum(call.num_sampled for call in frame.calls)
    if len(frame.ids) != 4 * num_ids or len(frame.logprobs) != 4 * num_sampled:
        raise ProtocolError(
            f"the token ledger of {frame.rollout_id} holds {len(frame.ids)} bytes of ids and "
            f"{len(frame.logprobs)} of log-probabilities for {num_ids} and {num_sampled} of them"
        )
    _check_routes(frame, lengths)
    for place, call in enumerate(frame.calls):
        bounds = [call.common - 1, *(image.start for image in call.images), call.num_prompt]
        if call.images and any(a >= b for a, b in itertools.pairwise(bounds)):
            raise ProtocolError(
                f"call {place} of the token ledger of {frame.rollout_id} has images outside of the "
                "new tokens of its prompt"
            )


def _check_routes(frame: LedgerFrame, lengths: Sequence[int]) -> None:
    rows = [call.num_route_rows for call in frame.calls]
    fits = all(
        not n or length - call.common <= n <= length
        for n, length, call in zip(rows, lengths, frame.calls, strict=True)
    )
    dtype = ROUTES_DTYPES.get(frame.routes_dtype)
    num_layers, top_k = frame.routes_shape
    itemsize = 0 if dtype is None else dtype.itemsize
    if not fits or (any(rows) and min(num_layers, top_k, itemsize) < 1):
        raise ProtocolError(
            f"the token ledger of {frame.rollout_id} has rows of routes that fit none of its calls"
        )
    if len(frame.routes) != sum(rows) * num_layers * top_k * itemsize:
        raise ProtocolError(
            f"the token ledger of {frame.rollout_id} holds {len(frame.routes)} bytes of routes for "
            f"{sum(rows)} rows of {num_layers}x{top_k} {frame.routes_dtype}"
        )


class LedgerReader:
    """Sequences of a frame's calls, by place.

    Args:
        frame: As :meth:`LedgerFrame.decode` gives it.

    Attributes:
        frame: As given.
        lengths: Tokens of each call's sequence.
    """

    def __init__(self, frame: LedgerFrame) -> None:
        self.frame = frame
        self.lengths = [call.num_prompt + call.num_sampled for call in frame.calls]
        self._ids = np.frombuffer(frame.ids, dtype="<i4").astype(np.int32, copy=False)
        self._logprobs = np.frombuffer(frame.logprobs, dtype="<f4").astype(np.float32, copy=False)
        self._routes = _rows_of_routes(frame)
        self._starts: list[int] = []
        self._logprob_starts: list[int] = []
        # By the call that owns the place where they end: a call without new ids ends in another's.
        self._ending: dict[int, list[int]] = {}
        start = logprob_start = 0
        for place, (call, length) in enumerate(zip(frame.calls, self.lengths, strict=True)):
            self._starts.append(start)
            self._logprob_starts.append(logprob_start)
            start += length - call.common
            logprob_start += call.num_sampled
            owner = place if length > call.common else call.parent
            self._ending.setdefault(owner, []).append(place)

    def token_ids(self, place: int) -> Int32Array:
        """int32 ``[T]``: a call's sequence."""
        pieces: list[Int32Array] = []
        for owner, end in self._spans(place):
            start = self._starts[owner]
            pieces.append(self._ids[start : start + end - self.frame.calls[owner].common])
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)

    def logprobs(self, place: int) -> Float32Array:
        """float32 ``[num_sampled]``: of a call's sample."""
        start = self._logprob_starts[place]
        return self._logprobs[start : start + self.frame.calls[place].num_sampled]

    def routes(self, place: int) -> RoutesArray | None:
        """``[T, L, K]``: of a call's sequence; None where none of its calls has any.

        Laid together as :class:`~gymrl.routed_experts.sequence.RouteSequence` does: the tokens of a call
        without routes have none, and the last token of a call has those of the call after it.
        """
        spans = self._spans(place)
        if not any(self.frame.calls[owner].num_route_rows for owner, _ in spans):
            return None
        num_layers, top_k = self.frame.routes_shape
        routes = missing_routes(self.lengths[place], num_layers, top_k, self.frame.routes_dtype)
        before = -1
        for owner, end in spans:
            call = self.frame.calls[owner]
            if call.num_route_rows:
                start = call.common
                # Padding is where a call ended that has routes.
                if before >= 0 and self._has_routes(before) and self.lengths[before] == start:
                    start -= 1
                rows, first = self._routes[owner], self.lengths[owner] - call.num_route_rows
                routes[start:end] = rows[start - first : end - first]
            before = owner
        return routes

    def images(self, place: int) -> list[LedgerImage]:
        """The images of a call's prompt, in order."""
        return [
            image
            for owner, end in self._spans(place)
            for image in self.frame.calls[owner].images
            if image.start < end
        ]

    def _spans(self, place: int) -> list[tuple[int, int]]:
        """Whose new ids a call's sequence is made of, in order, and where what it has of them ends."""
        spans: list[tuple[int, int]] = []
        end = self.lengths[place]
        while place >= 0 and end > 0:
            common = self.frame.calls[place].common
            if end > common:
                spans.append((place, end))
                end = common
            place = self.frame.calls[place].parent
        return spans[::-1]

    def prompt_end(self, place: int) -> tuple[int, int]:
        """Where a call's prompt ends among all ids: the same of two calls is the same prompt."""
        owner, position = place, self.frame.calls[place].num_prompt
        while owner >= 0 and self.frame.calls[owner].common >= position:
            owner = self.frame.calls[owner].parent
        return owner, position

    def _has_routes(self, place: int) -> bool:
        return self.frame.calls[place].num_route_rows > 0

    def extended(self, place: int) -> int:
        """The call that a call extends; -1: none.

        It is the longest sequence that ended before and that the prompt begins with; of equal ones
        the latest.
        """
        call = self.frame.calls[place]
        owner, position = place, call.num_prompt
        while owner >= 0:
            found = [
                ending
                for ending in self._ending.get(owner, ())
                if ending < place and self.lengths[ending] <= position
            ]
            if found:
                return max(found, key=lambda ending: (self.lengths[ending], ending))
            position = min(position, self.frame.calls[owner].common)
            owner = self.frame.calls[owner].parent
        return -1


def _rows_of_routes(frame: LedgerFrame) -> list[RoutesArray]:
    """The rows of each call."""
    if not frame.routes:
        return []
    dtype = ROUTES_DTYPES[frame.routes_dtype]
    flat = np.frombuffer(frame.routes, dtype=dtype.newbyteorder("<"))
    rows = flat.astype(dtype, copy=False).reshape(-1, *frame.routes_shape)
    ends = np.cumsum([call.num_route_rows for call in frame.calls])
    return [
        rows[int(end) - call.num_route_rows : int(end)]
        for call, end in zip(frame.calls, ends, strict=True)
    ]


class Chain(msgspec.Struct, frozen=True):
    """Calls that extend each other.

    Attributes:
        places: Of the calls in the frame, in order; none without a sampled token.
        num_shared: How many of the first belong to a chain before this one too.
    """

    places: tuple[int, ...]
    num_shared: int = 0


def read_chains(reader: LedgerReader, known: Int32Array | None = None) -> list[Chain]:
    """Every chain of a frame; the first is the main conversation.

    A chain ends in a call that no other extends, and holds every call on the way there. Calls that
    sampled nothing are left out. The main chain is the one with the most calls; of several such the
    one whose last call's prompt was asked first, and of those whose last calls have one prompt the
    answer that was not asked for again. The others follow by the same order, each with the number of
    its first calls that an earlier chain has, so that every sampled token has one owner.

    Args:
        reader: Of the frame.
        known: Where the main conversation is known from elsewhere, its tokens: a chain that ends
            with just these comes first.
    """
    calls = reader.frame.calls
    extended = [reader.extended(place) for place in range(len(calls))]
    ends = set(range(len(calls))) - set(extended)
    paths: set[tuple[int, ...]] = set()
    for end in ends:
        path: list[int] = []
        place = end
        while place >= 0:
            if calls[place].num_sampled:
                path.append(place)
            place = extended[place]
        if path:
            paths.add(tuple(path[::-1]))
    # An end that sampled nothing may leave the beginning of another path.
    whole = _without_beginnings(paths)

    # By length and prompt of the last call: which call asked first, and what had ended when one asked last.
    asked: dict[tuple[int, ...], tuple[int, int]] = {}
    for path_ in whole:
        last, key = calls[path_[-1]], (len(path_), *reader.prompt_end(path_[-1]))
        number, num_ended = asked.get(key, (last.number, last.num_ended))
        asked[key] = min(number, last.number), max(num_ended, last.num_ended)

    def rank(path: tuple[int, ...]) -> tuple[bool, int, int, bool, int]:
        end = path[-1]
        is_known = known is not None and np.array_equal(reader.token_ids(end), known)
        first, num_ended = asked[(len(path), *reader.prompt_end(end))]
        # A client whose connection broke asks again, and so does an agent that throws an answer away.
        is_replaced = num_ended > end
        return not is_known, -len(path), first, is_replaced, calls[end].number

    ordered = sorted(whole, key=rank)
    owned: set[int] = set()
    chains = []
    for path_ in ordered:
        num_shared = sum(place in owned for place in path_)
        owned.update(path_)
        chains.append(Chain(path_, num_shared))
    return chains


def _without_beginnings(paths: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    inner = {place for path in paths for place in path[:-1]}
    return [path for path in paths if path[-1] not in inner]


def joined_ids(pieces: Sequence[Int32Array]) -> bytes:
    """Ids as the frame holds them."""
    return b"".join(piece.astype("<i4", copy=False).tobytes() for piece in pieces)


def joined_logprobs(pieces: Sequence[Float32Array]) -> bytes:
    """Log-probabilities as the frame holds them."""
    return b"".join(piece.astype("<f4", copy=False).tobytes() for piece in pieces)


def joined_routes(pieces: Sequence[RoutesArray]) -> bytes:
    """Rows of routes as the frame holds them."""
    return b"".join(
        piece.astype(piece.dtype.newbyteorder("<"), copy=False).tobytes() for piece in pieces
    )
