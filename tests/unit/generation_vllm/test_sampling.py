import math

import msgspec
import pytest

from gymrl.config import SamplingParams
from gymrl.errors import (
    BadLogprobsError,
    GenerationError,
    GenerationRequestError,
    GenerationTransportError,
)
from gymrl.generation.base import WeightSpan
from gymrl.generation.vllm_sampling import check_temperature, generated, stop_token_ids
from gymrl.generation.vllm_wire import (
    COMPLETIONS_PATH,
    GENERATE_PATH,
    error_param,
    error_text,
    read_choice,
    request_body,
    sampling_fields,
)


def made(**changes):
    settings = {
        "token_ids": [5, 6],
        "logprobs": [-0.5, -1.0],
        "finish_reason": "stop",
        "stop_reason": None,
        "sampling": SamplingParams(stop_token_ids=(6,)),
        "weight_versions": [WeightSpan("3", 0, 2)],
    }
    settings |= changes
    return generated(settings.pop("token_ids"), settings.pop("logprobs"), **settings)


def test_an_answer_is_kept_as_it_is():
    result = made(stop_reason=6)
    assert (result.token_ids, result.logprobs) == ([5, 6], [-0.5, -1.0])
    assert (result.finish_reason, result.stop_reason) == ("stop", 6)
    assert result.weight_versions == [("3", 0, 2)]


@pytest.mark.parametrize(("named", "said"), [(6, 6), (2, None), ("end", "end"), (None, None)])
def test_only_a_stop_of_the_calls_own_is_named(named, said):
    assert made(stop_reason=named).stop_reason == said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_not_finite_is_an_error(value):
    with pytest.raises(BadLogprobsError) as caught:
        made(logprobs=[-0.5, value])
    assert caught.value.position == 1


def test_the_clamped_log_probability_of_vllm_is_finite():
    assert made(logprobs=[-0.5, -9999.0]).logprobs[1] == -9999.0


def test_missing_log_probabilities_are_an_error():
    with pytest.raises(BadLogprobsError, match="1 log-probabilities for 2 tokens"):
        made(logprobs=[-0.5])


@pytest.mark.parametrize("reason", ["error", "repetition", None])
def test_an_unknown_reason_is_an_error(reason):
    with pytest.raises(GenerationError, match="ended the call with"):
        made(finish_reason=reason)


def test_only_an_aborted_call_may_be_without_a_token():
    nothing = {"token_ids": [], "logprobs": [], "weight_versions": []}
    assert made(finish_reason="abort", **nothing).token_ids == []
    with pytest.raises(GenerationError, match="without a token"):
        made(finish_reason="length", **nothing)


@pytest.mark.parametrize("temperature", [0, 0.01, 1.0])
def test_temperatures_that_vllm_samples_at_are_taken(temperature):
    check_temperature(SamplingParams(temperature=temperature))


def test_a_temperature_that_vllm_would_raise_is_refused():
    with pytest.raises(GenerationRequestError, match=r"0\.0099: vLLM samples at 0\.01 or more"):
        check_temperature(SamplingParams(temperature=0.0099))


def test_stop_tokens_are_the_models_and_the_calls():
    sampling = SamplingParams(stop_token_ids=(9, 4))
    assert stop_token_ids(sampling, frozenset({2, 4})) == [2, 4, 9]
    on = SamplingParams(stop_token_ids=(9,), ignore_eos=True)
    assert stop_token_ids(on, frozenset({2})) == [9]


def test_requests_have_the_form_of_their_route():
    fields = sampling_fields(SamplingParams(seed=7), budget=5, end_ids=frozenset({2}))
    tokens = request_body(GENERATE_PATH, "m", [1, 2], fields, stream=True)
    assert tokens == {"model": "m", "token_ids": [1, 2], "sampling_params": fields, "stream": True}
    completions = request_body(COMPLETIONS_PATH, "m", [1, 2], fields, stream=False)
    assert completions["prompt"] == [1, 2]
    assert completions["return_token_ids"] is True
    assert completions["max_tokens"] == 5
    assert completions["seed"] == 7


def test_null_log_probabilities_become_nan_and_never_zero():
    body = {"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [None, -1.0]}}]}
    values = read_choice(msgspec.json.encode(body), "http://a").logprobs.values()
    assert math.isnan(values[0])
    assert values[1] == -1.0


def test_an_event_without_a_sample_is_skipped():
    assert read_choice(b'{"usage": {"total_tokens": 3}, "choices": []}', "http://a") is None


@pytest.mark.parametrize(
    "body", [b"<html>", b'{"choices": 3}', b'{"choices": [{"token_ids": "x"}]}']
)
def test_what_is_no_answer_names_the_server(body):
    with pytest.raises(GenerationTransportError) as caught:
        read_choice(body, "http://a")
    assert caught.value.url == "http://a"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b"Bad Gateway", "Bad Gateway"),
        (b'{"detail": "no"}', '{"detail": "no"}'),
        (b"\xff" * 3, "���"),
        (b"x" * 9000, "x" * 500),
    ],
)
def test_the_text_of_an_error_is_found_and_bounded(body, text):
    assert error_text(body) == text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"error": {"message": "too hot", "param": "temperature"}}', "temperature"),
        (b'{"error": {"message": "too hot", "param": null}}', None),
        (b'{"error": {"message": "too hot", "param": {"a": 1}}}', None),
        (b"Bad Gateway", None),
    ],
)
def test_the_field_of_an_error_is_the_one_that_the_server_names(body, param):
    assert error_param(body) == param
