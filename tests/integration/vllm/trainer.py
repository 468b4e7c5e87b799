"""A trainer in a process of its own, which sends weights to engines; and how a test has it send.

    python -m tests.integration.vllm.trainer FIRST SECOND TRANSFER NUM_ENGINES NUM_WORKERS

It says that it is ready, and reads orders, one a line; for each it writes what ``update_weights`` takes, sends, and writes how
that ended.
"""

import os
import signal
import subprocess
import sys
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import safetensors.torch
import torch

from gymrl.errors import WeightUpdateError
from gymrl.generation.weight_transfer import WeightSender, weight_sender
from gymrl.generation.weights import TransferWeights


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to send.

    Attributes:
        model: Its place among the two.
        dtype: What the values are cast to.
        cut: A tensor of which only five rows are sent.
        dies_after: The process ends, without a word, after so many tensors.
        stalls_after: It sends no more after so many tensors, until it is told to go on.
        with_new_sender: The sender at hand has lost its workers.
    """

    model: int
    dtype: str = "float32"
    cut: str | None = None
    dies_after: int | None = None
    stalls_after: int | None = None
    with_new_sender: bool = False


class Faulty(dict[str, torch.Tensor]):
    """Weights whose owner comes to grief while they are sent."""

    order: Order

    def values(self):
        for number, tensor in enumerate(super().values()):
            if number == self.order.dies_after:
                os._exit(1)
            if number == self.order.stalls_after:
                signal.pause()
            yield tensor


def carry_out(order: Order, sender: WeightSender, models: list[str], device: str) -> str:
    state = Faulty(safetensors.torch.load_file(f"{models[order.model]}/model.safetensors"))
    for name, tensor in state.items():
        state[name] = tensor.to(device, getattr(torch, order.dtype))
    if order.cut is not None:
        state[order.cut] = state[order.cut][:5]
    write(sender.weights(state))
    state.order = order
    try:
        sender.send(state)
    except WeightUpdateError as error:
        return str(error)
    return "sent"


def write(answer: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGUSR1, lambda *_: None)  # ends a pause
    models, transfer = sys.argv[1:3], sys.argv[3]
    num_engines, num_workers = map(int, sys.argv[4:6])
    device = "cpu" if transfer == "gloo" else "cuda"
    sender: WeightSender | None = None
    write("ready")
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        if sender is None or order.with_new_sender:
            sender = weight_sender(
                transfer, num_engines=num_engines, num_workers=num_workers, timeout_s=30
            )
        write(carry_out(order, sender, models, device))


class Trainer:
    """The process, as a test sees it. Use it as a context manager.

    Args:
        models: Directories of the two.
        num_engines: That take the weights together.
        num_workers: Of each.
        transfer: By which it sends.
    """

    def __init__(
        self,
        models: tuple[str, str],
        num_engines: int = 1,
        num_workers: int = 1,
        transfer: str = "gloo",
    ) -> None:
        arguments = [*models, transfer, str(num_engines), str(num_workers)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.vllm.trainer", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> "Trainer":
        assert self.process.stdout.readline() == b'"ready"\n'
        return self

    def __exit__(self, *exc_info) -> None:
        self.process.stdin.close()
        self.process.__exit__(*exc_info)

    async def begin(self, order: Order) -> TransferWeights:
        """Have it send; what engines must be told."""

        def ask() -> bytes:
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()
            return self.process.stdout.readline()

        return msgspec.json.decode(await anyio.to_thread.run_sync(ask), type=TransferWeights)

    def go_on(self) -> None:
        """To one that stalls."""
        self.process.send_signal(signal.SIGUSR1)

    async def outcome(self) -> str:
        """How that ended: ``sent``, or why not."""
        return msgspec.json.decode(await anyio.to_thread.run_sync(self.process.stdout.readline))

    async def send(self, generator, order: Order, version: str, **options) -> None:
        """All of it: have it send, have `generator` take it."""
        await generator.update_weights(await self.begin(order), version, **options)
        assert await self.outcome() == "sent"


class Unchecked(TransferWeights, frozen=True, tag="transfer"):
    """As of a backend that does not tell what it brings."""

    def offered(self) -> None:
        return None


def unchecked(weights: TransferWeights) -> TransferWeights:
    """The same, so that faults are found in the model alone."""
    return Unchecked(**msgspec.structs.asdict(weights))


if __name__ == "__main__":
    main()
