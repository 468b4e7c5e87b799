"""The agent keeps routes for its answer and sends no server what none reads."""

import json

import msgspec

from gymrl.gym.episode import EpisodeOptions, read_episode
from gymrl.testing.model_server import scripted_routes
from tests.integration.gym.test_agent import DONE, Setting, call


async def test_routes_reach_the_answer_whole_and_no_request_repeats_them():
    calls = [call("increment", {"by": 2}), call("increment", {}), DONE]
    script = [msgspec.structs.replace(each, has_routes=True) for each in calls]
    async with Setting(script) as setting:
        answer = await setting.post()

    assert all(b"routed_experts" not in body for body in setting.model.raw_bodies)
    # The token fields beside them go on byte for byte.
    assert all(b"-0.30000000000000004" in body for body in setting.model.raw_bodies[1:])
    items = json.loads(answer.body)["response"]["output"]
    assert sum("routed_experts" in item for item in items) == 3
    trajectory = read_episode(
        answer.body, agent="agent", options=EpisodeOptions(require_routed_experts=True)
    )
    expected = scripted_routes(trajectory.token_ids)
    assert trajectory.routed_experts[:-1].tolist() == expected[:-1].tolist()
    assert (trajectory.routed_experts[-1] == -1).all()
