"""The ranks of a job: who is where, how they reach each other, and what each may wait for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from gymrl.actors.authentication import MIN_SECRET
from gymrl.errors import ConfigError, RankFailedError
from gymrl.torchrun.agreement import differences, fingerprints, must_agree
from gymrl.torchrun.line import LOOK_S, STORE_TIMEOUT, StoreLine
from gymrl.torchrun.rendezvous import fresh_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from gymrl.torchrun.config import TorchrunConfig

T = TypeVar("T")

logger = logging.getLogger(__name__)

SECRET_VARIABLE = "GYMRL_SECRET"  # the name of a variable, not its value
"""Where a launcher may put a secret of its own; nodes that have another one are refused."""

_TCPStore: Any = vars(dist)["TCPStore"]  # torch exports it without a type

LOOPBACK = "127.0.0.1"
_ADDRESS_BYTES = 256
_PART_TIMEOUT_S = 5.0

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankInfo(msgspec.Struct, frozen=True):
    """What a rank says of itself.

    Attributes:
        node: Which node it is on: the launcher's number, else the host's name.
        host: Name of the host.
        pid: Its process.
    """

    node: str
    host: str
    pid: int


class World(Protocol):
    """What a session needs of the job's other ranks.

    Attributes:
        rank: This rank.
        size: All ranks.
        node: This rank's node, from 0.
        leaders: For each node the rank that holds its workers.
        mates: The ranks of this node, ascending; the first is its leader.
    """

    rank: int
    size: int
    node: int
    leaders: tuple[int, ...]
    mates: tuple[int, ...]


def launcher_secret(environment: Mapping[str, str]) -> bytes:
    """The secret that a launcher gives to all nodes; empty where it gives none.

    Raises:
        ConfigError: It is shorter than 16 bytes; it is not shown.
    """
    secret = environment.get(SECRET_VARIABLE, "").encode()
    if 0 < len(secret) < MIN_SECRET:
        raise ConfigError(
            f"{SECRET_VARIABLE} has {len(secret)} bytes and could be guessed: {MIN_SECRET} are needed, "
            "such as `openssl rand -hex 32` writes",
            setting=SECRET_VARIABLE,
        )
    return secret


def is_launched() -> bool:
    """Whether a launcher has set the variables of a job with ranks, or a group exists.

    Raises:
        ConfigError: As :func:`launched_by`.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    return launched_by(os.environ)


def launched_by(environment: Mapping[str, str]) -> bool:
    """Whether a launcher's variables make this process a rank of a job.

    Raises:
        ConfigError: They say that there are other ranks, and not where; or a number is none. Each
            rank would else run alone, or wait for the others until a deadline.
    """
    given = {name: environment[name] for name in _LAUNCH_VARIABLES if environment.get(name)}
    missing = [name for name in _LAUNCH_VARIABLES if name not in given]
    size = _number(given, "WORLD_SIZE", 1)
    if missing and size > 1:
        raise ConfigError(
            f"WORLD_SIZE={size} says that there are other ranks, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: start it with torchrun, or unset "
            "WORLD_SIZE to run alone",
            setting=missing[0],
        )
    if missing:
        return False
    rank, port = _number(given, "RANK", 0), _number(given, "MASTER_PORT", 1)
    if rank >= size:
        raise ConfigError(
            f"RANK={rank} with WORLD_SIZE={size}: ranks are numbered from 0 to {size - 1}",
            setting="RANK",
        )
    if port > 65535:
        raise ConfigError(f"MASTER_PORT={port}: is no port", setting="MASTER_PORT")
    return True


def _number(given: Mapping[str, str], name: str, least: int) -> int:
    text = given.get(name, str(least))
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"{name}={text!r}: a launcher sets it to a number, {least} or more", setting=name
        )
    return int(text)


class LoneWorld:
    """The world of a process that nobody launched: one rank, which waits for nobody."""

    rank = 0
    size = 1
    node = 0
    leaders = (0,)
    mates = (0,)
    line: StoreLine | None = None

    def check(self) -> None:
        """Nobody else can fail."""

    def check_settings(self) -> None:
        """Nobody to agree with."""

    def barrier(self, name: str, seconds: float, setting: str) -> None:
        """Nobody to wait for."""

    def attend(self, work: Callable[[], T]) -> T:
        """Do it."""
        return work()

    def gather_on_node(self, own: bytes, name: str, seconds: float) -> list[bytes] | None:
        """This rank's alone."""
        return [own]

    def fail(self, error: BaseException) -> BaseException:
        """`error` itself."""
        return error

    def close(self) -> None:
        """Nothing to close."""


class GroupWorld:
    """The ranks of a process group, made from the launcher's variables where there is none.

    Entering is a collective: every rank must.

    Args:
        config: Deadlines and addresses.

    Attributes:
        line: To the job's store.
        group: A gloo group of all ranks, for this object alone.
    """

    def __init__(self, config: TorchrunConfig) -> None:
        self._config = config
        self._timeout = timedelta(seconds=config.transfer_timeout_s)
        self._owns_default_group = not dist.is_initialized()
        if self._owns_default_group:
            self._make_default_group()
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.group: Any = dist.new_group(backend="gloo", timeout=self._timeout)
        self.address = config.address or _own_address()
        self._store: Any = None
        self.line = self._open_line()
        try:
            self._find_nodes()
        except BaseException:
            self.line.close()
            raise

    def _make_default_group(self) -> None:
        """From the launcher's variables, with nothing of a former start of the job in it."""
        store, rank, size = next(rendezvous("env://", timeout=self._timeout))
        seconds = self._config.rollout.start_timeout_s
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=fresh_store(store, rank, size, seconds),
            rank=rank,
            world_size=size,
            timeout=self._timeout,
        )

    def _open_line(self) -> StoreLine:
        where = f"{socket.gethostname()}, process {os.getpid()}"
        place = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
        listener = None
        if self.rank == 0:
            # Its port is the system's choice and its interface ours; torch would take all of them.
            listener = socket.create_server((self.address, 0))
            port = listener.getsockname()[1]
            self._store = _TCPStore(
                self.address,
                port,
                self.size,
                is_master=True,
                timeout=STORE_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=True,
            )
            text = f"{self.address} {port}".encode().ljust(_ADDRESS_BYTES)
            place = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(place, src=0, group=self.group)
        address, number = bytes(place.tolist()).decode().split()
        client = _TCPStore(
            address,
            int(number),
            self.size,
            is_master=False,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
        )
        seconds = self._config.heartbeat_timeout_s
        client.set(f"where/{self.rank}", where)
        client.set(f"beat/{self.rank}", "0")
        return StoreLine(client, self.rank, self.size, where, seconds)

    def _find_nodes(self) -> None:
        seconds = self._config.rollout.start_timeout_s
        me = RankInfo(
            os.environ.get("GROUP_RANK") or socket.gethostname(), socket.gethostname(), os.getpid()
        )
        self.line.put(f"rank/{self.rank}", msgspec.msgpack.encode(me))
        self.line.barrier("the start of all ranks", seconds, "rollout.start_timeout_s")
        keys = [f"rank/{rank}" for rank in range(self.size)]
        values = self.line.ask(lambda store: store.multi_get(keys), "the ranks' places", seconds)
        places = [msgspec.msgpack.decode(value, type=RankInfo).node for value in values]
        nodes = list(dict.fromkeys(places))
        self.node = nodes.index(places[self.rank])
        self.leaders = tuple(places.index(node) for node in nodes)
        own = places[self.rank]
        self.mates = tuple(rank for rank, place in enumerate(places) if place == own)
        if self.rank == 0:
            self.line.watch_others()

    def check_settings(self) -> None:
        """Hold this rank's configuration against rank 0's; a collective.

        Raises:
            ConfigError: They can't work together; the text names the settings. Where they can, a
                warning does.
        """
        own = fingerprints(self._config)
        if self.rank == 0:
            self.line.put("settings", msgspec.json.encode(own))
            return
        seconds, setting = self._config.rollout.start_timeout_s, "rollout.start_timeout_s"
        first = self.line.get("settings", "rank 0's configuration", seconds, setting)
        others = differences(own, msgspec.json.decode(first, type=dict[str, str]))
        if not others:
            return
        fatal = [name for name in others if must_agree(name)]
        if fatal:
            raise ConfigError(
                f"rank {self.rank} was given another {' and '.join(fatal)} than rank 0: give every "
                "rank the same configuration",
                setting=fatal[0],
            )
        logger.warning(
            "rank %d was given another configuration than rank 0, whose own counts: %s",
            self.rank,
            ", ".join(others),
        )

    # --- the secret ------------------------------------------------------------------------------

    def secret(self) -> bytes:
        """What the ends of a link between nodes prove that they know; the same on every rank.

        Rank 0 draws it and the store carries it until every rank has read it; a secret of the
        launcher's own (``GYMRL_SECRET``) is mixed in on each rank and travels nowhere.

        Raises:
            ConfigError: The launcher's own could be guessed.
        """
        own = launcher_secret(os.environ)
        if self.rank == 0:
            self.line.put("secret", secrets.token_bytes(32))
        drawn = self.line.get("secret", "the job's secret", 60.0)
        self.line.forget("secret", readers=self.size)
        return hmac.new(own, drawn, hashlib.sha256).digest()

    # --- waiting ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Return while the job is well; see :meth:`StoreLine.check`."""
        self.line.check()

    def barrier(self, name: str, seconds: float, setting: str) -> None:
        """Wait for every rank; see :meth:`StoreLine.barrier`."""
        self.line.barrier(name, seconds, setting)

    def attend(self, work: Callable[[], T]) -> T:
        """Do what torch can't be interrupted in, and look for bad news meanwhile.

        Raises:
            RankFailedError: The job failed; `work` is left behind.
            Exception: What `work` raises.
        """
        doing: Future[T] = in_thread(work)
        while not concurrent.futures.wait([doing], LOOK_S).done:
            self.check()
        return doing.result()

    # --- bytes -----------------------------------------------------------------------------------

    def send(self, parts: Sequence[npt.NDArray[np.uint8]]) -> None:
        """From rank 0: to rank r the part r. The others are at :meth:`receive` or on their way.

        Raises:
            RankFailedError: A rank has gone.
        """
        with self._told("sending shares"):
            self.attend(lambda: self._send(parts))

    def _send(self, parts: Sequence[npt.NDArray[np.uint8]]) -> None:
        tensors = [torch.from_numpy(part) for part in parts]
        works = [
            dist.isend(tensors[rank], dst=rank, group=self.group) for rank in range(1, self.size)
        ]
        for work in works:
            if work is not None:
                work.wait()

    def receive(self, size: int, source: int = 0) -> npt.NDArray[np.uint8]:
        """So many bytes that another rank sends: this rank's part of :meth:`send`, if rank 0 does.

        Raises:
            RankFailedError: That rank has gone.
        """
        tensor = torch.empty(size, dtype=torch.uint8)
        with self._told(f"receiving from rank {source}"):
            self.attend(lambda: dist.recv(tensor, src=source, group=self.group))
        return tensor.numpy()

    def gather_on_node(self, own: bytes, name: str, seconds: float) -> list[bytes] | None:
        """What each rank of this node gives, in their order; on the node's leader, else None.

        Args:
            own: Of this rank.
            name: Of this exchange; a new one each time.
            seconds: How long the leader waits for the others (of `transfer_timeout_s`).

        Raises:
            RankFailedError: One has gone.
            DeadlineExceeded: One did not come.
        """
        leader = self.mates[0]
        if self.rank != leader:
            self.line.put(f"{name}/{self.rank}", str(len(own)).encode())
            tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            with self._told(f"sending to rank {leader}"):
                self.attend(lambda: dist.send(tensor, dst=leader, group=self.group))
            return None
        parts = [own]
        for mate in self.mates[1:]:
            key = f"{name}/{mate}"
            size = self.line.get(key, f"{name} of rank {mate}", seconds, "transfer_timeout_s")
            self.line.forget(key, readers=1)
            parts.append(self.receive(int(size), mate).tobytes())
        return parts

    @contextlib.contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """What torch says of a peer that is gone becomes the cause."""
        try:
            yield
        except RankFailedError:
            raise
        except RuntimeError as error:
            cause = self.echo(error, doing)
            raise cause from cause.__cause__ or error

    # --- failure ---------------------------------------------------------------------------------

    def echo(self, error: BaseException, doing: str) -> RankFailedError:
        """What to raise for a broken collective: the cause, once it is known."""
        cause = self.line.await_cause(self._config.heartbeat_timeout_s + 2)
        if cause is not None:
            return cause.as_error()
        return RankFailedError(f"rank {self.rank} lost a peer while {doing}: {error}")

    def fail(self, error: BaseException) -> BaseException:
        """Tell the others why this rank ends.

        Returns:
            `error`, or what it echoes: another rank's error that came first.
        """
        if isinstance(error, RankFailedError) and error.rank is not None:
            return error
        if is_echo(error):
            cause = self.line.await_cause(self._config.heartbeat_timeout_s + 2)
            if cause is not None and cause.rank != self.rank:
                return cause.as_error()
        cause = self.line.fail(error)
        if cause is not None and cause.rank != self.rank:
            return cause.as_error()
        return error

    def close(self) -> None:
        """Leave the groups that were made here. An existing default group stays the caller's."""
        self.line.part(seconds=_PART_TIMEOUT_S)
        self.line.close()
        # A peer that is gone makes torch raise here what everyone knows by now.
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(None if self._owns_default_group else self.group)
        self._store = None


def is_echo(error: BaseException) -> bool:
    """Whether an error is what torch says when a peer has gone in the middle of a collective."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or "gloo/" in str(error) or "NCCL" in str(error)
    )


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Do something beside; its thread does not keep the process from ending."""
    done: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                # What is current is so for each thread, and the optimizer may still be writing.
                torch.cuda.set_device(device)
                torch.cuda.synchronize(device)
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="gymrl-beside", daemon=True).start()
    return done


def _own_address() -> str:
    """The address from which the launcher's master is reached; loopback on one node."""
    local, size = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    master = os.environ.get("MASTER_ADDR")
    if master is None or (local is not None and local == size):
        return LOOPBACK
    try:
        family, kind, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: it asks the routing table
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={master!r} cannot be reached from here ({error}); "
            "set TorchrunConfig.address to this node's address",
            setting="address",
        ) from error
