"""A step of the trainer against the same worked out by hand: one sample at a time, without padding."""

import copy
import functools
import math

import pytest
import torch

from tests.unit.recipes.steps import (
    ALL_FAILED,
    GROUPS,
    RATE,
    TEMPERATURE,
    VERSION,
    settings,
    share_of,
    step,
    tiny_model,
)


def logprobs(model, trajectory):
    ids = torch.from_numpy(trajectory.token_ids.astype("int64"))
    logits = model(ids[None]).logits[0] / TEMPERATURE
    return [None, *(logits[t - 1].log_softmax(-1)[ids[t]] for t in range(1, len(ids)))]


def learned():
    """Each sample that is learned from, and its advantage against the mean of the others."""
    for group in GROUPS:
        rewards = [t.reward.verifier for t in group.trajectories]
        for place, trajectory in enumerate(group.trajectories):
            others = rewards[:place] + rewards[place + 1 :]
            if not trajectory.mask_sample:
                yield trajectory, rewards[place] - sum(others) / len(others)


def sampled(trajectory):
    return [t for turn in trajectory.turns for t in range(turn.generation_start, turn.end)]


def token_loss(new, start, reference, sampled, advantage, is_stale):
    ratio = (new - start).exp()
    value = float(ratio.detach())
    within = min(max(value, 0.9), 1.3)
    weight = min(math.exp(start - sampled), 1.5) if is_stale else 1.0
    is_bound = within * advantage < value * advantage
    policy = -weight * (within * advantage if is_bound else ratio * advantage)
    gap = reference - new
    return policy, gap.exp() - gap - 1


@functools.cache
def by_hand(updates, kl_coefficient):
    model, reference = tiny_model(0), tiny_model(1)
    count = sum(len(sampled(t)) for t, _ in learned())
    begun = copy.deepcopy(model)
    losses = []
    for _ in range(updates):
        total, policy_sum = torch.zeros(()), 0.0
        for trajectory, advantage in learned():
            with torch.no_grad():
                start = logprobs(begun, trajectory)
                base = logprobs(reference, trajectory)
            new = logprobs(model, trajectory)
            for t in sampled(trajectory):
                version = trajectory.token_versions()[t]
                policy, kl = token_loss(
                    new[t],
                    float(start[t]),
                    base[t],
                    float(trajectory.logprobs[t]),
                    advantage,
                    version < VERSION,
                )
                total = total + policy + kl_coefficient * kl
                policy_sum += float(torch.as_tensor(policy).detach())
        model.zero_grad()
        (total / count).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(RATE * parameter.grad)
        losses.append(policy_sum / count)
    return model, sum(losses) / updates, count


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 10_000])
def test_a_step_is_what_its_formula_says_whatever_the_micro_batches(micro_batch_tokens):
    trainer, numbers = step(GROUPS, settings(micro_batch_tokens=micro_batch_tokens))
    expected, loss, count = by_hand(updates=2, kl_coefficient=0.3)
    assert numbers["trained_tokens"] == count == 33
    assert numbers["loss"] == pytest.approx(loss, abs=1e-5)
    ours = dict(trainer.model.named_parameters())
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(ours[name], parameter, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [(), (ALL_FAILED,)])
def test_a_share_of_nothing_or_of_failed_rows_alone_moves_nothing(groups):
    trainer, _ = step(GROUPS, settings())
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0, momentum=0.9)
    trainer.step(share_of(GROUPS))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert trainer.step(share_of(groups))["trained_tokens"] == 0
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_gradient_that_overflows_is_told_of_before_it_ruins_the_model():
    with pytest.raises(FloatingPointError, match="nothing was changed"):
        step(GROUPS, settings(kl_coefficient=1e38))
