import pytest

from gymrl.cli.discovery import choose_model
from gymrl.errors import ConfigError


def test_the_only_model_is_asked_for():
    assert choose_model(["my-7b"], "http://x/v1") == "my-7b"


def test_a_model_called_policy_comes_first():
    assert choose_model(["base", "policy"], "http://x/v1") == "policy"


@pytest.mark.parametrize(("names", "shown"), [([], "no model"), (["a", "b"], "a, b")])
def test_none_or_several_models_need_a_name(names, shown):
    with pytest.raises(ConfigError, match=f"serves {shown}: name one with --model-name"):
        choose_model(names, "http://x/v1")
