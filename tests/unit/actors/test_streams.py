"""Windows of streams, and how readers and producers meet."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.actors.streams import Window


def test_one_item_may_always_be_under_way():
    window = Window(4, 100)
    assert window.is_open
    window.take(1_000_000)
    assert not window.is_open
    window.credit(1)
    assert window.is_open


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10), st.integers(1, 1000), st.lists(st.integers(0, 400), max_size=60))
def test_a_window_is_never_exceeded_by_more_than_one_item(items, size, sizes):
    window = Window(items, size)
    under_way: list[int] = []
    for sent in sizes:
        while not window.is_open:
            window.credit(1)
            under_way.pop(0)
        before = sum(under_way)
        assert len(under_way) < items
        assert not under_way or before < size
        window.take(sent)
        under_way.append(sent)


async def test_a_waiting_producer_goes_on_with_credit():
    window = Window(2, 100)
    window.take(1)
    window.take(1)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(window.wait)
            await anyio.lowlevel.checkpoint()
            window.credit(1)
    assert window.is_open


async def test_credit_for_more_than_was_sent_is_ignored():
    window = Window(1, 1)
    window.credit(100)
    window.take(5)
    assert not window.is_open
    with anyio.move_on_after(0.01) as scope:
        await window.wait()
    assert scope.cancelled_caught
    window.credit(1)
    await window.wait()


@pytest.mark.parametrize("items", [1, 3])
async def test_a_window_of_items_counts_items(items):
    window = Window(items, 1 << 30)
    for _ in range(items):
        assert window.is_open
        window.take(0)
    assert not window.is_open
