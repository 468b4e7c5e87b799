"""The secret that a launcher gives to the nodes of a job."""

import pytest

from gymrl.errors import ConfigError
from gymrl.torchrun.world import launcher_secret


def test_a_secret_that_could_be_guessed_is_refused_and_not_shown():
    with pytest.raises(
        ConfigError, match="GYMRL_SECRET has 7 bytes and could be guessed"
    ) as caught:
        launcher_secret({"GYMRL_SECRET": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_a_launcher_may_give_a_long_one_or_none():
    assert launcher_secret({"GYMRL_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    assert launcher_secret({"GYMRL_SECRET": ""}) == launcher_secret({}) == b""
