import asyncio
import contextlib

import anyio
import pytest

from gymrl.errors import RolloutStreamError
from gymrl.rollout.merge import Ended, StreamMerge, merge_streams


class Source:
    """A stream whose items a test releases one by one, and which knows whether it was closed."""

    def __init__(self):
        self.closed = False
        self.taken = 0
        self._send, self._receive = anyio.create_memory_object_stream(100)

    def give(self, *items):
        for item in items:
            self._send.send_nowait(item)

    def end(self):
        self._send.close()

    async def stream(self):
        try:
            async with self._receive:
                async for item in self._receive:
                    if isinstance(item, BaseException):
                        raise item
                    self.taken += 1
                    yield item
        finally:
            self._send.close()
            self.closed = True


async def test_items_come_in_completion_order_with_their_label():
    slow, quick = Source(), Source()
    merged = merge_streams([("slow", slow.stream()), ("quick", quick.stream())])
    quick.give("q1")
    assert await anext(merged) == ("quick", "q1")
    slow.give("s1")
    assert await anext(merged) == ("slow", "s1")
    quick.give("q2")
    quick.end()
    assert await anext(merged) == ("quick", "q2")
    slow.end()
    assert [item async for item in merged] == []
    assert slow.closed
    assert quick.closed


async def test_one_stream_passes_through_in_order():
    source = Source()
    source.give(1, 2, 3)
    source.end()
    assert [item async for item in merge_streams([("only", source.stream())])] == [
        ("only", 1),
        ("only", 2),
        ("only", 3),
    ]


async def test_no_streams_are_an_empty_stream():
    assert [item async for item in merge_streams([])] == []


async def test_a_failing_stream_names_its_instance_and_chains_the_cause():
    bad, good = Source(), Source()
    cause = KeyError("x")
    bad.give(1, cause)
    merged = merge_streams([("bad", bad.stream()), ("good", good.stream())])
    assert await anext(merged) == ("bad", 1)
    with pytest.raises(RuntimeError, match=r"instance 'bad' failed: KeyError: 'x'") as caught:
        await anext(merged)
    assert caught.value.__cause__ is cause
    assert caught.value.instance == "bad"
    assert good.closed


async def test_rows_that_arrived_before_a_failure_are_delivered_first():
    bad, good = Source(), Source()
    good.give("g1", "g2")
    merge = StreamMerge()
    merge.add("good", good.stream())
    await anyio.wait_all_tasks_blocked()
    bad.give("b1", ValueError("broken"))
    merge.add("bad", bad.stream())
    await anyio.wait_all_tasks_blocked()
    assert [(await anext(merge)).item for _ in range(3)] == ["g1", "g2", "b1"]
    with pytest.raises(RolloutStreamError):
        await anext(merge)
    await merge.aclose()
    assert good.closed


async def test_leaving_early_closes_every_producer():
    one, two = Source(), Source()
    one.give(1, 2, 3)
    merged = merge_streams([("one", one.stream()), ("two", two.stream())])
    async with contextlib.aclosing(merged):
        async for _ in merged:
            break
    assert one.closed
    assert two.closed


async def test_a_slow_consumer_holds_the_producer_back():
    source = Source()
    source.give(*range(50))
    source.end()
    merged = merge_streams([("only", source.stream())], buffer=4)
    assert (await anext(merged)).item == 0
    await anyio.wait_all_tasks_blocked()
    assert source.taken <= 6
    assert [tagged.item async for tagged in merged] == list(range(1, 50))


async def test_a_producer_that_is_cancelled_from_elsewhere_does_not_hang_the_consumer():
    source = Source()
    source.give(asyncio.CancelledError())
    with anyio.fail_after(5):
        with pytest.raises(RolloutStreamError, match="instance 'x' failed: CancelledError"):
            [item async for item in merge_streams([("x", source.stream())])]


async def test_streams_may_join_while_the_merge_runs():
    first, second = Source(), Source()
    merge = StreamMerge()
    merge.add("first", first.stream())
    first.give(1)
    assert (await anext(merge)).item == 1
    merge.add("second", second.stream())
    first.end()
    second.give(2)
    assert (await anext(merge)).label == "second"
    assert merge.running == ("second",)
    second.end()
    assert [item async for item in merge] == []
    await merge.aclose()


async def test_a_merge_that_is_closed_under_its_consumer_ends_it_with_an_error():
    source = Source()
    merge = StreamMerge()
    merge.add("x", source.stream())
    async with anyio.create_task_group() as group:

        async def consume():
            with pytest.raises(RolloutStreamError, match="closed"):
                await anext(merge)

        group.start_soon(consume)
        await anyio.wait_all_tasks_blocked()
        await merge.aclose()
    assert source.closed


async def test_two_streams_of_one_instance_are_told_apart_until_both_end():
    first, second = Source(), Source()
    merge = StreamMerge()
    merge.add("x", first.stream())
    merge.add("x", second.stream())
    first.end()
    second.give(2)
    assert (await anext(merge)).item == 2
    second.end()
    assert [item async for item in merge] == []
    await merge.aclose()


async def test_a_consumer_of_events_goes_on_when_a_stream_fails():
    bad, good = Source(), Source()
    merge = StreamMerge()
    merge.add("bad", bad.stream())
    merge.add("good", good.stream())
    cause = KeyError("x")
    bad.give("b1", cause)
    assert await merge.next_event() == ("bad", "b1")
    assert await merge.next_event() == Ended("bad", cause)
    assert merge.running == ("good",)
    good.give("g1")
    good.end()
    assert await merge.next_event() == ("good", "g1")
    assert await merge.next_event() == Ended("good", None)
    assert await merge.next_event() is None
    await merge.aclose()


async def test_an_error_from_elsewhere_comes_after_what_arrived_before_it():
    source = Source()
    merge = StreamMerge()
    merge.add("x", source.stream())
    source.give(1, 2)
    await anyio.wait_all_tasks_blocked()
    merge.fail(ValueError("from elsewhere"))
    assert [(await anext(merge)).item for _ in range(2)] == [1, 2]
    with pytest.raises(ValueError, match="from elsewhere"):
        await anext(merge)
    await merge.aclose()
    assert source.closed


async def test_a_cancelled_wait_for_an_event_loses_none():
    source = Source()
    merge = StreamMerge()
    merge.add("x", source.stream())
    with anyio.move_on_after(0):
        await merge.next_event()
    source.give(1)
    assert await merge.next_event() == ("x", 1)
    await merge.aclose()
