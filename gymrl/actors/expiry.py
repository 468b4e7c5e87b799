"""Telling a peer that has fallen silent from one that this side has not listened to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

    from gymrl.actors.channel import Channel

_BEATS = 4
BUSY_PATIENCE = 4
"""So many beats of a peer that computes count as one of silence."""


async def fell_silent(
    channel: Channel,
    seconds: float,
    lost: anyio.Event,
    beat: Callable[[], None] | None = None,
    every_s: float | None = None,
    is_computing: Callable[[], bool] | None = None,
) -> bool:
    """Watch a link until nothing has come over it for `seconds`, or it is lost.

    Silence is counted in beats of this side's own loop, each of which must pass without a byte.
    A clock alone would take a pause of this side (a training step in the loop's thread, a process
    that was stopped and goes on) for the peer's silence, while what the peer sent lies unread.

    Args:
        channel: The link.
        seconds: So much silence is too much.
        lost: Set when the link is lost.
        beat: Called at every beat, to make the peer show that it is there.
        every_s: Longest time between beats; never more than a quarter of `seconds`.
        is_computing: Asked at every beat whether the peer has computed since the last one. It may
            hold the interpreter by one long step, so such a beat counts a quarter. None: unknown.

    Returns:
        Whether the peer fell silent; False when the link was lost before.
    """
    between = min(every_s or math.inf, seconds / _BEATS)
    allowed = math.ceil(seconds / between)
    received, silent = channel.received, 0.0
    while not lost.is_set():
        if beat is not None:
            beat()
        with anyio.move_on_after(between):
            await lost.wait()
        is_busy = is_computing is not None and is_computing()
        if channel.received != received:
            received, silent = channel.received, 0.0
        else:
            silent += 1 / BUSY_PATIENCE if is_busy else 1.0
        if silent >= allowed and not lost.is_set():
            return True
    return False
