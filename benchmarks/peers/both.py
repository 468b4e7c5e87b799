"""Both peers, where they are installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

from benchmarks.peers.process import Peer, installed


@contextlib.asynccontextmanager
async def peers(*scripts: str) -> AsyncIterator[list[Peer | None]]:
    """Peers that run but have prepared nothing; None for each where they are not installed."""
    if not installed():
        print("without peers: run scripts/bench-peers to compare with them", file=sys.stderr)
        yield [None for _ in scripts]
        return
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Peer(script)) for script in scripts]
