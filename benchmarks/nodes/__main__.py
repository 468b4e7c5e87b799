"""Rollouts a second over 1, 2 and 4 hosts, where the environments' latency is what limits.

Each host runs so many episodes at a time (a worker's connections), so that twice the hosts should
give twice the rollouts. Hosts are network namespaces of this machine (see :mod:`hosts`), which
share its cores. Run ``python -m benchmarks.nodes``; prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

from benchmarks.nodes.hosts import hosts, why_not

LATENCY_S = 2.0
CONNECTIONS = 32
TOKENS = 512
ROUNDS = 4  # of episodes one after the other on one host
GENERATIONS = 4


def measure(count: int) -> dict[str, float]:
    """One job over so many hosts; the work grows with them."""
    groups = CONNECTIONS * ROUNDS * count // GENERATIONS
    arguments = json.dumps([LATENCY_S, CONNECTIONS, TOKENS, groups])
    with tempfile.TemporaryDirectory() as directory, hosts(count) as made:
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(Path(directory, "out").open("w+", encoding="utf-8"))
            log = stack.enter_context(Path(directory, "log").open("w+", encoding="utf-8"))
            script = ["-m", "benchmarks.nodes.job", arguments]
            launched = [host.launch(count, script, output, log) for host in made]
            codes = [process.wait(timeout=300) for process in launched]
            output.seek(0)
            log.seek(0)
            if any(codes):
                raise SystemExit(log.read()[-5000:])
            result: dict[str, float] = json.loads(output.read().strip().splitlines()[-1])
            return result


def main() -> None:
    """Measure, and say how well it scales."""
    reason = why_not()
    if reason is not None:
        raise SystemExit(reason)
    results = {count: measure(count) for count in (1, 2, 4)}
    alone = results[1]["rollouts_per_s"]
    print(
        json.dumps(
            {
                "settings": {
                    "latency_s": LATENCY_S,
                    "connections_per_host": CONNECTIONS,
                    "tokens": TOKENS,
                },
                "hosts": results,
                "speedup": {n: result["rollouts_per_s"] / alone for n, result in results.items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
