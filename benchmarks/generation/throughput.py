"""Tokens a second through the server beside the same engine asked directly, and time to ready.

Both run in one process, on one generator, with the same prompts, seeds and lengths; the requests
come from this process over loopback HTTP, as agents' do.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Awaitable
from pathlib import Path

import aiohttp
import anyio
import msgspec

from benchmarks.comparison import Comparison, take_turns
from gymrl.actors import ActorHandle, spawn
from gymrl.concurrency import gather_bounded
from gymrl.config import GenerationConfig, SamplingParams
from gymrl.generation.service import GenerationService


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is generated: `num_prompts` at once, `num_tokens` each."""

    name: str
    model: str
    num_prompts: int
    num_tokens: int
    batch_size: int
    rounds: int
    target: float


class MeasuredService(GenerationService):
    """The service, which can also be asked without HTTP."""

    async def processor_s(self) -> float:
        """Processor seconds of this process so far: what a busy machine does not stretch."""
        return time.process_time()

    async def bare(self, contents: list[str], num_tokens: int) -> float:
        """Seconds to generate `num_tokens` after each prompt, by the generator alone."""
        chat = self._policy.chat
        prompts = [chat.render([{"role": "user", "content": content}]) for content in contents]
        started = time.perf_counter()
        await gather_bounded(
            lambda item: self._generator.generate(
                item[1], SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=item[0])
            ),
            enumerate(prompts),
        )
        return time.perf_counter() - started


def _contents(load: Load) -> list[str]:
    return [
        f"Tell me about number {number}, and then some more." for number in range(load.num_prompts)
    ]


async def _served(session: aiohttp.ClientSession, base_url: str, load: Load) -> float:
    async def one(item: tuple[int, str]) -> None:
        seed, content = item
        body = {
            "input": content,
            "max_output_tokens": load.num_tokens,
            "ignore_eos": True,
            "seed": seed,
        }
        url = f"{base_url}/responses"
        async with session.post(url, data=msgspec.json.encode(body)) as answer:
            item_ = msgspec.json.decode(await answer.read())["output"][-1]
            if len(item_["generation_token_ids"]) != load.num_tokens:
                raise SystemExit(f"{load.name}: {len(item_['generation_token_ids'])} tokens came")

    started = time.perf_counter()
    await gather_bounded(one, enumerate(_contents(load)))
    return time.perf_counter() - started


async def measure(load: Load) -> list[Comparison]:
    """Throughput and time to ready of one model."""
    config = GenerationConfig(
        model=load.model, max_batch_size=load.batch_size, num_threads=1, max_model_len=1024
    )
    started = time.perf_counter()
    async with spawn(MeasuredService, config=config) as service:
        endpoint = await service.call("start")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await _served(session, endpoint.base_url, _first_token(load))
            ready_s = time.perf_counter() - started
            throughput = await _throughput(service, session, endpoint.base_url, load)
    loading_s = await _loading_s(load.model)
    ready = Comparison(
        name=f"time to ready, {load.name}",
        unit="s",
        sides={"from spawn to the first answer": ready_s, "transformers loads it": loading_s},
        ratio="the first by the second",
        value=ready_s / loading_s,
        target=2.0,
        at_least=False,
    )
    return [*throughput, ready]


def _first_token(load: Load) -> Load:
    return msgspec.structs.replace(load, num_prompts=1, num_tokens=1)


async def _throughput(
    service: ActorHandle, session: aiohttp.ClientSession, base_url: str, load: Load
) -> list[Comparison]:
    processor: dict[str, list[float]] = {"served": [], "bare": []}

    async def counted(side: str, seconds: Awaitable[float]) -> float:
        before = await service.call("processor_s")
        wall = await seconds
        processor[side].append(await service.call("processor_s") - before)
        return wall

    turns = await take_turns(
        lambda: counted("served", _served(session, base_url, load)),
        {
            "bare engine": lambda: counted(
                "bare", service.call("bare", _contents(load), load.num_tokens)
            )
        },
        load.rounds,
    )
    count = load.num_prompts * load.num_tokens
    note = (
        f"{load.num_prompts} prompts at once, {load.num_tokens} tokens each, batches of "
        f"{load.batch_size}"
    )
    wall = Comparison(
        name=f"tokens a second, {load.name}",
        unit="tokens/s",
        sides=turns.rates(count, own="through the server"),
        ratio="through the server by the bare engine",
        value=turns.times_faster("bare engine"),
        best=turns.best_faster("bare engine"),
        target=load.target,
        at_least=True,
        note=note,
    )
    # The first turn of each warms up.
    served, bare = (statistics.median(processor[side][1:]) for side in ("served", "bare"))
    busy = Comparison(
        name=f"tokens a processor second, {load.name}",
        unit="tokens/s",
        sides={"through the server": count / served, "bare engine": count / bare},
        ratio="through the server by the bare engine",
        value=bare / served,
        target=load.target,
        at_least=True,
        note="of the process that holds the model, whatever else the machine does",
    )
    return [wall, busy]


_LOAD = """
import sys, torch, transformers
from gymrl.generation.models import resolve_model
source = resolve_model(sys.argv[1])
transformers.AutoTokenizer.from_pretrained(source)
transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
"""


async def _loading_s(model: str) -> float:
    """Seconds of a new interpreter that only loads model and tokenizer."""
    started = time.perf_counter()
    await anyio.run_process([sys.executable, "-c", _LOAD, model], cwd=Path(__file__).parents[2])
    return time.perf_counter() - started
