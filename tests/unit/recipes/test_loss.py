"""The arithmetic of the reference trainer, against numbers worked out by hand."""

import math

import pytest
import torch

from gymrl.recipes.loss import (
    LossSettings,
    LossTerms,
    OtherLogprobs,
    group_advantages,
    token_loss,
)
from gymrl.recipes.micro_batches import MicroBatch, Samples, token_micro_batches


def advantages(rewards, groups, kind="standardised", valid=None):
    valid = [True] * len(rewards) if valid is None else valid
    return group_advantages(
        torch.tensor(rewards), torch.tensor(valid), torch.tensor(groups), kind
    ).tolist()


def test_standardised_advantages_are_distances_in_standard_deviations():
    assert advantages([1.0, 0.0, 1.0, 0.0], [0, 0, 0, 0]) == pytest.approx(
        [0.866, -0.866, 0.866, -0.866], abs=1e-3
    )


def test_leave_one_out_compares_with_the_mean_of_the_others():
    assert advantages([1.0, 0.0, 0.5], [0, 0, 0], "leave_one_out") == pytest.approx(
        [0.75, -0.75, 0.0]
    )


def test_groups_are_compared_within_themselves():
    assert advantages([5.0, 6.0, 0.0, 1.0], [0, 0, 1, 1], "leave_one_out") == [-1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize("kind", ["standardised", "leave_one_out"])
def test_equal_rewards_teach_nothing(kind):
    assert advantages([0.1, 0.1, 0.1], [0, 0, 0], kind) == pytest.approx([0.0, 0.0, 0.0], abs=1e-7)


def test_a_failed_row_is_in_no_baseline_and_gets_nothing():
    with_failure = advantages([1.0, 0.0, 0.0], [0, 0, 0], "leave_one_out", [True, True, False])
    assert with_failure == [1.0, -1.0, 0.0]


def test_a_group_with_one_valid_row_teaches_nothing():
    assert advantages([1.0, 0.0], [0, 0], valid=[True, False]) == [0.0, 0.0]


SETTINGS = LossSettings()


def loss(ratio, advantage, *, weight=1.0, mask=True, reference=None, stale=True, settings=SETTINGS):
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    zero = torch.zeros(1, 1)
    others = OtherLogprobs(zero, zero - math.log(weight), torch.tensor([[stale]]), reference)
    terms = token_loss(new, others, torch.tensor([advantage]), torch.tensor([[mask]]), settings)
    terms.policy.backward()
    return LossTerms(*(term.detach() for term in terms)), float(new.grad)


def test_on_policy_the_gradient_is_the_policy_gradient():
    terms, gradient = loss(1.0, 2.0)
    assert float(terms.policy) == -2.0
    assert gradient == -2.0


def test_a_good_token_that_rose_enough_is_pushed_no_further():
    terms, gradient = loss(1.5, 1.0)
    assert float(terms.policy) == pytest.approx(-1.2)
    assert gradient == 0.0
    assert float(terms.clipped) == 1


def test_a_bad_token_that_rose_is_still_pushed_down():
    assert loss(1.5, -1.0)[1] > 0


def test_a_stale_token_is_weighted_up_to_a_bound():
    assert float(loss(1.0, 1.0, weight=0.5)[0].policy) == pytest.approx(-0.5)
    assert float(loss(1.0, 1.0, weight=10.0)[0].policy) == pytest.approx(-2.0)


def test_a_fresh_token_is_weighted_only_where_all_are():
    assert float(loss(1.0, 1.0, weight=0.5, stale=False)[0].policy) == -1.0
    every = LossSettings(corrected="all")
    assert float(loss(1.0, 1.0, weight=0.5, stale=False, settings=every)[0].policy) == -0.5


def test_a_masked_token_counts_nowhere():
    terms, gradient = loss(1.5, 1.0, mask=False)
    assert gradient == 0.0
    assert [float(term) for term in terms] == [0.0, 0.0, 0.0, 0.0]


def test_infinite_padding_does_not_poison_the_sum():
    new = torch.tensor([[0.0, float("-inf")]])
    zeros = torch.zeros(1, 2)
    others = OtherLogprobs(zeros, zeros, zeros.bool())
    mask = torch.tensor([[True, False]])
    terms = token_loss(new, others, torch.tensor([1.0]), mask, LossSettings())
    assert float(terms.policy) == -1.0


def test_the_divergence_is_estimated_without_bias_towards_negative_numbers():
    terms, _ = loss(1.0, 1.0, reference=torch.tensor([[math.log(2.0)]]))
    assert float(terms.kl) == pytest.approx(1 - math.log(2.0))


def test_micro_batches_hold_so_many_tokens_padding_counted():
    lengths = torch.tensor([4, 1, 3, 2, 9])
    batches = token_micro_batches(lengths, 6)
    assert sorted(i for batch in batches for i in batch) == [0, 1, 2, 3, 4]
    assert batches == [[1, 3], [2], [0], [4]]


def samples():
    return Samples(
        token_ids=torch.tensor([[1, 2, 3, 4, 0], [1, 2, 3, 4, 5]]),
        lengths=torch.tensor([4, 5]),
        mask=torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]).bool(),
        sampled=torch.zeros(2, 5) - 0.5,
        ages=torch.tensor([[0, 0, 2, 0, 0], [0, 0, 0, 1, 0]]),
        advantages=torch.tensor([1.0, -1.0]),
    )


def test_nothing_is_computed_before_the_first_token_that_counts():
    micro = MicroBatch(samples())
    assert micro.start == 1
    assert micro.mask.tolist() == [[True, True, False], [False, True, True]]
    assert micro.is_stale.tolist() == [[True, False, False], [False, True, False]]
    assert micro.attention.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_samples_of_a_micro_batch_are_cut_to_the_longest():
    short = samples().at([0])
    assert short.token_ids.tolist() == [[1, 2, 3, 4]]
    assert short.ages.tolist() == [[0, 0, 2, 0]]


def test_an_empty_micro_batch_trains_nothing():
    micro = MicroBatch(Samples.empty(0))
    assert not micro.mask.any()
    assert micro.token_ids.shape == (1, 2)


def test_the_loss_is_computed_where_the_model_is():
    # Nothing of the CPU may meet tensors of this device.
    micro = MicroBatch(samples()).to(torch.device("meta"))
    assert micro.token_ids.device.type == micro.attention.device.type == "meta"
    logprobs = torch.empty(2, 3, device="meta", requires_grad=True)
    others = OtherLogprobs(logprobs.detach(), micro.sampled, micro.is_stale, logprobs.detach())
    terms = token_loss(logprobs, others, micro.advantages, micro.mask, LossSettings())
    assert {term.device.type for term in terms} == {"meta"}
    (terms.policy + terms.kl).backward()
    assert logprobs.grad.shape == (2, 3)
