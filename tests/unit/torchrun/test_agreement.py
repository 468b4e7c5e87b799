"""Ranks that were given different configurations."""

import pytest

from gymrl.config import GymConfig, RolloutConfig
from gymrl.torchrun import PerNode, TorchrunConfig
from gymrl.torchrun.agreement import differences, fingerprints, must_agree


def config(seed=1, key="secret", **settings):
    server = {"a": {"resources_servers": {"ours": {"entrypoint": "a.b:C", "api_key": key}}}}
    gym = GymConfig(servers=server, base_urls=("http://127.0.0.1:1/v1",))
    return TorchrunConfig(rollout=RolloutConfig(gym=gym, seed=seed), **settings)


def test_settings_that_differ_are_named_with_their_paths_and_not_shown():
    first = fingerprints(config())
    other = fingerprints(config(seed=2, key="other", per_node=PerNode(gym_workers=2)))
    assert differences(first, first) == []
    assert differences(other, first) == [
        "per_node.gym_workers",
        "rollout.gym.servers.a.resources_servers.ours.api_key",
        "rollout.seed",
    ]
    assert "secret" not in str(first)


def test_each_rank_may_have_its_own_address():
    assert differences(fingerprints(config(address="10.0.0.1")), fingerprints(config())) == []


@pytest.mark.parametrize(
    ("name", "is_fatal"),
    [
        ("per_node.gym_workers", True),
        ("weight_transfer", True),
        ("rollout.in_process", True),
        ("rollout.seed", False),
    ],
)
def test_what_would_leave_ranks_waiting_must_agree(name, is_fatal):
    assert must_agree(name) is is_fatal
