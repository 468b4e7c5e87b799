"""What each rank of the benchmark runs; rank 0 prints the result as JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

import gymrl.torchrun
from benchmarks.nodes.latency import latency_config, latency_rows, policy_server
from gymrl.torchrun import TorchrunConfig

GENERATIONS = 4


def main() -> None:
    """Two steps: one to warm up, one that counts."""
    torch.set_num_threads(1)
    latency_s, connections, tokens, groups = json.loads(sys.argv[1])
    with policy_server(os.environ["OWN_ADDRESS"]) as policy:
        config = TorchrunConfig(
            rollout=latency_config(
                policy, latency_s=latency_s, tokens=tokens, max_connections=connections
            )
        )
        with gymrl.torchrun.rollouts(config) as rollouts:
            rollouts.collect(latency_rows(4), num_generations=GENERATIONS)
            sent = _bytes_received()
            began = time.perf_counter()
            share = rollouts.collect(latency_rows(groups), num_generations=GENERATIONS)
            seconds = time.perf_counter() - began
            moved = _bytes_received() - sent
            samples = share.metrics["samples"]
            result = {
                "rollouts_per_s": samples / seconds,
                "seconds": seconds,
                "samples": samples,
                "bytes_received_per_token": moved / share.metrics["total_tokens"],
            }
    if rollouts.rank == 0:
        print(json.dumps(result), flush=True)


def _bytes_received() -> int:
    """Of this host, over its only cable."""
    with open("/proc/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == "eth0":
                return int(numbers.split()[0])
    return 0


if __name__ == "__main__":
    main()
