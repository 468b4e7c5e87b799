"""A rank's line to the job's store: one thread that asks, beats, and looks for bad news.

All traffic with the store goes through that thread, so that no rank ever waits in the store itself:
a network that has fallen silent holds the thread, and the rank notices.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gymrl.actors.failures import ErrorData, bounded, describe, rebuild
from gymrl.errors import DeadlineExceeded, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Store = Any  # torch exports its stores without types

T = TypeVar("T")

LOOK_S = 0.25
"""How often a rank looks whether the job has failed."""

_ABORT = "abort"
_LAUNCHED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
_LOOK_CLOSELY_S = 0.005
_LOOK_IDLY_S = 0.05


class Cause(msgspec.Struct, frozen=True):
    """Why the job ends: the first error, and who had it."""

    rank: int
    where: str
    error: ErrorData

    def as_error(self) -> RankFailedError:
        """What the other ranks raise; the error itself is its ``__cause__``."""
        failed = RankFailedError(
            f"rank {self.rank} ({self.where}) failed: {self.error.type}"
            f"{': ' if self.error.message else ''}{bounded(self.error.message, 4000)}",
            rank=self.rank,
            where=self.where,
        )
        failed.__cause__ = rebuild(self.error)
        return failed


class Wait(msgspec.Struct, frozen=True):
    """What a rank waits for that every rank comes to, in the same order.

    Attributes:
        key: Of the store; it is there when the wait is over.
        what: In words.
        since: Tells waits apart.
    """

    key: str = ""
    what: str = ""
    since: int = 0


def _no_launcher() -> Exception:
    return RankFailedError(
        "torchrun, which had started it, was killed: nobody would start the job again, or end it"
    )


class StoreLine:
    """See the module.

    Args:
        store: A connection that nobody else uses.
        rank: This rank.
        size: Ranks of the job.
        where: Host and process, as errors name this rank.
        timeout_s: A rank that shows nothing for so long is gone.
        step_s: How often a rank that waits with all others looks whether they wait for the same.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        where: str,
        timeout_s: float,
        step_s: float = 2.0,
    ) -> None:
        self._step_s = step_s
        self._store = store
        self._rank = rank
        self._size = size
        self._where = where
        self._timeout_s = timeout_s
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._answered = time.monotonic()
        self._cause: Cause | None = None
        self._broken: Exception | None = None
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._is_watching = False
        store.set(f"at/{rank}", msgspec.msgpack.encode(Wait()))
        self._launcher = os.getppid() if _LAUNCHED_BY_TORCHRUN in os.environ else None
        self._thread = threading.Thread(target=self._run, name="gymrl-store", daemon=True)
        self._thread.start()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = 0.0
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Empty):
                self._requests.get(timeout=LOOK_S)()
            if time.monotonic() - looked < LOOK_S:
                continue
            looked = time.monotonic()
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - whatever it is, the line is of no more use
                self._broken = error
                return

    def _look(self) -> None:
        if self._cause is None and self._store.check([_ABORT]):
            self._cause = msgspec.msgpack.decode(self._store.get(_ABORT), type=Cause)
        self._store.set(f"beat/{self._rank}", str(time.monotonic_ns()))
        if self._is_watching and self._cause is None:
            self._look_at_others()
        if self._launcher not in (None, os.getppid()) and self._cause is None:
            self._set_cause(Cause(self._rank, self._where, describe(_no_launcher())))
        self._answered = time.monotonic()

    def _look_at_others(self) -> None:
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        now = time.monotonic()
        for rank, beat in zip(
            ranks, self._store.multi_get([f"beat/{r}" for r in ranks]), strict=True
        ):
            known, since = self._beats.get(rank, (b"", now))
            if beat != known:
                self._beats[rank] = (beat, now)
            elif now - since > self._timeout_s:
                where = self._store.get(f"where/{rank}").decode()
                self._set_cause(Cause(rank, where, describe(self._silence())))
                return

    def _silence(self) -> Exception:
        return RankFailedError(
            f"nothing was heard of it for {self._timeout_s:g} s (heartbeat_timeout_s): its process "
            "was killed, its node is down, or the network is cut"
        )

    def _set_cause(self, cause: Cause) -> None:
        kept = self._store.compare_set(_ABORT, "", msgspec.msgpack.encode(cause))
        self._cause = msgspec.msgpack.decode(kept, type=Cause)

    # --- the rank --------------------------------------------------------------------------------

    def watch_others(self) -> None:
        """Look at the others' beats from now on; all of them have begun."""
        self._is_watching = True

    @property
    def cause(self) -> Cause | None:
        """Why the job ends, as far as this rank knows."""
        return self._cause

    def check(self) -> None:
        """Return while the job is well.

        Raises:
            RankFailedError: A rank failed, or this one is cut off.
        """
        if self._cause is not None:
            raise self._cause.as_error()
        silent_s = time.monotonic() - self._answered
        if self._broken is not None or silent_s > self._timeout_s:
            why = self._broken or f"it has not answered for {silent_s:.0f} s (heartbeat_timeout_s)"
            raise RankFailedError(
                f"rank {self._rank} ({self._where}) has lost rank 0: {why}; "
                "its process or its node has ended, or the network is cut",
                rank=0,
            )

    def ask(self, question: Callable[[Store], T], what: str, seconds: float) -> T:
        """What a question to the store answers.

        Raises:
            RankFailedError: The job failed meanwhile.
            DeadlineExceeded: No answer came in time.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(question(self._store))
            except Exception as error:  # noqa: BLE001 - raised again where it was asked
                future.set_exception(error)

        self._requests.put(run)
        ends = time.monotonic() + seconds
        while True:
            if concurrent.futures.wait([future], timeout=0.1).done:
                try:
                    return future.result()
                except RuntimeError as error:  # torch's, for a store that is out of reach
                    self._broken = self._broken or error
                    self.check()
                    raise
            self.check()
            if time.monotonic() > ends:
                raise DeadlineExceeded(f"{what} took longer than {seconds:g} s", what=what)

    def put(self, key: str, value: bytes) -> None:
        """Publish a value for other ranks."""
        self.ask(lambda store: store.set(key, value), f"publishing {key}", self._timeout_s)

    def get_in_step(
        self, key: str, what: str, seconds: float | None, setting: str | None = None
    ) -> bytes:
        """As :meth:`get`, for what all ranks come to, in the same order.

        Raises:
            RankFailedError: The job failed meanwhile; or another rank waits for something else, so
                that both would wait for ever.
            DeadlineExceeded: It did not come in time.
        """
        wait: Wait | None = None
        looked = 0.0
        for waited in self._until_there(key, what, seconds, setting):
            if waited - looked < self._step_s:
                continue
            looked = waited
            if wait is None:
                wait = Wait(key, what, time.monotonic_ns())
                self.put(f"at/{self._rank}", msgspec.msgpack.encode(wait))
            self._check_step(wait)
        value: bytes = self.ask(lambda store: store.get(key), what, self._timeout_s)
        if wait is not None:
            self.put(f"at/{self._rank}", msgspec.msgpack.encode(Wait()))
        return value

    def _check_step(self, own: Wait) -> None:
        keys = [f"at/{rank}" for rank in range(self._size)]

        def look(store: Store) -> tuple[int, Wait] | None:
            said = store.multi_get(keys) if store.check(keys) else []
            for rank, text in enumerate(said):
                other = msgspec.msgpack.decode(text, type=Wait)
                if other.key in ("", own.key) or store.check([own.key]) or store.check([other.key]):
                    continue
                # It still waits, so that its key was not taken away after it was there.
                if store.get(keys[rank]) == text:
                    return rank, other
            return None

        found = self.ask(look, own.what, self._timeout_s)
        if found is not None:
            rank, other = found
            raise RankFailedError(
                f"rank {rank} waits for {other.what}, and rank {self._rank} for {own.what}: neither "
                "will come. Every rank must call the same methods in the same order",
                rank=rank,
            )

    def get(self, key: str, what: str, seconds: float | None, setting: str | None = None) -> bytes:
        """A value that another rank publishes, when it is there.

        Waits without burning a core.

        Raises:
            RankFailedError: The job failed meanwhile.
            DeadlineExceeded: It did not come in time.
        """
        for _ in self._until_there(key, what, seconds, setting):
            pass
        value: bytes = self.ask(lambda store: store.get(key), what, self._timeout_s)
        return value

    def _until_there(
        self, key: str, what: str, seconds: float | None, setting: str | None
    ) -> Iterator[float]:
        """How long it has been waited, until a key is there."""
        began = time.monotonic()
        while not self.ask(lambda store: store.check([key]), what, self._timeout_s):
            self.check()
            waited = time.monotonic() - began
            if seconds is not None and waited > seconds:
                hint = f" (set by {setting})" if setting else ""
                raise DeadlineExceeded(
                    f"rank {self._rank} waited {seconds:g} s for {what}{hint}",
                    what=what,
                    seconds=seconds,
                    setting=setting,
                )
            yield waited
            time.sleep(_LOOK_CLOSELY_S if waited < 1 else _LOOK_IDLY_S)

    def forget(self, key: str, readers: int) -> None:
        """This rank has read a value; the last of its readers takes it away."""

        def count(store: Store) -> None:
            if store.add(f"{key}/read", 1) == readers:
                store.delete_key(key)
                store.delete_key(f"{key}/read")

        self.ask(count, f"forgetting {key}", self._timeout_s)

    def barrier(self, name: str, seconds: float, setting: str) -> None:
        """Wait until every rank is here.

        Raises:
            RankFailedError: A rank failed.
            DeadlineExceeded: Not all came; names those that did not.
        """
        here = self.ask(lambda store: store.add(f"{name}/count", 1), name, self._timeout_s)
        self.put(f"{name}/{self._rank}", b"1")
        if here == self._size:
            self.put(f"{name}/all", b"1")
        try:
            self.get_in_step(f"{name}/all", name, seconds, setting)
        except DeadlineExceeded as error:
            ranks = range(self._size)
            missing = self.ask(
                lambda store: [r for r in ranks if not store.check([f"{name}/{r}"])],
                name,
                self._timeout_s,
            )
            names = ", ".join(map(str, missing[:20]))
            raise DeadlineExceeded(
                f"{error.message}; not there: rank {names}",
                what=name,
                seconds=seconds,
                setting=setting,
            ) from None

    def fail(self, error: BaseException) -> Cause | None:
        """Tell every rank why the job ends; the first to say so is heard.

        Returns:
            The cause that all ranks know; None where the store is out of reach.
        """
        if self._cause is not None or self._broken is not None:
            return self._cause
        cause = Cause(self._rank, self._where, describe(error))
        done = threading.Event()

        def run() -> None:
            try:
                self._set_cause(cause)
            except Exception as fault:  # noqa: BLE001 - the line is broken; there is an error already
                self._broken = fault
            done.set()

        self._requests.put(run)
        done.wait(min(5.0, self._timeout_s))
        return self._cause

    def await_cause(self, seconds: float) -> Cause | None:
        """The cause, given a while: an error here may be the echo of another rank's."""
        ends = time.monotonic() + seconds
        while self._cause is None and self._broken is None and time.monotonic() < ends:
            time.sleep(0.05)
        return self._cause

    def part(self, seconds: float) -> None:
        """The last word: this rank needs the store no more.

        The store lives in rank 0's process, which waits a while until everybody has read what is
        there, the cause of a failure above all.
        """
        # Nothing can be told to a store that is gone, and nobody needs to be told.
        with contextlib.suppress(Exception):
            self._quietly(lambda store: store.set(f"parted/{self._rank}", "1"))
            ends = time.monotonic() + seconds
            keys = [f"parted/{rank}" for rank in range(self._size)]
            while self._rank == 0 and time.monotonic() < ends:
                if self._quietly(lambda store: store.check(keys)):
                    return
                time.sleep(0.02)

    def _quietly(self, question: Callable[[Store], Any]) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(question(self._store))
            except Exception as error:  # noqa: BLE001 - raised again where it was asked
                future.set_exception(error)

        self._requests.put(run)
        return future.result(timeout=2.0)

    def close(self) -> None:
        """End the thread; one that a silent network holds is left behind."""
        self._stopped.set()
        self._requests.put(lambda: None)
        self._thread.join(timeout=2.0)


STORE_TIMEOUT = timedelta(seconds=60)
"""Torch's own limit for one question to the store."""
