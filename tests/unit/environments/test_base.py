import numpy as np
import pytest

from gymrl.environments import EnvironmentReturn, settled
from gymrl.environments.base import steps_of
from gymrl.errors import EnvironmentContractError

OBSERVATION = {"role": "environment", "content": "ok"}


def a_return(count=2, **fields):
    whole = {
        "observations": [OBSERVATION] * count,
        "metadata": [None] * count,
        "next_stop_strings": [None] * count,
        "rewards": [0.0] * count,
        "terminateds": [False] * count,
        "answers": None,
    }
    return EnvironmentReturn(**{**whole, **fields})


def test_arrays_become_plain_numbers_and_booleans():
    answer = settled(
        a_return(rewards=np.array([1, 0.5]), terminateds=np.array([True, False])), 2, "world"
    )

    assert answer.rewards == [1.0, 0.5]
    assert answer.terminateds == [True, False]
    assert type(answer.terminateds[0]) is bool


def test_columns_of_components_become_a_mapping_for_each_sample():
    answer = settled(
        a_return(rewards={"format": np.array([1.0, 0.0]), "answer": [0.5, 0.25]}), 2, "world"
    )

    assert answer.rewards == [{"format": 1.0, "answer": 0.5}, {"format": 0.0, "answer": 0.25}]


def test_mixed_rewards_are_refused():
    with pytest.raises(EnvironmentContractError, match=r"'world'.*numbers for some samples"):
        settled(a_return(rewards=[1.0, {"format": 1.0}]), 2, "world")


def test_a_reward_of_none_goes_with_either_kind():
    assert settled(a_return(rewards=[None, {"a": 1.0}]), 2, "world").rewards == [None, {"a": 1.0}]
    assert settled(a_return(rewards=[None, 1.0]), 2, "world").rewards == [None, 1.0]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rewards": [1.0]}, "rewards has 1 entries for 2"),
        ({"rewards": 1.0}, "rewards is a float"),
        ({"rewards": {"a": [1.0]}}, r"rewards\['a'\] has 1 entries"),
        ({"observations": [OBSERVATION]}, "observations has 1 entries"),
        ({"observations": [OBSERVATION, "text"]}, "needs a role and a content"),
        ({"observations": [OBSERVATION, {"role": "user", "content": None}]}, "needs a role"),
        ({"next_stop_strings": ["ab", None]}, "a list of texts"),
        ({"next_stop_strings": [[1], None]}, "a list of texts"),
        ({"terminateds": [True, "yes"]}, "a boolean is needed"),
        ({"metadata": None}, "metadata is a NoneType"),
        ({"answers": ["a"]}, "answers has 1 entries"),
    ],
)
def test_what_breaks_the_protocol_is_named(fields, problem):
    with pytest.raises(EnvironmentContractError, match=problem) as caught:
        settled(a_return(**fields), 2, "world")
    assert caught.value.task_name == "world"


def test_something_that_is_no_return_at_all_is_named():
    with pytest.raises(EnvironmentContractError, match="a NoneType without observations"):
        settled(None, 1, "world")


def test_steps_of_a_return_are_taken_apart_sample_by_sample():
    answer = settled(
        a_return(rewards=[1.0, 2.0], next_stop_strings=[["a"], None], answers=["x", None]),
        2,
        "world",
    )

    first, second = steps_of(answer)
    assert (first.reward, first.next_stop_strings, first.answer) == (1.0, ["a"], "x")
    assert (second.reward, second.next_stop_strings, second.answer) == (2.0, None, None)
