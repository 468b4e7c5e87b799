"""A rank whose engines refuse what its trainer sends; the node's engines are stood for by threads."""

import contextlib
import socket
import threading
import time
from concurrent.futures import Future, InvalidStateError

import pytest
import torch

from gymrl.config import GenerationConfig, GymConfig, RolloutConfig
from gymrl.errors import RankFailedError, WeightUpdateError
from gymrl.generation.weight_meeting import Meeting, WeightGroup, visit
from gymrl.torchrun import TorchrunConfig
from gymrl.torchrun.handover import Transfers
from gymrl.torchrun.site import Site
from gymrl.torchrun.world import LoneWorld

LONG_S = 600.0  # a wait that ends so is found by the test's own limit


class Engines(Site):
    """What a rank holds: one engine, which takes weights in a thread as `takes` says."""

    def __init__(self, takes):
        rollout = RolloutConfig(
            generation=GenerationConfig(model="m", backend="vllm"), gym=GymConfig()
        )
        self.job = TorchrunConfig(
            rollout=rollout, weight_transfer="gloo", transfer_timeout_s=LONG_S
        )
        world = LoneWorld()
        super().__init__(self.job, world, {})
        self.handover = Transfers(self.job, world, self)
        self.node, self.takes, self.offered = self, takes, []

    def update_weights(self, weights, version):
        self.offered.append(weights)
        return self.takes(weights)

    def start(self, function, *args):
        future = Future()

        def run():
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                try:
                    future.set_result(function(*args))
                except WeightUpdateError as error:
                    future.set_exception(error)

        threading.Thread(target=run).start()
        return future


def refuse(weights):
    raise WeightUpdateError("generator-0: 1 unknown: odd", serving="6")


def take(weights, size=12):
    place = weights.init_info
    meeting = Meeting(1, 1, place["host"], place["port"], LONG_S)
    group = WeightGroup(visit(place["host"], place["port"], LONG_S), 1, meeting)
    group.join()
    group.begin()
    received = torch.empty(size, dtype=torch.uint8)
    group.broadcast(received)
    group.close()
    assert received.view(torch.float32).tolist() == [1, 2, 3]


def until_the_sender_has_ended():
    while "gymrl-beside" in [thread.name for thread in threading.enumerate()]:
        time.sleep(0.01)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))


def test_what_an_engine_refuses_with_is_raised_at_once_and_nothing_is_left():
    engines = Engines(refuse)
    with pytest.raises(WeightUpdateError, match="generator-0: 1 unknown: odd") as caught:
        engines.handover.give(Model(), "7")
    assert caught.value.serving == "6"
    place = engines.offered[0].init_info
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((place["host"], place["port"]))
    until_the_sender_has_ended()

    engines.takes = take
    engines.handover.give(Model(), "8")
    assert engines.offered[1].sender != engines.offered[0].sender
    engines.handover.close()


def test_a_rank_that_failed_elsewhere_ends_the_send_here():
    def hang(weights):
        never.wait()

    engines, never = Engines(hang), threading.Event()

    def wait(futures, seconds=None):
        raise RankFailedError("rank 1 failed", rank=1)

    engines.wait = wait
    with pytest.raises(RankFailedError):
        engines.handover.give(Model(), "7")
    until_the_sender_has_ended()
    never.set()
