"""Where a sender of weights waits for the engines' workers, and how it learns that they refuse."""

import os
import socket
import threading
import time

import anyio
import anyio.to_thread
import pytest
import torch

from gymrl.errors import WeightUpdateError
from gymrl.generation.weight_meeting import Meeting, WeightGroup, tell_refusal, visit
from gymrl.generation.weight_transfer import deliver, weight_sender

STATE = {"w": torch.arange(4.0)}
LONG_S = 600.0  # a wait that ends so is found by the test's own limit


class Worker:
    """One of an engine's workers, in a thread.

    Args:
        weights: What the engine was told.
        engine: Its place.
        fails: It raises instead of receiving: before it joins, when it has, or in the middle.
    """

    def __init__(self, weights, engine=0, fails=None):
        self.info = {**weights.init_info, **weights.engines[engine]}
        self.fails = fails
        self.error = None
        self.received = torch.ones(16, dtype=torch.uint8)
        self._go_on = threading.Event()
        place = self.info
        meeting = Meeting(
            (place["world_size"] - 1) // place["num_workers"],
            place["num_workers"],
            place["host"],
            place["port"],
            place["timeout_s"],
        )
        self.group = WeightGroup(
            visit(place["host"], place["port"], place["timeout_s"]), place["first_rank"], meeting
        )
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            self._fail("arriving")
            self.group.join()
            self._take()
            while self._go_on.wait():
                self._go_on.clear()
                if self.fails == "left":
                    break
                self._take()
        except (ValueError, WeightUpdateError) as error:
            self.error = error
            self.group.say_refused(f"{type(error).__name__}: {error}")
        self.group.close()

    def _take(self):
        self._fail("joined")
        self.group.begin()
        self._fail("receiving")
        self.group.broadcast(self.received)

    def _fail(self, stage):
        if self.fails == stage:
            raise ValueError(f"no memory when {stage}")

    def take_again(self, fails=None):
        self.fails = fails
        self._go_on.set()

    def end(self):
        if self.thread.is_alive():
            self.take_again("left")
        self.thread.join()
        return self.received.view(torch.float32).tolist()


def open_things():
    """Threads of this process, and its sockets, the event loop's left out."""
    sockets = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            sockets += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except FileNotFoundError:
            continue  # that of the listing
    return len(os.listdir("/proc/self/task")), sockets


def until_back_at(before):
    """Threads that have ended are gone from the kernel's list a moment later, also earlier tests'."""
    while any(now > then for now, then in zip(open_things(), before, strict=True)):
        time.sleep(0.01)


@pytest.fixture
def sender():
    made = weight_sender("gloo", timeout_s=LONG_S)
    yield made
    made.close()


def test_a_sender_listens_on_the_interface_it_is_given_and_on_no_other(sender):
    place = sender.weights(STATE).init_info
    with socket.create_connection(("127.0.0.1", place["port"]), timeout=5):
        pass
    # Another address of this machine, as those of its networks are.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", place["port"]), timeout=5)
    with pytest.raises(WeightUpdateError, match="can't listen on"):
        weight_sender("gloo", host="127.0.0.1", port=place["port"])


def test_a_worker_that_comes_there_gets_the_bytes_of_every_update(sender):
    worker = Worker(sender.weights(STATE))
    sender.send(STATE)
    worker.take_again()
    sender.weights({"w": torch.ones(4)})
    sender.send({"w": torch.ones(4)})
    assert worker.end() == [1, 1, 1, 1]
    assert worker.error is None


@pytest.mark.parametrize("stage", ["arriving", "joined", "receiving"])
def test_what_a_worker_refuses_with_ends_the_send_and_the_waits_of_the_others(stage):
    before = open_things()
    sender = weight_sender("gloo", num_engines=2, timeout_s=LONG_S)
    weights = sender.weights(STATE)
    workers = [Worker(weights, 0), Worker(weights, 1, fails=stage)]
    with pytest.raises(
        WeightUpdateError, match=rf"engine 1 refused: ValueError: no memory when {stage}"
    ) as caught:
        sender.send(STATE)
    for worker in workers:
        worker.end()
    # It may have everything by then; else it is told, or finds the trainer gone.
    assert stage == "receiving" or isinstance(workers[0].error, WeightUpdateError)
    # The error is kept, and keeps nothing open.
    assert caught.value.__traceback__ is not None
    until_back_at(before)


def test_the_next_update_of_the_same_sender_meets_workers_anew():
    sender = weight_sender("gloo", timeout_s=LONG_S)
    first = sender.weights(STATE)
    refusing = Worker(first, fails="joined")
    with pytest.raises(WeightUpdateError, match="no memory"):
        sender.send(STATE)
    refusing.end()

    second = sender.weights(STATE)
    assert second.for_engine(0, 1).meeting != first.for_engine(0, 1).meeting
    worker = Worker(second)
    sender.send(STATE)
    assert worker.end() == [0, 1, 2, 3]
    sender.close()


def test_a_worker_that_fails_after_it_has_everything_is_met_anew_by_the_next_update(sender):
    first = sender.weights(STATE)
    worker = Worker(first)
    sender.send(STATE)
    worker.take_again(fails="joined")
    worker.thread.join()
    again = sender.weights(STATE)
    assert again.sender != first.sender
    worker = Worker(again)
    sender.send(STATE)
    assert worker.end() == [0, 1, 2, 3]


def test_a_generator_in_another_process_can_tell_the_sender_that_it_refuses(sender):
    weights = sender.weights(STATE)
    tell_refusal(weights, "1 unknown: w; version '6' goes on serving")
    with pytest.raises(WeightUpdateError, match=r"did not take .*1 unknown: w; version '6'"):
        sender.send(STATE)
    tell_refusal(weights, "nobody is there any more")


def test_what_is_told_to_a_former_sender_at_the_same_address_does_not_concern_this_one():
    sender = weight_sender("gloo", timeout_s=LONG_S)
    former = sender.weights(STATE)
    sender.close()
    sender = weight_sender("gloo", port=former.init_info["port"], timeout_s=LONG_S)
    weights = sender.weights(STATE)
    assert weights.init_info == former.init_info
    tell_refusal(former, "late")
    worker = Worker(weights)
    sender.send(STATE)
    assert worker.end() == [0, 1, 2, 3]
    sender.close()


def test_a_refusal_of_this_process_ends_a_send_whose_worker_neither_receives_nor_leaves():
    """Gloo can't be interrupted: what it waits for is left to its deadline, or the worker's end."""
    sender = weight_sender("gloo", timeout_s=LONG_S)
    state = {"w": torch.zeros(4), "big": torch.zeros(20_000_000)}
    worker = Worker(sender.weights(state))  # takes the first tensor alone
    errors = []

    def send():
        try:
            sender.send(state)
        except WeightUpdateError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    while not worker.received.view(torch.float32).eq(0).all():
        time.sleep(0.01)
    sender.refuse(WeightUpdateError("a server hangs", serving="6"))
    thread.join()
    assert "a server hangs" in str(errors[0])
    assert errors[0].serving == "6"
    worker.end()
    while any(thread.name == "gymrl-weights-left" for thread in threading.enumerate()):
        time.sleep(0.05)


def test_workers_that_do_not_come_are_named():
    sender = weight_sender("gloo", num_engines=2, num_workers=2, timeout_s=0.1)
    sender.weights(STATE)
    with pytest.raises(
        WeightUpdateError, match=r"engine 0 \(worker 0\), .*engine 1 \(worker 1\) did not come"
    ):
        sender.send(STATE)


def test_a_sender_whose_weights_were_not_described_waits_for_nobody(sender):
    sender.close()
    with pytest.raises(WeightUpdateError, match=r"call weights\(\) first"):
        sender.send(STATE)


async def test_both_sides_of_a_delivery_end_when_the_engine_refuses():
    before = open_things()[1]
    sender = weight_sender("gloo", timeout_s=LONG_S)

    async def refuse(weights):
        raise WeightUpdateError("1 unknown: w", serving="6", num_engines=2)

    with pytest.raises(WeightUpdateError, match="1 unknown: w") as caught:
        await deliver(sender, STATE, refuse)
    assert caught.value.num_engines == 2
    assert caught.value.__notes__[0].startswith("The sender: the engines' workers did not take")
    assert open_things()[1] <= before

    async def take(weights):
        worker = Worker(weights)
        await anyio.to_thread.run_sync(worker.thread.join)

    with pytest.raises(WeightUpdateError, match="odd tensor"):
        await deliver(sender, {"w": Odd()}, take)
    sender.close()


class Odd:
    """A tensor that can be described, and not sent."""

    dtype, shape = torch.float32, (4,)

    def full_tensor(self):
        raise WeightUpdateError("odd tensor")


async def test_cancelling_a_delivery_ends_the_send(sender):
    with anyio.move_on_after(0.05) as scope:
        await deliver(sender, STATE, lambda _: anyio.sleep_forever())
    assert scope.cancelled_caught


async def test_a_generator_that_takes_no_transfers_tells_the_sender(serve_tiny, sender):
    met = []

    def send():
        try:
            sender.send(STATE)
        except WeightUpdateError as error:
            met.append(error)

    async with serve_tiny() as (_, generator), anyio.create_task_group() as group:
        weights = sender.weights(STATE)
        group.start_soon(anyio.to_thread.run_sync, send)
        with pytest.raises(WeightUpdateError, match="only a vLLM engine"):
            await generator.update_weights(weights, "7")
    assert "only a vLLM engine takes weights by transfer" in str(met[0])
