"""How a model's parameters get from the ranks of a node to its generators.

As copies (:class:`Copies`): the whole model in the node's memory, handed over in shared memory. Any
generator takes them, and one that is started again gets them again.

By transfer (:class:`Transfers`, ``TorchrunConfig.weight_transfer``): the node's local rank 0 sends
tensor by tensor to its vLLM engines, which all take at once, and the other ranks take part in
gathering what is sharded; nothing keeps the whole model. By CUDA IPC every rank shows the tensors
on its own GPU, and the engines read them there.
"""

from __future__ import annotations

import concurrent.futures
import functools
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from gymrl.errors import ActorError, ConfigError, WeightUpdateError
from gymrl.generation.weight_transfer import take_part, weight_sender
from gymrl.generation.weights import TensorWeights, TransferWeights
from gymrl.torchrun.weights import named_tensors, whole_parameters
from gymrl.torchrun.world import in_thread

if TYPE_CHECKING:
    from concurrent.futures import Future

    from gymrl.generation.weight_transfer import Transfer, WeightSender
    from gymrl.torchrun.config import TorchrunConfig
    from gymrl.torchrun.site import Site
    from gymrl.torchrun.world import GroupWorld, LoneWorld

    Tensors = dict[str, torch.Tensor]

# A side whose other side has failed ends at once; what it says is worth so long a wait.
_LAST_WORD_S = 5.0


class Handover(Protocol):
    """Brings weights to the generators of this node."""

    def give(self, model: torch.nn.Module, version: str) -> None:
        """Have them serve the model's parameters; on every rank.

        When it returns on every rank, they do.

        Raises:
            WeightUpdateError: They were not taken.
            RankFailedError: Another rank failed.
        """
        ...

    def given(self) -> None:
        """Every rank has returned from :meth:`give`."""
        ...

    def close(self) -> None:
        """Let go of everything; the generators have ended."""
        ...


class Copies:
    """Hands copies over; see the module.

    Args:
        world: The ranks.
        site: What this rank holds.
    """

    def __init__(self, world: GroupWorld | LoneWorld, site: Site) -> None:
        self._world = world
        self._site = site

    def give(self, model: torch.nn.Module, version: str) -> None:
        """See :class:`Handover`."""
        node = self._site.node
        tensors = self._world.attend(lambda: whole_parameters(model, keep=node is not None))
        if node is not None:
            self._site.run(node.update_weights, TensorWeights.of(tensors), version)

    def given(self) -> None:
        """Nothing was borrowed."""

    def close(self) -> None:
        """Nothing is held."""


class Transfers:
    """Has tensors sent; see the module.

    Args:
        config: Of the job.
        world: The ranks.
        site: What this rank holds.

    Raises:
        ConfigError: There is no GPU here, and the transfer is between GPUs.
    """

    def __init__(self, config: TorchrunConfig, world: GroupWorld | LoneWorld, site: Site) -> None:
        assert config.weight_transfer is not None
        assert config.rollout.generation is not None
        self._transfer: Transfer = config.weight_transfer
        if self._transfer != "gloo" and not torch.cuda.is_available():
            raise ConfigError(
                f"weight_transfer={self._transfer!r} is from GPU to GPU, and torch sees none on rank "
                f"{world.rank}; use gloo, or leave it out",
                setting="weight_transfer",
            )
        self._make_sender = functools.partial(
            weight_sender,
            self._transfer,
            num_engines=config.per_node.generators,
            num_workers=config.rollout.generation.vllm.tensor_parallel_size,
            timeout_s=config.transfer_timeout_s,
        )
        self._seconds = config.transfer_timeout_s
        self._world = world
        self._site = site
        self._sender: WeightSender | None = None
        self._count = 0

    def give(self, model: torch.nn.Module, version: str) -> None:
        """See :class:`Handover`."""
        self._count += 1
        state = named_tensors(model)
        if self._transfer == "ipc":
            weights = self._shown_by_all(self._open_sender(), state)
        elif self._site.node is not None:
            weights = self._open_sender().weights(state)
        else:
            weights = None
            self._world.attend(lambda: take_part(state))
        if weights is not None:
            self._deliver(weights, state, version)

    def _open_sender(self) -> WeightSender:
        if self._sender is None:
            self._sender = self._make_sender()
        return self._sender

    def _shown_by_all(self, sender: WeightSender, state: Tensors) -> TransferWeights | None:
        own = self._world.attend(lambda: sender.weights(state))
        return gather_shown(self._world, own, f"shown {self._count}", self._seconds)

    def _deliver(self, weights: TransferWeights, state: Tensors, version: str) -> None:
        node, sender = self._site.node, self._sender
        assert node is not None
        assert sender is not None
        taking = self._site.start(node.update_weights, weights, version)
        sending = in_thread(lambda: sender.send(state))
        try:
            self.until_both(sending, taking, version)
        except BaseException as error:
            taking.cancel()
            sender.refuse(error)
            # One that is still in a collective is left behind, and ends with the process.
            if concurrent.futures.wait([sending], _LAST_WORD_S).done:
                sender.close()
            else:
                self._sender = None
            raise

    def until_both(self, sending: Future[None], taking: Future[None], version: str) -> None:
        """Wait until the trainer has sent and the engines have taken, or one of the two failed.

        Args:
            sending: The trainer's side.
            taking: The engines'.
            version: Of the weights.

        Raises:
            WeightUpdateError: They were not taken.
            ActorDiedError: An engine died.
            RankFailedError: Another rank failed.
        """
        waiting, seconds = [sending, taking], None
        while waiting and self._site.wait(waiting, seconds):
            if taking.done() and not (sending.done() and sending.exception()):
                taking.result()
            if sending.done() and sending.exception():
                seconds = _LAST_WORD_S
            waiting = [future for future in waiting if not future.done()]
        try:
            sending.result()
        except WeightUpdateError as error:
            met = taking.exception() if taking.done() else None
            if isinstance(met, ActorError | WeightUpdateError) and _has_died(met):
                raise met from error
            they_say = "" if met is None else f"; {met}"
            fields = error.fields | (met.fields if isinstance(met, WeightUpdateError) else {})
            raise WeightUpdateError(
                f"weights {version!r} did not reach the generators of this node: {error}{they_say}",
                **fields | {"version": version},
            ) from error

    def given(self) -> None:
        """Tensors that engines read where they are may change again."""
        if self._transfer == "ipc" and self._sender is not None:
            self._sender.close()

    def close(self) -> None:
        """See :class:`Handover`."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


def _has_died(met: ActorError | WeightUpdateError) -> bool:
    """Whether a generator is gone; else it has lost its trainer, which may echo another rank's end."""
    return isinstance(met, ActorError) or met.serving is None


def gather_shown(
    world: GroupWorld | LoneWorld, own: TransferWeights, name: str, seconds: float
) -> TransferWeights | None:
    """What all ranks of this node show of the same tensors, as one.

    Args:
        world: The ranks.
        own: What this one shows.
        name: Of this exchange; a new one each time.
        seconds: How long ranks wait for each other.

    Returns:
        On the node's local rank 0; None on the others.

    Raises:
        WeightUpdateError: They show different tensors.
        RankFailedError: One is gone.
    """
    # It brings CUDA's side of torch.
    from gymrl.generation.gpu_transfer import merged  # noqa: PLC0415

    parts = world.gather_on_node(msgspec.msgpack.encode(own), name, seconds)
    if parts is None:
        return None
    return merged([msgspec.msgpack.decode(part, type=TransferWeights) for part in parts])
