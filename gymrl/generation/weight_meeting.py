"""Where a trainer and the workers of its engines meet for a transfer by gloo, and how either leaves.

They meet at a store that the trainer holds. Each says there that it has arrived, each worker that it
is about to receive, and whoever can't go on says why; everyone who waits looks for that. Only when
all are there does gloo connect them, and only when all receive does it send: gloo's own waits can't
be ended from outside.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import msgspec

from gymrl.addresses import address_family
from gymrl.errors import WeightUpdateError
from gymrl.extras import optional_imports
from gymrl.generation.weights import GLOO_BACKEND

with optional_imports():
    import torch
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed import ProcessGroupGloo

if TYPE_CHECKING:
    from torch.distributed import Work

    from gymrl.generation.weights import TransferWeights

logger = logging.getLogger(__name__)

REFUSED = "refused"
"""Key of the store under which whoever can't go on says why; a generator adds the sender's name."""

_PREFIX = "gymrl-weights"
_LOOK_S = 0.01
_WAIT_S = 0.1
_TELL_TIMEOUT_S = 10.0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a transfer can't go on.

    Attributes:
        rank: Of the worker that says so; None: another one does.
        reason: Its words.
    """

    rank: int | None = None
    reason: str


class Meeting:
    """Where a trainer and the workers of its engines meet, and how many they are.

    Args:
        num_engines: See :func:`~gymrl.generation.weight_transfer.weight_sender`, as for the others.
        num_workers: Of each engine.
        host: Of the trainer.
        port: 0: a free one.
        timeout_s: How long they wait for each other.

    Attributes:
        sender: Another one each time that the trainer begins to listen: engines then meet it anew.
    """

    def __init__(
        self, num_engines: int, num_workers: int, host: str, port: int, timeout_s: float
    ) -> None:
        self.num_engines = num_engines
        self.num_workers = num_workers
        self.host = host
        self.port = port
        self.timeout_s = timeout_s
        self.sender = ""

    @property
    def world_size(self) -> int:
        """The trainer, and every worker."""
        return 1 + self.num_engines * self.num_workers

    def first_rank(self, engine: int) -> int:
        """Rank of an engine's first worker; the trainer's is 0."""
        return 1 + engine * self.num_workers

    def worker(self, rank: int) -> str:
        """A worker, by its rank, as errors name it."""
        engine, worker = divmod(rank - 1, self.num_workers)
        return f"engine {engine}" + (f" (worker {worker})" if self.num_workers > 1 else "")

    def listen(self) -> socket.socket:
        """Where the workers come, on the host's interface alone; torch would take all of them.

        Raises:
            WeightUpdateError: The address is not this host's, or the port is taken.
        """
        try:
            listener = socket.create_server(
                (self.host, self.port), family=address_family(self.host)
            )
        except OSError as error:
            raise WeightUpdateError(
                f"can't listen on {self.host}:{self.port} for the engines' workers: {error}"
            ) from error
        self.sender = uuid.uuid4().hex
        return listener


class WeightGroup:
    """One process's place among a trainer and the workers of its engines.

    Its methods block; :meth:`refuse` alone may be called by another thread meanwhile. When one
    raised, :meth:`close` it: nobody goes on with a group that one of them has left.

    Args:
        store: Where they meet.
        rank: 0 is the trainer.
        meeting: Who takes part; of a worker, as far as it was told.
    """

    def __init__(self, store: TCPStore, rank: int, meeting: Meeting) -> None:
        # No frame holds what is connected: an error that somebody keeps would keep it open.
        self._store: PrefixStore | None = PrefixStore(_PREFIX, store)
        self._rank = rank
        self._meeting = meeting
        self._group: ProcessGroupGloo | None = None
        self._sets = 0
        self._refused = threading.Event()
        self._reason: BaseException | None = None
        self._work: Work | None = None

    @classmethod
    def hosted(cls, meeting: Meeting) -> tuple[Self, int]:
        """The trainer's place, and the port at which its store listens.

        Raises:
            WeightUpdateError: It can't listen there.
        """
        listener = meeting.listen()
        port: int = listener.getsockname()[1]
        store = TCPStore(
            meeting.host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=meeting.timeout_s),
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )
        return cls(store, 0, meeting), port

    @property
    def is_joined(self) -> bool:
        """Whether all are connected."""
        return self._group is not None

    def join(self) -> None:
        """Wait until all are there, and connect with them.

        Raises:
            WeightUpdateError: One refused, or did not come in time.
        """
        self._say(f"arrived/{self._rank}")
        self._await("arrived", range(self._meeting.world_size), "did not come")
        assert self._store is not None
        try:
            self._group = ProcessGroupGloo(
                self._store,
                self._rank,
                self._meeting.world_size,
                timedelta(seconds=self._meeting.timeout_s),
            )
        except RuntimeError as error:
            raise self._broken(error) from error

    def begin(self) -> None:
        """One set of weights begins: the trainer waits until every worker is about to receive it.

        Raises:
            WeightUpdateError: One refused, or was not ready in time.
        """
        self._sets += 1
        stage = f"ready/{self._sets}"
        if self._rank:
            self._say(f"{stage}/{self._rank}")
        else:
            self._await(stage, range(1, self._meeting.world_size), "asked for no weights")

    def broadcast(self, data: torch.Tensor) -> None:
        """From the trainer to every worker.

        Args:
            data: Bytes: gloo does not know every float type.

        Raises:
            WeightUpdateError: Another process is gone, refused, or does not answer.
        """
        if not data.numel():
            return
        if self._group is None:
            raise WeightUpdateError("trainer and workers have not met")
        if self._reason is not None:
            raise refused(self._reason)
        try:
            # torch's stubs leave the method out.
            self._work = self._group.broadcast(data, 0)  # type: ignore[attr-defined]
            self._finish()
        except RuntimeError as error:
            raise self._broken(error) from error

    def _finish(self) -> None:
        assert self._work is not None
        while not self._refused.is_set():
            try:
                self._work.wait(timedelta(seconds=_WAIT_S))
            except RuntimeError:
                if self._work.is_completed():
                    self._work = None
                    raise
            else:
                self._work = None
                return
        # Whoever refused has not let go of its connections, so that gloo goes on waiting.
        self._look()

    def refuse(self, reason: BaseException) -> None:
        """This process knows why it can't go on; whatever waits here ends at once. For any thread."""
        self._reason = reason
        self._refused.set()

    @property
    def is_refused(self) -> bool:
        """Whether one has said that it can't go on, or the store is gone."""
        try:
            self._look()
        except WeightUpdateError:
            return True
        return False

    def say_refused(self, reason: str) -> None:
        """Let the others know why this process can't go on. Does nothing where they are gone."""
        if self._store is not None:
            said = msgspec.json.encode(Refusal(rank=self._rank, reason=reason)).decode()
            with contextlib.suppress(RuntimeError):
                # The first word counts: others fail because of it.
                self._store.compare_set(REFUSED, "", said)

    def close(self) -> None:
        """Leave; whoever waits for this process is told at once. Safe to call twice."""
        held = [self._work, self._group]
        self._work = self._group = self._store = None
        if held[0] is not None:
            threading.Thread(
                target=_outlast, args=(held,), name="gymrl-weights-left", daemon=True
            ).start()

    def _say(self, key: str) -> None:
        self._on_store("set", key, b"1")

    def _await(self, stage: str, ranks: Sequence[int], failing: str) -> None:
        keys = {rank: f"{stage}/{rank}" for rank in ranks}
        ends = time.monotonic() + self._meeting.timeout_s
        while keys:
            self._look()
            keys = {rank: key for rank, key in keys.items() if not self._has(key)}
            if keys and time.monotonic() > ends:
                missing = ", ".join(
                    self._meeting.worker(rank) if rank else "the trainer" for rank in keys
                )
                raise WeightUpdateError(
                    f"{missing} {failing} within {self._meeting.timeout_s:g} s (timeout_s)"
                )
            if keys:
                self._refused.wait(_LOOK_S)

    def _look(self) -> None:
        """Raise what stands in the way, if anything does."""
        if self._reason is not None:
            raise refused(self._reason)
        for key in (REFUSED, f"{REFUSED}/{self._meeting.sender}"):
            if not self._has(key):
                continue
            said = msgspec.json.decode(self._on_store("get", key), type=Refusal)
            who = "" if said.rank is None else f"{self._who(said.rank)} refused: "
            raise WeightUpdateError(f"{who}{said.reason}")

    def _who(self, rank: int) -> str:
        return self._meeting.worker(rank) if rank else "the trainer"

    def _broken(self, error: RuntimeError) -> WeightUpdateError:
        """What broke gloo's connections: the words of whoever left, where it has left some."""
        try:
            self._look()
        except WeightUpdateError as said:
            return said
        return WeightUpdateError(f"the connection broke: {error}")

    def _has(self, key: str) -> bool:
        return bool(self._on_store("check", [key]))

    def _on_store(self, method: str, *args: Any) -> Any:
        if self._store is None:
            raise WeightUpdateError("this place was left")
        try:
            return getattr(self._store, method)(*args)
        except RuntimeError as error:
            raise WeightUpdateError(f"the trainer's store is gone: {error}") from error


def refused(reason: BaseException) -> WeightUpdateError:
    """The error of a sender whose weights were refused, with the fields of the reason."""
    fields = reason.fields if isinstance(reason, WeightUpdateError) else {}
    error = WeightUpdateError(f"nothing more is sent: {str(reason) or repr(reason)}", **fields)
    error.__cause__ = reason
    return error


def visit(host: str, port: int, timeout_s: float) -> TCPStore:
    """A worker's way to the trainer's store.

    Raises:
        RuntimeError: Nobody listens there; torch would try until the deadline.
    """
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise RuntimeError(f"no trainer listens on {host}:{port}: {error}") from error
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def tell_refusal(weights: TransferWeights, reason: str) -> None:
    """Let the sender know that nobody takes its weights, wherever it is. Blocks for 10 s at most.

    Where it can't be told, it waits out its own `timeout_s`; the log says so.

    Args:
        weights: That it announced. By other backends than ``gymrl_gloo`` there is no way to it.
        reason: Why.
    """
    if weights.backend != GLOO_BACKEND:
        return
    host, port = weights.init_info.get("host"), weights.init_info.get("port")
    if not isinstance(host, str) or not isinstance(port, int):
        return
    try:
        store = PrefixStore(_PREFIX, visit(host, port, _TELL_TIMEOUT_S))
        said = msgspec.json.encode(Refusal(reason=reason)).decode()
        store.set(f"{REFUSED}/{weights.sender}", said)
    except RuntimeError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            logger.debug("the sender at %s:%d has gone already", host, port)
            return
        logger.warning(
            "the sender of weights at %s:%d could not be told that they are refused (%s), and waits "
            "until its own timeout_s: %s",
            host,
            port,
            reason,
            error,
        )


def _outlast(held: list[Any]) -> None:
    """Let go of a group, and of what it still sends, when gloo's own deadline has passed."""
    with contextlib.suppress(RuntimeError):
        held[0].wait()
    held.clear()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, flat."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
