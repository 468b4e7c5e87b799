"""A part of the launcher's store that belongs to this start of the job alone.

Torchrun keeps one store while it starts the ranks again, and puts nothing of the start into its keys. A
rank that is quicker than its peers therefore finds the addresses that the killed ones had left, and
connects to nobody. Here all ranks agree on a prefix that no former start had, before any address is
read: rank 0 asks a question that is new, each rank answers it with a number of its own, and rank 0
repeats the answers. A rank goes on when it hears its own number, so neither an old question nor an old
repetition can mislead it.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from gymrl.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Iterator

Store = Any  # torch exports its stores without types

_PrefixStore: Any = vars(dist)["PrefixStore"]

_QUESTION = "gymrl/question"
_LOOK_S = 0.02
_LOOK_IDLY_S = 0.2


def fresh_store(store: Store, rank: int, size: int, seconds: float) -> Store:
    """The same store under a prefix of this start's own; every rank must call.

    Args:
        store: Of the launcher; it may hold what a former start has left.
        rank: This rank.
        size: All ranks.
        seconds: How long ranks wait for each other.

    Raises:
        DeadlineExceeded: Not all came (of ``rollout.start_timeout_s``); rank 0's names those that did
            not.
    """
    ends = time.monotonic() + seconds
    if rank == 0:
        question = _ask(store, size, ends, seconds)
    else:
        question = _answer(store, rank, ends, seconds)
    return _PrefixStore(f"gymrl/{question}", store)


def _ask(store: Store, size: int, ends: float, seconds: float) -> str:
    question = secrets.token_hex(8)
    store.set(_QUESTION, question)
    keys = {rank: f"gymrl/answer/{question}/{rank}" for rank in range(1, size)}
    missing = dict(keys)
    for pause_s in _pauses():
        missing = {rank: key for rank, key in missing.items() if not store.check([key])}
        if not missing:
            break
        if time.monotonic() > ends:
            raise _late(f"ranks {', '.join(map(str, list(missing)[:20]))}", seconds)
        time.sleep(pause_s)
    answers = {rank: store.get(key).decode() for rank, key in keys.items()}
    store.set(f"gymrl/heard/{question}", msgspec.msgpack.encode(answers))
    return question


def _answer(store: Store, rank: int, ends: float, seconds: float) -> str:
    number = secrets.token_hex(8)
    answered = ""
    for pause_s in _pauses():
        if store.check([_QUESTION]):
            question: str = store.get(_QUESTION).decode()
            if question != answered:
                store.set(f"gymrl/answer/{question}/{rank}", number)
                answered = question
            heard = f"gymrl/heard/{question}"
            if store.check([heard]):
                answers = msgspec.msgpack.decode(store.get(heard), type=dict[int, str])
                if answers.get(rank) == number:
                    return question
        if time.monotonic() > ends:
            raise _late("rank 0, or a rank that it waits for", seconds)
        time.sleep(pause_s)
    raise AssertionError  # the pauses have no end


def _pauses() -> Iterator[float]:
    """Short ones for two seconds, then longer ones."""
    for _ in range(100):
        yield _LOOK_S
    while True:
        yield _LOOK_IDLY_S


def _late(who: str, seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the ranks waited {seconds:g} s for each other (set by rollout.start_timeout_s); "
        f"not there: {who}",
        what="the start of all ranks",
        seconds=seconds,
        setting="rollout.start_timeout_s",
    )
