"""Ranks that start again agree on a part of the store that no former start has written to."""

import threading
import time

import pytest
from torch.distributed import HashStore

from gymrl.errors import DeadlineExceeded
from gymrl.torchrun.rendezvous import fresh_store


def started(store, name, *, late=0, size=3, delay_s=0.0):
    """What each rank finds under the key ``address`` after it has put its own under it."""
    found, threads = {}, []

    def enter(rank):
        if rank == late:
            time.sleep(delay_s)
        own = fresh_store(store, rank, size, 20)
        own.set(f"address/{rank}", f"of {rank}, {name}")
        own.wait([f"address/{other}" for other in range(size)])
        found[rank] = {own.get(f"address/{other}").decode() for other in range(size)}

    for rank in range(size):
        threads.append(threading.Thread(target=enter, args=(rank,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_is_quicker_than_its_peers_finds_nothing_that_a_former_start_left(late):
    """A quick rank took the address of a killed one, and torchrun used up its restarts."""
    store = HashStore()
    before = started(store, "first")
    after = started(store, "second", late=late, delay_s=0.1)
    assert len({frozenset(addresses) for addresses in after.values()}) == 1
    assert len(after[0]) == 3
    assert not before[0] & after[0]


def test_a_start_that_a_rank_did_not_survive_does_not_mislead_the_next():
    store = HashStore()
    with pytest.raises(DeadlineExceeded, match="not there: rank"):
        fresh_store(store, 1, 2, 0.05)
    with pytest.raises(DeadlineExceeded, match=r"not there: ranks 1, 2"):
        fresh_store(store, 0, 3, 0.05)
    assert len(started(store, "third")[0]) == 3


def test_a_single_rank_waits_for_nobody():
    assert fresh_store(HashStore(), 0, 1, 0.0) is not None
