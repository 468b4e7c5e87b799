"""Router replay through ``NemoGym``: routes in message logs, fallback metrics, refusals."""

import contextlib

import anyio.to_thread
import pytest
import torch

from gymrl.compat.nemo_rl import NemoGym, backfill_missing_routed_experts
from gymrl.errors import GymrlError
from gymrl.routed_experts import encode_routes
from gymrl.testing import FakeGymServer
from gymrl.testing.gym_server import gym_answer
from gymrl.testing.model_server import scripted_routes
from tests.integration.compat.test_nemo_gym import cfg_for, rollout, row

TURNS = [([1, 2], [3]), ([1, 2, 3, 4], [5, 6])]


def routed_answer() -> dict:
    answer = gym_answer(TURNS)
    items = [i for i in answer["response"]["output"] if i.get("generation_token_ids")]
    for item, (prompt, sampled) in zip(items, TURNS, strict=True):
        item["routed_experts"] = encode_routes(scripted_routes([*prompt, *sampled]))
    return answer


@contextlib.asynccontextmanager
async def spun_up(script, **settings):
    async with FakeGymServer(script) as server:
        environment = NemoGym({**cfg_for(server), **settings})
        await anyio.to_thread.run_sync(environment._spinup)
        try:
            yield environment
        finally:
            await anyio.to_thread.run_sync(environment.shutdown)


def shown(log) -> list[list[int]]:
    return [message["routed_experts"][:, 0, 0].tolist() for message in log]


async def test_messages_have_their_routes_in_the_type_that_is_set():
    script = {0: routed_answer(), 1: routed_answer()}
    settings = {"require_routed_experts": True, "routed_experts_dtype": "int16"}
    async with spun_up(script, **settings) as environment:
        (result,) = [r async for r in rollout(environment, [row(), row()], 2)]

    for log in result.final_batch["message_log"]:
        assert shown(log) == [[1, 2], [3], [4], [5, 6]]
        assert {message["routed_experts"].dtype for message in log} == {torch.int16}
    assert result.batch.routed_experts.shape == (2, 6, 2, 2)
    assert result.rollout_metrics["r3/routed_experts_expected_token_routes"] == 10
    assert result.rollout_metrics["r3/routed_experts_fallback_token_routes"] == 0


async def test_a_sample_without_routes_is_filled_up_and_counted():
    async with spun_up({0: routed_answer(), 1: gym_answer(TURNS)}) as environment:
        (result,) = [r async for r in rollout(environment, [row(), row()], 2)]

    logs = result.final_batch["message_log"]
    assert shown(logs[0]) == [[1, 2], [3], [4], [5, 6]]
    assert shown(logs[1]) == [[-1, -1], [-1], [-1], [-1, -1]]
    assert backfill_missing_routed_experts(logs) == [0, 0]
    assert result.rollout_metrics["r3/routed_experts_fallback_samples"] == 1
    assert result.rollout_metrics["r3/routed_experts_fallback_token_route_fraction"] == 0.5


async def test_required_routes_that_nobody_returns_end_the_run_and_name_the_switch():
    """NVIDIA-NeMo/RL#3267: a run with router replay on and no routes at all went on silently."""
    script = {0: gym_answer(TURNS)}
    async with spun_up(script, require_routed_experts=True) as environment:
        with pytest.raises(GymrlError, match="return_routed_experts") as caught:
            _ = [r async for r in rollout(environment, [row()], 1)]

    assert isinstance(caught.value, RuntimeError)


async def test_rows_as_they_are_have_routes_too():
    async with spun_up({0: routed_answer()}, require_routed_experts=True) as environment:
        found = [r async for r in environment.run_rollouts([row(_rowidx=0)], "timing/rollout")]

    ((_, result, _),) = found
    assert shown(result["message_log"]) == [[1, 2], [3], [4], [5, 6]]
    assert all("routed_experts" not in item for item in result["full_result"]["response"]["output"])
