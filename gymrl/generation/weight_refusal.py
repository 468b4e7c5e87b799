"""What becomes of a trainer's transfer that a generator does not take: its sender is told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio
import anyio.to_thread

from gymrl.generation.weights import GLOO_BACKEND, TransferWeights, WeightSource


@contextlib.asynccontextmanager
async def sender_told(source: WeightSource) -> AsyncIterator[None]:
    """Where the block fails or is cancelled, let the sender know why, in whatever process it waits.

    Args:
        source: Only a transfer by ``gymrl_gloo`` has a sender that can be told; its workers tell it
            what they meet themselves, and this the rest.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(source, TransferWeights) and source.backend == GLOO_BACKEND:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_tell, source, str(error) or type(error).__name__)
        raise


def _tell(source: TransferWeights, reason: str) -> None:
    # It brings torch, which a generator of servers by URL has no other use for.
    from gymrl.generation.weight_meeting import tell_refusal  # noqa: PLC0415

    tell_refusal(source, reason)
