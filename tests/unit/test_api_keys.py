import pytest

from gymrl.api_keys import authorization, read_api_key
from gymrl.errors import ConfigError


def test_a_key_is_read_without_the_newline_that_a_file_left(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-123\n")
    assert read_api_key("SOME_KEY", "gym.api_key_env") == "sk-123"


def test_no_variable_is_no_key():
    assert read_api_key(None, "gym.api_key_env") is None


@pytest.mark.parametrize("value", [None, "", "  \n"])
@pytest.mark.parametrize(
    ("told_as", "shown"),
    [(None, "gym.api_key_env SOME_KEY: the variable is not"), ("the key=X", "the key=X: the var")],
)
def test_a_variable_without_a_key_is_named_with_its_setting(monkeypatch, value, told_as, shown):
    monkeypatch.delenv("SOME_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(ConfigError, match=shown) as caught:
        read_api_key("SOME_KEY", "gym.api_key_env", told_as)
    assert caught.value.setting == "gym.api_key_env"


@pytest.mark.parametrize("value", ["sk\r\nX-Other: 1", "schlüssel"])
def test_a_key_that_no_header_may_hold_is_refused_without_showing_it(monkeypatch, value):
    monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(ConfigError, match="can't be sent in an HTTP header") as caught:
        read_api_key("SOME_KEY", "vllm.api_key_env")
    assert value not in str(caught.value)


def test_a_key_is_sent_as_a_bearer_and_no_key_as_nothing():
    assert authorization("sk-123") == {"Authorization": "Bearer sk-123"}
    assert authorization(None) == {}
