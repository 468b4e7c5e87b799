"""New weights for servers by URL: what is refused before any server is asked."""

import numpy as np
import pytest

from gymrl.config import VllmConfig
from gymrl.errors import ConfigError, WeightUpdateError
from gymrl.generation.balancer import Balancer
from gymrl.generation.vllm_client import VllmClient
from gymrl.generation.vllm_updates import ServerFleet
from gymrl.generation.weight_offers import is_on_this_host
from gymrl.generation.weights import DirectoryWeights, TensorWeights, TransferWeights

ELSEWHERE = "http://gpu-host.invalid:8000"
TENSORS = TensorWeights.of({"w": np.zeros(3, np.float32)})


async def refusal(source, version: str = "1", *, is_allowed: bool = True) -> str:
    config = VllmConfig(base_urls=(ELSEWHERE,), update_servers=is_allowed)
    client = VllmClient()
    taken_out: list[str] = []
    fleet = ServerFleet(
        client, config, None, Balancer([ELSEWHERE]), lambda upstream, _: taken_out.append(upstream)
    )
    try:
        with pytest.raises(WeightUpdateError) as caught:
            await fleet.update(source, version, "keep")
    finally:
        await client.close()
    assert taken_out == []
    assert (caught.value.version, caught.value.serving) == (version, "0")
    return str(caught.value)


async def test_servers_are_left_alone_unless_the_setting_allows_it():
    said = await refusal(DirectoryWeights(path="step_1"), is_allowed=False)
    assert "set vllm.update_servers: true" in said


async def test_tensors_go_to_servers_on_this_host_only():
    said = await refusal(TENSORS)
    assert ELSEWHERE in said
    assert "give DirectoryWeights" in said


async def test_a_transfer_is_for_as_many_engines_as_there_are_servers():
    weights = TransferWeights(
        backend="gymrl_gloo", init_info={}, update_info={}, engines=({"rank": 1}, {"rank": 2})
    )
    said = await refusal(weights)
    assert "made for 2 engines; calls go to 1: make it with num_engines=1" in said


async def test_a_transfer_that_does_not_fit_reaches_no_server():
    lists = {"names": ["odd"], "shapes": [[3]], "dtype_names": ["int64"]}
    weights = TransferWeights(backend="gymrl_gloo", init_info={}, update_info=lists)
    assert "1 of a type that is none of float32" in await refusal(weights)


async def test_a_directory_without_weights_reaches_no_server(tmp_path):
    assert "holds no *.safetensors" in await refusal(DirectoryWeights(path=str(tmp_path)))


def test_the_setting_is_for_servers_by_url():
    with pytest.raises(ConfigError, match="always takes weights"):
        VllmConfig(update_servers=True)
    with pytest.raises(ConfigError, match="update_timeout_s"):
        VllmConfig(base_urls=(ELSEWHERE,), update_timeout_s=0)


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.7:8000", False),
        ("https://node1", False),
    ],
)
def test_a_loopback_address_is_this_host(url, is_here):
    assert is_on_this_host(url) == is_here
