"""Silence of a peer, counted in beats of this side's loop."""

import types

import anyio
import pytest

from gymrl.actors.expiry import fell_silent


@pytest.mark.parametrize(
    ("is_computing", "beats"), [(None, 4), (lambda: False, 4), (lambda: True, 16)]
)
async def test_a_peer_that_computes_is_given_four_times_as_long(is_computing, beats):
    channel = types.SimpleNamespace(received=0)
    counted = []
    assert await fell_silent(
        channel, 0.02, anyio.Event(), lambda: counted.append(1), is_computing=is_computing
    )
    assert len(counted) == beats


async def test_a_peer_that_shows_something_starts_the_count_anew():
    channel = types.SimpleNamespace(received=0)
    beats = []

    def beat():
        beats.append(1)
        channel.received = min(len(beats), 5)

    assert await fell_silent(channel, 0.02, anyio.Event(), beat)
    assert len(beats) == 9
