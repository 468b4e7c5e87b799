"""What a launcher gives to the ranks of a job: a secret, and who they are."""

import pytest

from gymrl.errors import ConfigError
from gymrl.torchrun.world import launched_by, launcher_secret


def test_a_secret_that_could_be_guessed_is_refused_and_not_shown():
    with pytest.raises(
        ConfigError, match="GYMRL_SECRET has 7 bytes and could be guessed"
    ) as caught:
        launcher_secret({"GYMRL_SECRET": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_a_launcher_may_give_a_long_one_or_none():
    assert launcher_secret({"GYMRL_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    assert launcher_secret({"GYMRL_SECRET": ""}) == launcher_secret({}) == b""


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_a_process_is_a_rank_when_a_launcher_says_so_and_alone_when_none_does():
    assert launched_by(TORCHRUN)
    assert launched_by({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"})
    assert not launched_by({})
    assert not launched_by({"RANK": "0", "WORLD_SIZE": "1"})
    assert not launched_by({"RANK": "3", "MASTER_ADDR": "host"})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "WORLD_SIZE=2 .* MASTER_ADDR and MASTER_PORT are"),
        ({"RANK": ""}, "but RANK is not set: start it with torchrun"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2: ranks are numbered from 0 to 1"),
        ({"RANK": "-1"}, "RANK='-1': a launcher sets it to a number, 0 or more"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT='x'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: is no port"),
    ],
)
def test_variables_that_leave_other_ranks_waiting_are_refused(changed, says):
    """Each rank would train alone, on the same rows, or wait for the others until a deadline."""
    with pytest.raises(ConfigError, match=says):
        launched_by({**TORCHRUN, **changed})
