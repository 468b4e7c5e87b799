"""What a rank makes of a trainer and engines of which one fails: the futures stand for the two."""

from concurrent.futures import Future

import pytest

from gymrl.config import GenerationConfig, GymConfig, RolloutConfig
from gymrl.errors import ActorDiedError, WeightUpdateError
from gymrl.torchrun import TorchrunConfig
from gymrl.torchrun.handover import Transfers
from gymrl.torchrun.site import Site
from gymrl.torchrun.world import LoneWorld

CLOSED = WeightUpdateError("the engines' workers did not take the tensors: Connection closed")


def outcome(value=None):
    future = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def until_both(sending, taking):
    rollout = RolloutConfig(generation=GenerationConfig(model="m", backend="vllm"), gym=GymConfig())
    job = TorchrunConfig(rollout=rollout, weight_transfer="gloo")
    world = LoneWorld()
    Transfers(job, world, Site(job, world, {})).until_both(sending, taking, "7")


def test_weights_are_given_when_both_sides_are_done():
    until_both(outcome(), outcome())


def test_an_engine_that_refuses_is_heard_although_the_trainer_still_waits_for_it():
    with pytest.raises(WeightUpdateError, match="1 unknown: odd"):
        until_both(Future(), outcome(WeightUpdateError("1 unknown: odd", serving="6")))


def test_an_engine_that_died_is_the_cause_of_the_connection_that_broke():
    with pytest.raises(ActorDiedError, match="SIGKILL") as caught:
        until_both(outcome(CLOSED), outcome(ActorDiedError("killed by SIGKILL")))
    assert caught.value.__cause__ is CLOSED


def test_engines_that_lost_their_trainer_are_told_of_beside_what_it_met():
    met = WeightUpdateError("not taken: reset by peer; version '6' goes on serving", serving="6")
    with pytest.raises(
        WeightUpdateError, match=r"'7' did not reach .*Connection closed; not taken"
    ):
        until_both(outcome(CLOSED), outcome(met))


def test_what_is_wrong_with_the_trainers_own_tensors_is_raised_as_it_is():
    with pytest.raises(TypeError, match="no tensor"):
        until_both(outcome(TypeError("no tensor")), outcome(WeightUpdateError("torn", serving="6")))
