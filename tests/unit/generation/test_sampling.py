import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import SamplingParams
from gymrl.generation.sampling import choose, draw, process_logits, sampled_logprob


def logits(*values: float) -> torch.Tensor:
    return torch.tensor([list(values)])


def test_temperature_one_is_the_models_own_distribution():
    row = logits(1.0, 2.0, 3.0)
    assert torch.equal(process_logits(row, [SamplingParams()]), torch.log_softmax(row, -1))


def test_temperature_divides_the_logits():
    processed = process_logits(logits(1.0, 2.0), [SamplingParams(temperature=0.5)])
    assert torch.allclose(processed, torch.log_softmax(logits(2.0, 4.0), -1))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_p=1e-320),
        SamplingParams(temperature=1e-40),
        SamplingParams(temperature=1e-320),
        SamplingParams(temperature=5e-324, top_p=1e-300, top_k=2),
    ],
)
def test_settings_that_float32_makes_zero_of_take_the_likeliest(sampling):
    """They gave NaN, and the call was told to check the model's weights."""
    rows = torch.tensor([[-50.0, 3.0, 2.5], [900.0, -900.0, 0.0]])
    processed = process_logits(rows, [sampling, sampling])
    assert processed.exp().tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_top_k_keeps_the_likeliest_and_renormalises():
    processed = process_logits(logits(0.0, 1.0, 2.0), [SamplingParams(top_k=2)])
    assert processed[0, 0] == -math.inf
    assert torch.allclose(processed[0, 1:], torch.log_softmax(torch.tensor([1.0, 2.0]), -1))


def test_top_k_keeps_exactly_k_of_tied_tokens_the_lower_ids_first():
    processed = process_logits(logits(5.0, 5.0, 5.0), [SamplingParams(top_k=2)])
    assert processed[0].isfinite().tolist() == [True, True, False]


def test_top_p_keeps_the_token_that_crosses_the_threshold():
    row = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    kept = process_logits(row, [SamplingParams(top_p=0.6)]).exp()
    assert torch.allclose(kept, torch.tensor([[0.625, 0.375, 0.0]]))


def test_top_p_always_keeps_the_likeliest_token():
    processed = process_logits(logits(0.0, 9.0), [SamplingParams(top_p=1e-9)])
    assert processed.tolist() == [[-math.inf, 0.0]]


def test_top_p_looks_at_what_top_k_left():
    row = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    both = process_logits(row, [SamplingParams(top_k=2, top_p=0.5)]).exp()
    assert torch.allclose(both, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))


def test_greedy_takes_the_likeliest_and_reports_temperature_one():
    row = logits(1.0, 3.0, 2.0)
    tokens, logprobs = choose(row, [SamplingParams(temperature=0, top_k=1)], [0.99])
    assert tokens.tolist() == [1]
    assert torch.equal(logprobs, torch.log_softmax(row, -1))


def test_rows_of_a_batch_keep_their_own_parameters():
    rows = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    samplings = [SamplingParams(), SamplingParams(top_k=1), SamplingParams(temperature=0)]
    together = process_logits(rows, samplings)
    for place, sampling in enumerate(samplings):
        assert torch.equal(together[place], process_logits(rows[:1], [sampling])[0])


def test_raw_log_probabilities_ignore_temperature_and_filters():
    row = logits(0.0, 1.0, 2.0)
    sampling = SamplingParams(temperature=0.1, top_k=1)
    raw = sampled_logprob(row, torch.tensor([0]), [sampling], "raw")
    assert raw.item() == pytest.approx(torch.log_softmax(row, -1)[0, 0].item())
    assert sampled_logprob(row, torch.tensor([0]), [sampling], "processed").item() == -math.inf


def test_the_logits_are_left_as_they_are():
    row = logits(0.0, 1.0, 2.0)
    process_logits(row, [SamplingParams(temperature=0.5, top_k=1, top_p=0.5)])
    assert row.tolist() == [[0.0, 1.0, 2.0]]


def test_drawing_follows_the_distribution():
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3])
    uniforms = ((np.arange(1000) + 0.5) / 1000).tolist()
    tokens = draw(torch.log(probabilities).expand(1000, -1), uniforms)
    assert torch.bincount(tokens, minlength=4).tolist() == [100, 0, 600, 300]


@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    uniform=st.floats(0, 1, exclude_max=True),
    top_k=st.none() | st.integers(1, 50),
    top_p=st.floats(0.01, 1),
    temperature=st.floats(0.05, 5),
)
@settings(deadline=None, max_examples=60)
def test_a_token_that_a_filter_removed_is_never_drawn(values, uniform, top_k, top_p, temperature):
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs = choose(torch.tensor([values]), [sampling], [uniform])
    assert logprobs[0, tokens[0]].isfinite()
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-4)


@given(uniform=st.floats(0, 1, exclude_max=True), others=st.integers(0, 5), place=st.integers(0, 5))
@settings(deadline=None, max_examples=50)
def test_a_rows_token_does_not_depend_on_the_batch(uniform, others, place):
    row = torch.linspace(-2, 2, 30)
    alone = draw(torch.log_softmax(row, -1).unsqueeze(0), [uniform])
    place = min(place, others)
    batch = torch.log_softmax(torch.randn(others + 1, 30), -1)
    batch[place] = torch.log_softmax(row, -1)
    uniforms = [0.3] * (others + 1)
    uniforms[place] = uniform
    assert draw(batch, uniforms)[place] == alone[0]


def test_a_log_probability_that_is_not_a_number_shows_in_the_picked_value():
    tokens, logprobs = choose(logits(math.nan, 1.0), [SamplingParams()], [0.5])
    assert math.isnan(logprobs[0, tokens[0]].item())
