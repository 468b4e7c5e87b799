import pytest

from gymrl.benchmark.keys import WrittenKeys, keys_in, require_no_keys, with_keys
from gymrl.errors import ConfigError, RealServersError


def restated(resolved, written, local=None):
    return WrittenKeys.of(resolved, written, local or {}).restated(resolved, written)


def test_texts_that_stand_for_no_key_and_tokens_of_a_tokenizer_are_no_keys():
    config = {"api_key": "EMPTY", "eos_token": "</s>", "apikey_name": "", "seconds": 3}
    assert list(keys_in(config)) == []
    assert list(keys_in({"a": [{"hf_token": "hf-1"}], "JUDGE_API_KEY": "sk-1"})) == ["hf-1", "sk-1"]


def test_a_header_with_a_key_of_the_environment_in_it_stays_as_it_is_written():
    written = {"judge": {"Authorization": "Bearer ${oc.env:JUDGE_KEY}", "model": "m"}}
    resolved = {"judge": {"Authorization": "Bearer sk-1", "model": "m"}}
    assert restated(resolved, written) == written


def test_a_key_is_followed_through_nested_references():
    written = {"judge": {"api_key": "${keys.judge}"}, "keys": {"judge": "${oc.env:K}"}}
    resolved = {"judge": {"api_key": "sk-1"}}
    assert restated(resolved, written) == {"judge": {"api_key": "${oc.env:K}"}}


def test_a_key_of_an_env_yaml_is_known_by_its_name():
    written = {"judge": {"api_key": "${openai_api_key}"}, "openai_api_key": "sk-1"}
    resolved = {"judge": {"api_key": "sk-1"}}
    planned = restated(resolved, written, {"openai_api_key": "sk-1"})
    assert planned == {"judge": {"api_key": "${openai_api_key}"}}
    assert with_keys(planned, {"openai_api_key": "sk-2"}) == {"judge": {"api_key": "sk-2"}}
    with pytest.raises(ConfigError, match=r"judge\.api_key: .* 'openai_api_key' in an env\.yaml"):
        with_keys(planned, {})
    with pytest.raises(RealServersError, match=r"judge\.api_key holds a key"):
        restated(resolved, written)


def test_keys_come_back_where_a_plan_is_run_and_nothing_else_is_touched(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-9")
    planned = {
        "judge": [{"Authorization": "Bearer ${oc.env:JUDGE_KEY}", "prompt": "${oc.env:JUDGE_KEY}"}],
        "other": {"api_key": "${oc.env:NOT_SET,none}"},
    }
    assert with_keys(planned, {}) == {
        "judge": [{"Authorization": "Bearer sk-9", "prompt": "${oc.env:JUDGE_KEY}"}],
        "other": {"api_key": "none"},
    }
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"Authorization: .* JUDGE_KEY, which is not set"):
        with_keys(planned, {})


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"policy_api_key": "sk-1"}, "policy_api_key is no part of a plan.*--api-key-env"),
        ({"judge": {"models": [{"api_key": "sk-1"}]}}, r"judge\.models\.api_key holds a key"),
    ],
)
def test_overrides_of_a_plan_hold_no_keys(overrides, text):
    with pytest.raises(ConfigError, match=text) as caught:
        require_no_keys(overrides)
    assert "sk-1" not in caught.value.message


def test_overrides_may_say_where_keys_are():
    require_no_keys({"judge": {"api_key": "${oc.env:JUDGE_KEY}"}, "policy_api_key": "none"})
