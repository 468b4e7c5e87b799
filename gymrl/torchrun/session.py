"""``rollouts(config)``: what every rank enters, and the shares that come out on each."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from gymrl.config import RolloutConfig
from gymrl.torchrun.ahead import Ahead, AheadPlan, Ordered, derived_seed
from gymrl.torchrun.config import TorchrunConfig
from gymrl.torchrun.cursor import RowCursor
from gymrl.torchrun.handover import Copies, Transfers
from gymrl.torchrun.shares import (
    Share,
    balance,
    decode_share,
    encode_share,
    global_metrics,
    num_tokens,
)
from gymrl.torchrun.site import Site
from gymrl.torchrun.staleness import staleness_metrics
from gymrl.torchrun.world import GroupWorld, LoneWorld, is_launched
from gymrl.types import RolloutGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    import torch

    from gymrl.config import SamplingParams
    from gymrl.scoring import ScoringConfig
    from gymrl.torchrun.handover import Handover

T = TypeVar("T")


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """What every rank is told of a step before its share comes."""

    sizes: list[int]
    metrics: dict[str, float]
    num_groups: int
    position: int
    pending: list[int]


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    groups: list[RolloutGroup]
    asked: list[int]
    metrics: dict[str, float]


def rollouts(
    config: TorchrunConfig | RolloutConfig,
    *,
    rows: Sequence[dict[str, Any]] | None = None,
    shuffle: bool = True,
    scoring: ScoringConfig | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> Rollouts:
    """Rollouts for every rank of this job; use it with ``with``, on every rank.

    In a process group that exists, in one made from torchrun's variables, or, where nobody
    launched anything, alone.

    Args:
        config: The job's; a `RolloutConfig` alone takes the defaults for the rest.
        rows: The data, for :meth:`Rollouts.take` and :meth:`Rollouts.stream`; the same on every
            rank.
        shuffle: Whether each pass over `rows` has an order of its own, decided by
            ``rollout.seed``.
        scoring: As for :class:`~gymrl.rollout.engine.RolloutEngine`.
        encode: The same.

    Raises:
        ConfigError: The configuration can't work.
        RankFailedError: On entering, and at any time later: another rank failed.
    """
    if isinstance(config, RolloutConfig):
        config = TorchrunConfig(rollout=config)
    return Rollouts(config, rows=rows, shuffle=shuffle, scoring=scoring, encode=encode)


class Rollouts:
    """See :func:`rollouts`.

    Its methods are collectives unless they say otherwise: every rank calls them, in the same order.

    When a rank raises inside the block, a rank or a node is gone, or the engine fails, every rank
    raises: the one that failed its own error, the others
    :class:`~gymrl.errors.RankFailedError` with that error as the cause. Ranks look for it four
    times a second, and wait nowhere without looking, save inside torch's own collectives, whose
    timeout is the group's.

    Attributes:
        config: The job's.
        rank: This rank.
        world_size: All ranks.
        version: How often weights were updated.
    """

    def __init__(
        self,
        config: TorchrunConfig,
        *,
        rows: Sequence[dict[str, Any]] | None,
        shuffle: bool,
        scoring: ScoringConfig | None,
        encode: Callable[[str], Sequence[int]] | None,
    ) -> None:
        self.config = config
        self.rank = 0
        self.world_size = 1
        self.version = 0
        self._options: dict[str, Any] = {"scoring": scoring, "encode": encode}
        self._cursor = None
        if rows is not None:
            self._cursor = RowCursor(rows, seed=config.rollout.seed or 0, shuffle=shuffle)
        self._handouts = 0
        self._updates = 0
        self._pending: list[int] = []
        self._world: GroupWorld | LoneWorld | None = None
        self._site: Site | None = None
        self._ahead: Ahead | None = None
        self._streams = 0
        self._handover: Handover | None = None

    # --- entering and leaving --------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._world is not None:
            raise RuntimeError("these rollouts are open already")
        self._world = GroupWorld(self.config) if is_launched() else LoneWorld()
        self.rank, self.world_size = self._world.rank, self._world.size
        self._site = Site(self.config, self._world, self._options)
        seconds = self.config.rollout.start_timeout_s + 30
        try:
            self._world.check_settings()
            self._handover = self._made_handover(self._world, self._site)
            self._site.open()
            self._world.barrier("the start of the workers", seconds, "rollout.start_timeout_s")
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def _made_handover(self, world: GroupWorld | LoneWorld, site: Site) -> Handover:
        if self.config.weight_transfer is None:
            return Copies(world, site)
        return Transfers(self.config, world, site)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            try:
                self._leave()
            except BaseException as fault:
                self._fail(fault)
                raise
            return
        self._fail(error)

    def _leave(self) -> None:
        """The orderly end: nothing is closed before every rank has come."""
        world = self._open_world
        seconds, setting = self.config.barrier_timeout_s, "barrier_timeout_s"
        world.barrier("the end of the block", seconds, setting)
        self._close_ahead()
        self._here.close_engine()
        world.barrier("the end of the workers", seconds, setting)
        self._here.close()
        assert self._handover is not None
        self._handover.close()
        self._world = None
        world.close()

    def _fail(self, error: BaseException) -> None:
        """Tell the others, end what is here, and raise what came first if that is not `error`."""
        world = self._open_world
        first = world.fail(error)
        try:
            self._close_ahead()
            self._here.close()
        finally:
            self._world = None
            world.close()
        if first is not error:
            raise first from first.__cause__

    def _close_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self._here.finish(ahead.aclose)

    @property
    def _open_world(self) -> GroupWorld | LoneWorld:
        if self._world is None:
            raise RuntimeError("these rollouts are not open: use them inside `with`")
        return self._world

    @property
    def _here(self) -> Site:
        if self._site is None:
            raise RuntimeError("these rollouts are not open: use them inside `with`")
        return self._site

    def check(self) -> None:
        """Return while every rank is well; cheap, and no collective.

        Raises:
            RankFailedError: One is not.
        """
        self._open_world.check()

    # --- rows ------------------------------------------------------------------------------------

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next rows of the data, the same on every rank. No communication.

        Raises:
            RuntimeError: `rollouts` was given no rows.
        """
        return self._data.take(count)

    @property
    def _data(self) -> RowCursor:
        if self._cursor is None:
            raise RuntimeError("there is no data: pass rows= to gymrl.torchrun.rollouts")
        return self._cursor

    # --- rollouts --------------------------------------------------------------------------------

    def collect(
        self,
        rows: Sequence[dict[str, Any]],
        *,
        num_generations: int = 1,
        sampling: SamplingParams | None = None,
        training: bool = True,
    ) -> Share:
        """Roll rows out and hand each rank its share: whole groups, balanced by tokens.

        Args:
            rows: One dictionary a prompt; rank 0's are what counts.
            num_generations: Attempts at each prompt; they are one group.
            sampling: The profile to use; None: the configuration's. Its seed, or the
                configuration's, decides each call's together with the number of the call.
            training: False for validation, which stays without the length penalty.

        Raises:
            GymrlError: On rank 0 what :meth:`RolloutEngine.run` raises.
            RankFailedError: On the other ranks then; on any where another rank failed.
            DeadlineExceeded: It took longer than `collect_timeout_s`.
        """
        call = self._handouts + 1

        def make() -> _Step:
            profile = self._seeded(sampling, call)
            seconds = self.config.collect_timeout_s
            return self._here.run(
                self._roll_out, rows, num_generations, profile, training, seconds=seconds
            )

        return self._hand_out(make)

    async def _roll_out(
        self,
        rows: Sequence[dict[str, Any]],
        num_generations: int,
        sampling: SamplingParams,
        training: bool,
    ) -> _Step:
        assert self._here.engine is not None
        stream = self._here.engine.stream(
            rows, num_generations=num_generations, sampling=sampling, training=training
        )
        async with contextlib.aclosing(stream) as groups:
            ordered = sorted([group async for group in groups], key=lambda group: group.index)
        asked = [self.version] * len(ordered)
        return _Step(groups=ordered, asked=asked, metrics=stream.progress.metrics())

    def _seeded(self, sampling: SamplingParams | None, *path: int) -> SamplingParams:
        """The profile with a seed of this call's own, where there is a seed at all."""
        profile = sampling or self.config.rollout.sampling
        seed = self.config.rollout.seed if profile.seed is None else profile.seed
        if seed is not None:
            profile = msgspec.structs.replace(profile, seed=derived_seed(seed, *path))
        return profile

    def stream(
        self,
        *,
        num_generations: int,
        groups_per_step: int,
        max_staleness: int = 1,
        sampling: SamplingParams | None = None,
    ) -> Iterator[Share]:
        """Shares of groups as they complete, while generation runs ahead of the trainer.

        Rows come from the data, without end: leave the loop when it is enough, on every rank at the
        same step. There is one stream at a time: the next one begins with what was asked for in the
        one before and not handed out, and ends that. With one :meth:`update_weights` a step, no token that is handed out was asked for
        more than `max_staleness` updates ago; 0 generates nothing ahead.

        Args:
            num_generations: Attempts at each prompt.
            groups_per_step: Groups of all ranks in a step.
            max_staleness: In weight updates.
            sampling: As for :meth:`collect`.

        Raises:
            GymrlError: As :meth:`collect`.
            RuntimeError: `rollouts` was given no rows; or another stream was begun meanwhile.
        """
        data = self._data
        ahead: Ahead | None = None
        self._close_ahead()
        self._streams += 1
        number = self._streams
        if self.rank == 0:
            assert self._here.engine is not None
            ahead = Ahead(
                self._here.engine,
                data,
                AheadPlan(
                    num_generations=num_generations,
                    groups_per_step=groups_per_step,
                    max_staleness=max_staleness,
                    sampling=self._seeded(sampling, 0),
                ),
                again=self._pending,
            )
            self._ahead = ahead
        try:
            while number == self._streams:
                yield self._hand_out(lambda: self._next_of(ahead), ahead)
            raise RuntimeError("another stream was begun, which goes on with this one's groups")
        finally:
            if number == self._streams:
                self._close_ahead()

    def _next_of(self, ahead: Ahead | None) -> _Step:
        assert ahead is not None
        orders: list[Ordered] = self._here.run(
            ahead.next_step, self.version, seconds=self.config.collect_timeout_s
        )
        groups = [
            msgspec.structs.replace(order.group, index=index)
            for index, order in enumerate(orders)
            if order.group is not None
        ]
        return _Step(groups=groups, asked=[order.version for order in orders], metrics={})

    def _hand_out(self, make: Callable[[], _Step], ahead: Ahead | None = None) -> Share:
        world = self._open_world
        self._handouts += 1
        if world.rank != 0:
            assert isinstance(world, GroupWorld)
            return self._receive(world)
        step = make()
        max_model_len = self._here.engine.max_model_len if self._here.engine is not None else None
        metrics = global_metrics(step.groups, max_model_len) | step.metrics
        metrics |= staleness_metrics(step.groups, step.asked, self.version)
        parts = [
            ([step.groups[i] for i in share], [step.asked[i] for i in share])
            for share in balance([num_tokens(group) for group in step.groups], world.size)
        ]
        self._pending = ahead.pending if ahead is not None else self._pending
        if isinstance(world, GroupWorld):
            arrays = [encode_share(*part) for part in parts]
            header = _Header(
                sizes=[array.nbytes for array in arrays],
                metrics=metrics,
                num_groups=len(step.groups),
                position=self._cursor.position if self._cursor is not None else 0,
                pending=self._pending,
            )
            world.line.put(f"share/{self._handouts}", msgspec.msgpack.encode(header))
            world.send(arrays)
        return self._share(*parts[0], metrics, len(step.groups))

    def _receive(self, world: GroupWorld) -> Share:
        key = f"share/{self._handouts}"
        seconds = self.config.collect_timeout_s
        what = f"its share of step {self._handouts}"
        header = msgspec.msgpack.decode(
            world.line.get_in_step(key, what, seconds, "collect_timeout_s"), type=_Header
        )
        world.line.forget(key, readers=world.size - 1)
        if self._cursor is not None:
            self._cursor.position = header.position
        self._pending = header.pending
        groups, asked = decode_share(world.receive(header.sizes[world.rank]))
        return self._share(groups, asked, header.metrics, header.num_groups)

    def _share(
        self,
        groups: list[RolloutGroup],
        asked: list[int],
        metrics: dict[str, float],
        num_groups: int,
    ) -> Share:
        return Share(
            groups=tuple(groups),
            metrics=metrics,
            num_groups=num_groups,
            version=self.version,
            asked=tuple(asked),
        )

    # --- weights and state -----------------------------------------------------------------------

    def update_weights(self, model: torch.nn.Module, *, advance: bool = True) -> None:
        """Have every generator serve the model's parameters from the next token on.

        Parameters may be replicated or sharded by FSDP2. Each node's local rank 0 hands them to its
        own node's generators, so that nothing large crosses the network but what gathering takes.

        Args:
            model: Its names and shapes are those of the generator's checkpoint.
            advance: False: these are the weights of the version at hand, for generators that do not
                have them yet (after a resume).

        Raises:
            WeightUpdateError: On the rank whose generator did not take them.
            RankFailedError: On the others.
        """
        world = self._open_world
        assert self._handover is not None
        world.check()
        self.version += int(advance)
        self._updates += 1
        self._handover.give(model, str(self.version))
        name = f"weight update {self._updates}"
        world.barrier(name, self.config.barrier_timeout_s, "barrier_timeout_s")
        self._handover.given()

    def state_dict(self) -> dict[str, Any]:
        """Where the rollouts are, as plain data; the same on every rank. No communication.

        ``position`` in the data, ``pending`` places whose groups a stream had asked for and not
        handed out, the number of ``calls`` (which decides seeds), the weights' ``version``.
        """
        return {
            "calls": self._handouts,
            "version": self.version,
            "position": self._cursor.position if self._cursor is not None else 0,
            "pending": list(self._pending),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`, on every rank; before the first call. No communication.

        Load the model too, and hand it out with ``update_weights(model, advance=False)``.
        """
        self._handouts = int(state["calls"])
        self.version = int(state["version"])
        self._pending = [int(place) for place in state["pending"]]
        if self._cursor is not None:
            self._cursor.position = int(state["position"])
