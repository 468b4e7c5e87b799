"""Three roads from a trainer's tensors to a vLLM engine of this process.

A call is sampling meanwhile. What counts is the time from the tensors until they serve, and how long
that call stands still.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread
import safetensors.torch
import torch

from benchmarks.comparison import Comparison, Turns, take_turns
from gymrl.config import GenerationConfig, SamplingParams, VllmConfig
from gymrl.generation.vllm import VllmGenerator
from gymrl.generation.weight_transfer import WeightSender, weight_sender
from gymrl.generation.weights import (
    GLOO_BACKEND,
    DirectoryWeights,
    TensorWeights,
    WeightSource,
)

SAVED = "saved and loaded"
MARGIN = 3
"""Tokens that are waited for before and after an update."""


class Roads:
    """An engine, the weights that it is given again and again, and what is measured.

    Args:
        generator: The engine.
        state: The trainer's tensors.
        directory: Where a checkpoint is saved.
        sender: For transfers.
    """

    def __init__(
        self,
        generator: VllmGenerator,
        state: dict[str, torch.Tensor],
        directory: Path,
        sender: WeightSender,
    ) -> None:
        self._generator = generator
        self._state = state
        self._directory = directory
        self._sender = sender
        self._versions = itertools.count(1)
        self.still_s: dict[str, list[float]] = {}

    async def saved(self) -> None:
        """Write a checkpoint; the engine reads it."""
        path = self._directory / str(next(self._versions) % 2)
        path.mkdir(exist_ok=True)
        await anyio.to_thread.run_sync(
            safetensors.torch.save_file, self._state, path / "model.safetensors"
        )
        await self._update(DirectoryWeights(path=str(path)))

    async def tensors(self) -> None:
        """Hand arrays over in shared memory."""
        await self._update(await anyio.to_thread.run_sync(TensorWeights.of, self._state))

    async def transfer(self) -> None:
        """Send them over vLLM's weight transfer, by gloo."""
        async with anyio.create_task_group() as group:
            weights = self._sender.weights(self._state)
            group.start_soon(anyio.to_thread.run_sync, self._sender.send, self._state)
            await self._update(weights)

    async def _update(self, source: WeightSource) -> None:
        await self._generator.update_weights(source, str(next(self._versions)))

    async def measured(self, road: Callable[[], Awaitable[None]]) -> float:
        """Seconds of one update under a running call, and how long that call stood still."""
        seen: list[float] = []

        async def until(count: int) -> None:
            while len(seen) < count:  # noqa: ASYNC110 - what is waited for is in another process
                await anyio.sleep(0.001)

        sampling = SamplingParams(max_tokens=400, ignore_eos=True)
        async with anyio.create_task_group() as group:
            group.start_soon(
                lambda: self._generator.generate(
                    [1, 80, 81, 2], sampling, on_token=lambda *_: seen.append(time.perf_counter())
                )
            )
            await until(MARGIN)
            began = time.perf_counter()
            await road()
            seconds = time.perf_counter() - began
            await until(len(seen) + MARGIN)
            group.cancel_scope.cancel()
        gaps = [after - before for before, after in itertools.pairwise(seen)]
        self.still_s.setdefault(road.__name__, []).append(max(gaps))
        return seconds


async def measure(model: str, rounds: int) -> list[Comparison]:
    """Every road beside a checkpoint that is saved and loaded."""
    torch.set_num_threads(1)
    config = GenerationConfig(
        model=model,
        backend="vllm",
        max_model_len=512,
        num_threads=1,
        vllm=VllmConfig(engine_args={"weight_transfer_config": {"backend": GLOO_BACKEND}}),
    )
    generator, _ = await anyio.to_thread.run_sync(VllmGenerator.load, config)
    # After the engine: gloo's threads don't survive its fork.
    sender = weight_sender("gloo")
    try:
        with tempfile.TemporaryDirectory() as directory:
            state = safetensors.torch.load_file(f"{model}/model.safetensors")
            roads = Roads(generator, state, Path(directory), sender)
            found = {
                road.__name__: await take_turns(
                    lambda road=road: roads.measured(road),
                    {SAVED: lambda: roads.measured(roads.saved)},
                    rounds,
                )
                for road in (roads.transfer, roads.tensors)
            }
    finally:
        sender.close()
        await generator.close()
    size = sum(tensor.nbytes for tensor in state.values())
    return [_comparison(name, turns, roads.still_s, size) for name, turns in found.items()]


NAMES = {"transfer": "sent by gloo", "tensors": "handed over in shared memory"}


def _comparison(name: str, turns: Turns, still_s: dict[str, list[float]], size: int) -> Comparison:
    still = {road: sorted(seconds)[len(seconds) // 2] for road, seconds in still_s.items()}
    return Comparison(
        name=f"weights {NAMES[name]}",
        unit="s",
        sides=turns.medians(own=NAMES[name]),
        ratio=f"times faster than {SAVED}",
        value=turns.times_faster(SAVED),
        best=turns.best_faster(SAVED),
        target=1.0,
        at_least=True,
        note=(
            f"{size / 1e6:,.0f} MB; a running call stands still for {still[name]:.2f} s, where "
            f"they are {SAVED} for {still['saved']:.2f} s"
        ),
    )
