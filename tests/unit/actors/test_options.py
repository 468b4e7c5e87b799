"""Options of a worker: checked when made, and silent about the values of variables."""

from __future__ import annotations

import pytest

from gymrl.actors import SpawnOptions
from gymrl.errors import ConfigError


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_heartbeat_timeout_is_positive_or_left_out(seconds):
    with pytest.raises(ConfigError, match="heartbeat_timeout_s"):
        SpawnOptions(heartbeat_timeout_s=seconds)
    assert SpawnOptions().heartbeat_timeout_s is None


def test_the_text_of_options_has_names_of_variables_and_no_values():
    options = SpawnOptions(name="a", env={"KEY": "sk-secret", "OTHER": "plain"})
    assert "sk-secret" not in repr(options)
    assert "plain" not in str(options)
    assert "env=['KEY', 'OTHER']" in repr(options)
    assert "name='a'" in repr(options)
    assert SpawnOptions.from_dict(options.to_dict()) == options
