"""Random answers: what gymrl makes of them, and what the plain writing makes of them."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import RolloutFailure
from gymrl.gym.episode import read_episode
from gymrl.scoring import ScoringConfig, resolve_scoring, score_group
from gymrl.tensors import message_log, to_batch
from gymrl.types import RolloutGroup, Row
from tests.parity import naive
from tests.parity.results import FAULTS, any_result, body_of, broken_result

LIMIT = 24
PAD = 99
randoms = st.integers(0, 2**32 - 1).map(random.Random)


def group_of(bodies, agent="math_agent", index=0):
    rows = tuple(
        Row(
            index=place,
            task_index=index,
            rollout_index=place,
            route=agent,
            rollout_id=f"r{place}",
            body=b'{"responses_create_params": {"input": "ask"}}',
        )
        for place in range(len(bodies))
    )
    samples = tuple(read_episode(body, agent=agent, row=place) for place, body in enumerate(bodies))
    return RolloutGroup(index=index, task_index=index, rows=rows, samples=samples)


def plain(message):
    logprobs = message.get("generation_logprobs", torch.zeros(len(message["token_ids"])))
    return message["role"], message["token_ids"].tolist(), logprobs.tolist()


@settings(deadline=None, max_examples=150)
@given(rng=randoms)
def test_a_good_answer_gives_the_messages_masks_and_rewards_of_the_plain_writing(rng):
    body = body_of(rng, any_result(rng))
    expected = naive.episode(body)
    trajectory = read_episode(body, agent="math_agent")
    log = message_log(trajectory)
    assert [plain(message) for message in log] == expected["log"]
    tokens, mask, logprobs = naive.flat(expected["log"])
    assert trajectory.token_ids.tolist() == tokens
    assert trajectory.token_mask().tolist() == mask
    assert trajectory.logprobs.tolist() == logprobs
    masks = [flag for message in log for flag in message["token_loss_mask"].tolist()]
    assert masks == mask
    assert trajectory.reward.verifier == trajectory.reward.total == expected["reward"]
    assert trajectory.reward.components == expected["parts"]
    assert trajectory.mask_sample == expected["is_masked"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
@settings(deadline=None, max_examples=25)
@given(rng=randoms)
def test_a_broken_answer_is_refused_for_the_same_reason(rng, fault):
    result, error = broken_result(rng, fault)
    body = body_of(rng, result)
    with pytest.raises(naive.Refused, match=f"^{error}$"):
        naive.episode(body)
    with pytest.raises(RolloutFailure) as caught:
        read_episode(body, agent="math_agent", row=5)
    assert type(caught.value).__name__ == error
    assert caught.value.row == 5


@settings(deadline=None, max_examples=60)
@given(rng=randoms)
def test_a_group_gives_the_tensors_and_metrics_of_the_plain_writing(rng):
    bodies = [body_of(rng, any_result(rng)) for _ in range(rng.randint(1, 5))]
    expected = [naive.episode(body) for body in bodies]
    agents = ["math_agent"] * len(bodies)
    scoring = resolve_scoring(ScoringConfig(), max_total_tokens=LIMIT)
    group = score_group(group_of(bodies), scoring)
    assert group.metrics == pytest.approx(naive.metrics(expected, agents, LIMIT))
    batch = to_batch([group], pad_token_id=PAD, max_total_tokens=LIMIT)
    columns = naive.batch(expected, agents, LIMIT, PAD)
    tensors = {
        name: columns.pop(name)
        for name in ("input_ids", "token_ids", "token_mask", "generation_logprobs", "lengths")
    }
    for name, values in tensors.items():
        assert getattr(batch, name).tolist() == values, name
    assert set(batch.final_batch) == {*columns, "message_log"}
    for name, values in columns.items():
        found = batch.final_batch[name]
        if name.startswith("reward/") or name == "total_reward":
            assert found.tolist() == pytest.approx(values)
        else:
            assert (found if isinstance(found, list) else found.tolist()) == values, name
