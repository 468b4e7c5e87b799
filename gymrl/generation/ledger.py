"""What this server served, by rollout: the other source of training tokens.

An agent that carries token fields from call to call needs none of this. Many don't: they speak plain
chat completions, or drop fields they don't know. So for every call that names its rollout the server
keeps the prompt's ids and what was sampled, each id once, until the rollout's worker takes them.

It keeps a rollout's calls as a tree of tokens: a call branches off where its prompt and sample first
differ from those of every earlier one. Finding that place compares its ids with the tree's, once.
Equal ids don't make equal prompts where images are: all images of one size are the same tokens. So
in the tree the first token of an image stands for its file.

It also remembers which messages each answer was given to, so that the next call of an agent that
carries nothing still continues from the sampled tokens: see :mod:`gymrl.generation.ledger_match`.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from gymrl.errors import GymrlError
from gymrl.generation.ledger_calls import (
    MediaShelf,
    StoredCall,
    num_equal,
    shown_images,
    tree_keys,
)
from gymrl.generation.prefix import TruePrefix
from gymrl.token_ledger import (
    VERSION,
    LedgerCall,
    LedgerFrame,
    joined_ids,
    joined_logprobs,
    joined_routes,
)

if TYPE_CHECKING:
    from gymrl.generation.base import Generated
    from gymrl.generation.images import PromptImages
    from gymrl.types import Int32Array

ENTRY_BYTES = 1024
"""What a rollout costs beside its calls, about."""

MAX_REMEMBERED = 1 << 16
"""Evicted rollouts whose fate is still told; of older ones nothing is known."""


class LedgerNotFoundError(GymrlError):
    """There is no ledger under this id: no call named it, or it was taken already."""

    rollout_id: str | None = None


class LedgerEvictedError(GymrlError):
    """The ledger was evicted; `reason` names the setting that it ran into."""

    rollout_id: str | None = None
    reason: str | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a call's sample was made into.

    Attributes:
        keys: Of the conversation with this answer at its end.
        content: See :class:`~gymrl.token_ledger.LedgerCall`.
        is_unmatched: As well.
    """

    keys: tuple[bytes, ...] = ()
    content: str = ""
    is_unmatched: bool = False


class RolloutLedger:
    """The calls of one rollout. Belongs to the event loop's thread.

    Args:
        rollout_id: Whose they are.
        shelf: Holds the files of images; None: one of its own.

    Attributes:
        nbytes: What it takes, files of images left out.
    """

    def __init__(self, rollout_id: str, shelf: MediaShelf | None = None) -> None:
        self.rollout_id = rollout_id
        self.in_flight = 0
        self.nbytes = ENTRY_BYTES
        self.on_growth: Callable[[RolloutLedger, int], None] | None = None
        # By number of the call: how many had ended when it began.
        self._num_ended: list[int] = []
        self._calls: list[StoredCall] = []
        # Where a call leaves the tokens of another: (that call, position, first new id) -> the call.
        self._branches: dict[tuple[int, int, int], int] = {}
        self._answers: dict[bytes, int] = {}
        self._shelf = MediaShelf(is_wanted=True) if shelf is None else shelf
        self._held: set[str] = set()

    def begin(self) -> int:
        """Number a call that starts to sample; each needs an :meth:`end`."""
        self.in_flight += 1
        self._num_ended.append(len(self._calls))
        return len(self._num_ended) - 1

    def end(self) -> None:
        """A call that began has ended, recorded or not."""
        self.in_flight -= 1

    def record(
        self,
        number: int,
        prompt_ids: Sequence[int],
        generated: Generated,
        answer: Answer | None = None,
        images: PromptImages | None = None,
    ) -> None:
        """Keep a call that ended well.

        Args:
            number: As :meth:`begin` gave it.
            prompt_ids: What it was prompted with.
            generated: What it sampled.
            answer: What was made of it; None: nothing that could come back as a message.
            images: What the prompt shows.
        """
        answer = answer or Answer()
        sequence = np.array([*prompt_ids, *generated.token_ids], dtype=np.int32)
        shown = () if images is None else shown_images(images)
        keys = tree_keys(sequence, shown)
        parent, common = self._walk(keys)
        routes = generated.routed_experts
        if routes is not None:
            # One row before the new ids: of the last id that another call sampled.
            routes = routes[max(common - 1, 0) : len(sequence)].copy()
        call = LedgerCall(
            number=number,
            parent=parent,
            common=common,
            num_prompt=len(prompt_ids),
            num_sampled=len(generated.token_ids),
            finish_reason=generated.finish_reason,
            stop_reason=generated.stop_reason,
            weight_versions=tuple((v.version, v.start, v.end) for v in generated.weight_versions),
            is_unmatched=answer.is_unmatched,
            content=answer.content,
            num_route_rows=0 if routes is None else len(routes),
            images=tuple(image for image in shown if image.start >= common),
            num_ended=self._num_ended[number],
        )
        logprobs = np.array(generated.logprobs, dtype=np.float32)
        new_ids = sequence[common:].copy()
        new_keys = new_ids if keys is sequence else keys[common:].copy()
        stored = StoredCall(call, new_ids, new_keys, logprobs, routes)
        place = len(self._calls)
        self._calls.append(stored)
        if common < len(sequence):
            self._branches[(parent, common, int(keys[common]))] = place
        for key in answer.keys:
            self._answers[key] = place
        if images is not None:
            self._shelf.hold(images.images, self._held)
        self.nbytes += stored.nbytes
        if self.on_growth is not None:
            self.on_growth(self, stored.nbytes)

    def close(self) -> None:
        """Nobody will ask for it again: let go of its images, and tell nobody of its growth."""
        self._shelf.release(self._held)
        self._shelf, self._held = MediaShelf(), set()
        self.on_growth = None

    def _walk(self, keys: npt.NDArray[np.integer[Any]]) -> tuple[int, int]:
        """The call whose sequence shares the most with that of `keys`, and how much."""
        place, position = -1, 0
        while position < len(keys):
            following = self._branches.get((place, position, int(keys[position])))
            if following is None:
                break
            place = following
            position += num_equal(self._calls[place].new_keys, keys[position:])
        return place, position

    def _sequence(self, place: int) -> Int32Array:
        pieces: list[Int32Array] = []
        end = self._calls[place].length
        while place >= 0 and end > 0:
            stored = self._calls[place]
            if end > stored.call.common:
                pieces.append(stored.new_ids[: end - stored.call.common])
                end = stored.call.common
            place = stored.call.parent
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, dtype=np.int32)

    def knows(self, key: bytes) -> bool:
        """Whether an answer of this key was given."""
        return key in self._answers

    def answered(self, key: bytes) -> TruePrefix:
        """The tokens of the call that gave the answer of this key; of several the latest.

        Raises:
            KeyError: There is none.
        """
        place = self._answers[key]
        ids: list[int] = self._sequence(place).tolist()
        num_prompt = self._calls[place].call.num_prompt
        return TruePrefix(ids[:num_prompt], ids[num_prompt:])

    def served(self, prefix: TruePrefix) -> bool:
        """Whether a call of this rollout had this prompt and gave this sample."""
        shape = (len(prefix.prompt_token_ids), len(prefix.generation_token_ids))
        ids = np.array([*prefix.prompt_token_ids, *prefix.generation_token_ids], dtype=np.int32)
        return any(
            (stored.call.num_prompt, stored.call.num_sampled) == shape
            and np.array_equal(self._sequence(place), ids)
            for place, stored in enumerate(self._calls)
        )

    def frame(self, server_id: str, *, with_media: bool = False) -> LedgerFrame:
        """Everything, as it travels; the files of images only `with_media`."""
        routes = [stored.routes for stored in self._calls if stored.routes is not None]
        return LedgerFrame(
            version=VERSION,
            rollout_id=self.rollout_id,
            server_id=server_id,
            in_flight=self.in_flight,
            calls=tuple(stored.call for stored in self._calls),
            ids=joined_ids([stored.new_ids for stored in self._calls]),
            logprobs=joined_logprobs([stored.logprobs for stored in self._calls]),
            routes=joined_routes(routes),
            routes_dtype=routes[0].dtype.name if routes else "",
            routes_shape=routes[0].shape[1:] if routes else (0, 0),
            media=self._shelf.files(self._held) if with_media else {},
        )


class LedgerBook:
    """The ledgers of all rollouts of one server, bounded in bytes and in age.

    A rollout whose ledger was evicted stays evicted: its later calls are served and not recorded,
    and who asks for it is told why it is gone.

    Args:
        max_bytes: Of all of them together; 0 keeps nothing.
        max_age_s: Since a rollout's last call.
        clock: Seconds that never go back.

    Attributes:
        shelf: The files of the rollouts' images.
    """

    def __init__(
        self,
        max_bytes: int = 256 << 20,
        max_age_s: float = 7200.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server_id = uuid.uuid4().hex
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        self._clock = clock
        self._ledgers: OrderedDict[str, tuple[float, RolloutLedger]] = OrderedDict()
        self._evicted: OrderedDict[str, str] = OrderedDict()
        self.shelf = MediaShelf()
        self._num_bytes = 0
        self.num_evicted = 0

    @property
    def nbytes(self) -> int:
        """Of all ledgers, and of the files of their images."""
        return self._num_bytes + self.shelf.nbytes

    def __len__(self) -> int:
        return len(self._ledgers)

    def open(self, rollout_id: str) -> RolloutLedger | None:
        """The ledger of a rollout, made if it has none; None once it was evicted."""
        self._sweep()
        if rollout_id in self._evicted:
            return None
        if rollout_id in self._ledgers:
            _, ledger = self._ledgers[rollout_id]
        else:
            ledger = RolloutLedger(rollout_id, self.shelf)
            ledger.on_growth = self._grown
            self._num_bytes += ledger.nbytes
        self._touch(ledger)
        self._shrink()
        return None if rollout_id in self._evicted else ledger

    def read(self, rollout_id: str, *, with_media: bool = False) -> LedgerFrame:
        """A rollout's ledger; it stays.

        Args:
            rollout_id: Of the attempt.
            with_media: With the files of its images.

        Raises:
            LedgerNotFoundError: There is none.
            LedgerEvictedError: It was evicted.
        """
        self._sweep()
        return self._found(rollout_id).frame(self.server_id, with_media=with_media)

    def take(self, rollout_id: str, *, with_media: bool = False) -> LedgerFrame:
        """A rollout's ledger, which is forgotten; calls still in flight are recorded nowhere.

        Args:
            rollout_id: Of the attempt.
            with_media: With the files of its images.

        Raises:
            LedgerNotFoundError: There is none.
            LedgerEvictedError: It was evicted; from now on the id is free.
        """
        self._sweep()
        try:
            ledger = self._found(rollout_id)
        except LedgerEvictedError:
            del self._evicted[rollout_id]
            raise
        frame = ledger.frame(self.server_id, with_media=with_media)
        self._forget(ledger)
        return frame

    def _found(self, rollout_id: str) -> RolloutLedger:
        if rollout_id in self._ledgers:
            return self._ledgers[rollout_id][1]
        if rollout_id in self._evicted:
            reason = self._evicted[rollout_id]
            raise LedgerEvictedError(
                f"the token ledger of rollout {rollout_id!r} was evicted: {reason}",
                rollout_id=rollout_id,
                reason=reason,
            )
        raise LedgerNotFoundError(
            f"there is no token ledger of rollout {rollout_id!r}: no call came under "
            f"/ng-rollout/{rollout_id}/v1, or it was taken already",
            rollout_id=rollout_id,
        )

    def _grown(self, ledger: RolloutLedger, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._touch(ledger)
        self._shrink()

    def _touch(self, ledger: RolloutLedger) -> None:
        self._ledgers[ledger.rollout_id] = (self._clock(), ledger)
        self._ledgers.move_to_end(ledger.rollout_id)

    def _shrink(self) -> None:
        while self.nbytes > self.max_bytes and self._ledgers:
            _, ledger = next(iter(self._ledgers.values()))
            self._evict(
                ledger,
                f"the server's ledgers were over generation.ledger_max_bytes={self.max_bytes}; "
                "raise it, or run fewer rollouts at a time",
            )

    def _sweep(self) -> None:
        oldest = self._clock() - self.max_age_s
        while self._ledgers:
            touched, ledger = next(iter(self._ledgers.values()))
            if touched >= oldest:
                return
            if ledger.in_flight:
                # It is not quiet: its call takes longer than that.
                self._touch(ledger)
                continue
            self._evict(
                ledger,
                f"it was quiet for longer than generation.ledger_max_age_s={self.max_age_s:g}",
            )

    def _evict(self, ledger: RolloutLedger, reason: str) -> None:
        self._forget(ledger)
        self.num_evicted += 1
        self._evicted[ledger.rollout_id] = reason
        while len(self._evicted) > MAX_REMEMBERED:
            self._evicted.popitem(last=False)

    def _forget(self, ledger: RolloutLedger) -> None:
        del self._ledgers[ledger.rollout_id]
        self._num_bytes -= ledger.nbytes
        ledger.close()
