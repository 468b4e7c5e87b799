"""Ranks that don't call the same methods in the same order; threads stand for their processes."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from gymrl.errors import RankFailedError
from gymrl.torchrun.line import StoreLine

LONG_S = 600.0  # a wait that ends so is found by the test's own limit


@pytest.fixture
def lines():
    """Three ranks of a job."""
    seconds = timedelta(seconds=30)
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=seconds)
    made = []
    for rank in range(3):
        client = TCPStore(
            "127.0.0.1", master.port, is_master=False, wait_for_workers=False, timeout=seconds
        )
        client.set(f"where/{rank}", f"host {rank}")
        client.set(f"beat/{rank}", "0")
        made.append(StoreLine(client, rank, 3, f"host {rank}", 60, step_s=0.05))
    yield made
    for line in made:
        line.close()


def play(lines, *parts):
    """Each rank goes through its part; what it raised."""
    errors = [None] * len(lines)

    def run(rank):
        try:
            for step in parts[rank]:
                step(lines[rank])
        except RankFailedError as error:
            errors[rank] = error
            lines[rank].fail(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(lines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def barrier(name):
    return lambda line: line.barrier(name, LONG_S, "barrier_timeout_s")


def receive(number):
    return lambda line: line.get_in_step(
        f"share/{number}", f"its share of step {number}", LONG_S, "collect_timeout_s"
    )


def give(number):
    return lambda line: line.put(f"share/{number}", b"tokens")


def forget(number):
    return lambda line: line.forget(f"share/{number}", readers=2)


def test_a_rank_that_leaves_the_loop_before_the_others_is_named_at_once(lines):
    update, end = barrier("weight update 2"), barrier("the end of the block")
    errors = play(lines, [update, end], [end], [update, end])
    texts = [str(error) for error in errors]
    assert any("Every rank must call the same methods in the same order" in text for text in texts)
    assert any("the end of the block" in text and "weight update 2" in text for text in texts)


def test_a_rank_that_asks_for_a_share_more_than_the_others_is_named(lines):
    update = barrier("weight update 1")
    behind = [give(1), update]
    errors = play(
        lines, behind, [receive(1), forget(1), receive(2)], [receive(1), forget(1), update]
    )
    assert any("its share of step 2" in str(error) for error in errors)


def test_ranks_that_wait_long_in_step_are_left_alone(lines):
    """The last one comes when the others have looked at each other more than once."""
    began = threading.Event()

    def slow(line):
        began.wait(0.3)  # two looks and more

    update = barrier("weight update 1")
    errors = play(
        lines,
        [slow, give(1), update, slow, give(2), update_of(2)],
        [receive(1), forget(1), update, receive(2), forget(2), update_of(2)],
        [receive(1), forget(1), slow, update, receive(2), forget(2), update_of(2)],
    )
    assert errors == [None, None, None]


def update_of(number):
    return barrier(f"weight update {number}")
