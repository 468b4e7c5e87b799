import itertools

import aiohttp
import anyio
import numpy as np
import pytest
from aiohttp import web

from gymrl.actors import spawn
from gymrl.addresses import bound_socket
from gymrl.config import GymConfig, SamplingParams
from gymrl.errors import ConfigError, ServerError
from gymrl.generation.base import Generated
from gymrl.generation.fidelity import RecordedSequence, check_fidelity
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.service import GymService
from gymrl.testing import ScriptedGenerator
from gymrl.types import Failure, Trajectory
from tests.integration.ledger.conftest import CHAT_AGENT, agent

QUESTIONS = ["what is 1 and 2?", "and 12 by 34?", "hello?"]
SUBPROCESS_AGENT = agent("tests.integration.ledger.black_box:SubprocessAgent")
ARITHMETIC = {
    "arith": {
        "resources_servers": {
            "arith": {"entrypoint": "gymrl.gym.embedded.tool_arithmetic:ToolArithmeticServer"}
        }
    },
    "agent": {
        "responses_api_agents": {
            "simple_agent": {
                "entrypoint": "gymrl.gym.embedded.simple_agent:SimpleAgent",
                "resources_server": {"name": "arith"},
                "model_server": {"name": "policy_model"},
            }
        }
    },
}
LOOKUP = '<tool_call>{"name": "lookup", "arguments": {"name": "pens"}}</tool_call>'
TOOL = {
    "type": "function",
    "name": "lookup",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
}


def counting(chat):
    """Answers with a number of its own each time, so that no two samples are equal."""
    numbers = itertools.count()

    def answer(_, __) -> Generated:
        ids = [*chat.encode(f"answer {next(numbers)}"), 2]
        return Generated(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="stop")

    return answer


async def rollouts_held(base_url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{base_url}/ledger") as answer:
        return (await answer.json())["rollouts"]


async def until_held(base_url: str, count: int) -> None:
    with anyio.fail_after(40):
        while await rollouts_held(base_url) != count:  # noqa: ASYNC110 - asks another server
            await anyio.sleep(0.02)


async def test_a_black_box_in_a_process_of_its_own_is_trained_on_what_was_sampled(
    serve_tiny, gym, roll_out, make_row
):
    async with serve_tiny() as (base_url, recorder):
        async with gym([base_url], SUBPROCESS_AGENT) as service:
            (trajectory,) = await roll_out(service, make_row(questions=QUESTIONS))
        assert await rollouts_held(base_url) == 0
        assert isinstance(trajectory, Trajectory), trajectory
        assert len(recorder.calls) == len(trajectory.turns) == 3
        for turn, (prompt, ids, logprobs) in zip(trajectory.turns, recorder.calls, strict=True):
            assert trajectory.token_ids[: turn.generation_start].tolist() == prompt
            assert trajectory.token_ids[turn.generation_start : turn.end].tolist() == ids
            recorded = np.array(logprobs, dtype=np.float32)
            assert np.array_equal(trajectory.logprobs[turn.generation_start : turn.end], recorded)
        assert trajectory.reward.verifier == 1.0
        sequence = RecordedSequence.of(trajectory, SamplingParams())
        assert check_fidelity(recorder.generator.model, [sequence]).agrees()


@pytest.mark.parametrize("source", ["messages", "ledger", "both"])
async def test_an_agent_that_carries_tokens_gives_one_trajectory_on_every_road(
    serve, gym, roll_out, make_row, chat, source
):
    script = [[*chat.encode(LOOKUP), 2], [*chat.encode("That makes 14"), 2]]
    row = make_row(
        "arith",
        responses_create_params={"input": "how many pens?", "tools": [TOOL]},
        table={"pens": 14},
        expected_answer=14,
    )
    generator = ScriptedGenerator(script)
    async with serve(generator) as base_url:
        async with gym([base_url], ARITHMETIC, token_source=source) as service:
            (trajectory,) = await roll_out(service, row)
        assert await rollouts_held(base_url) == 0
    assert isinstance(trajectory, Trajectory), trajectory
    assert trajectory.reward.verifier == 1.0
    whole = [*generator.calls[1].prompt_ids, *script[1]]
    assert trajectory.token_ids.tolist() == whole
    assert [
        trajectory.token_ids[t.generation_start : t.end].tolist() for t in trajectory.turns
    ] == (script)
    assert trajectory.notes == {}


async def test_an_agent_that_drops_tokens_fails_the_row_where_both_roads_are_asked_for(
    serve, gym, roll_out, make_row, chat
):
    async with serve(ScriptedGenerator(counting(chat))) as base_url:
        async with gym([base_url], token_source="both") as service:
            (failure,) = await roll_out(service, make_row(questions=["a"]))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.error) == ("data", "GymSchemaError")


async def test_side_calls_are_kept_beside_the_main_conversation(
    serve, gym, roll_out, make_row, chat
):
    async with serve(ScriptedGenerator(counting(chat))) as base_url:
        async with gym([base_url], side_calls="keep") as service:
            (trajectory,) = await roll_out(service, make_row(questions=QUESTIONS, aside=True))
    assert len(trajectory.turns) == 3
    assert trajectory.notes == {"side_calls": 3}
    texts = [chat.decode(side.token_ids.tolist()) for side in trajectory.side_trajectories]
    assert sorted(text.count("title of") for text in texts) == [1, 1, 1]
    assert all(len(side.turns) == 1 for side in trajectory.side_trajectories)


async def test_many_rollouts_over_several_servers_each_get_their_own_tokens(
    serve, gym, roll_out, make_row, chat
):
    first, second = ScriptedGenerator(counting(chat)), ScriptedGenerator(counting(chat))
    rows = [make_row(questions=[f"{i}-{k}" for k in range(4)]) for i in range(32)]
    async with serve(first) as one, serve(second) as other:
        async with gym([one, other]) as service:
            outcomes = await roll_out(service, *rows)
        assert [await rollouts_held(url) for url in (one, other)] == [0, 0]
    assert [len(generator.calls) for generator in (first, second)] == [64, 64]
    for number, trajectory in enumerate(outcomes):
        assert isinstance(trajectory, Trajectory), trajectory
        assert len(trajectory.turns) == 4
        text = chat.decode(trajectory.token_ids.tolist())
        assert [text.count(f"{number}-{k}") for k in range(4)] == [1, 1, 1, 1]


async def test_an_evicted_ledger_fails_the_row_as_the_fleets_fault_and_says_why(
    serve, gym, roll_out, make_row, chat
):
    async with serve(ScriptedGenerator(counting(chat)), max_bytes=2500) as base_url:
        async with gym([base_url]) as service:
            (failure,) = await roll_out(service, make_row(questions=QUESTIONS))
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.error) == ("infra", "LedgerLostError")
    assert "ledger_max_bytes=2500" in failure.message


async def test_a_restarted_server_fails_the_rows_that_it_forgot_and_serves_the_next(
    serve, gym, roll_out, make_row, chat
):
    # Nobody else's while the server is away.
    place = bound_socket("127.0.0.1", 0)
    port = place.getsockname()[1]
    async with serve(ScriptedGenerator(counting(chat)), port=port) as base_url:
        spun_up = gym([base_url])
        service = await spun_up.__aenter__()
        assert isinstance((await roll_out(service, make_row(questions=["a"])))[0], Trajectory)
    async with serve(ScriptedGenerator(counting(chat)), port=port):
        (failure,) = await roll_out(service, make_row(questions=["b"]))
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.error) == ("infra", "LedgerLostError")
        assert "restarted" in failure.message
        assert isinstance((await roll_out(service, make_row(questions=["c"])))[0], Trajectory)
        await spun_up.__aexit__(None, None, None)
    place.close()


async def test_a_cancelled_rollout_leaves_nothing_on_the_server(serve, gym, make_row, chat):
    async with serve(ScriptedGenerator(counting(chat))) as base_url:
        async with gym([base_url]) as service:

            async def run() -> None:
                rows = [make_row(questions=["a"], hold=True)]
                async for _ in service.stream("run_rollouts", rows):
                    raise AssertionError("the row does not end")

            async with anyio.create_task_group() as group:
                group.start_soon(run)
                await until_held(base_url, 1)
                group.cancel_scope.cancel()
            await until_held(base_url, 0)


async def test_a_row_that_never_reaches_its_own_base_url_fails_as_data(
    serve, gym, roll_out, make_row, chat
):
    async with serve(ScriptedGenerator(counting(chat))) as base_url:
        async with gym([base_url]) as service:
            (failure,) = await roll_out(service, make_row(questions=[]))
    assert (failure.kind, failure.error) == ("data", "NoGenerationError")


async def test_a_policy_server_without_ledgers_is_refused_at_spin_up():
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": []})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    listener = Listener(app, PortRange())
    await listener.start()
    url = f"{listener.url}/v1"
    config = GymConfig(servers=CHAT_AGENT, token_source="ledger")
    async with spawn(GymService, in_process=True, config=config) as service:
        with pytest.raises(ServerError, match="keeps none"):
            await service.call("spin_up", [url], "policy")
        with pytest.raises(ConfigError, match="base_urls"):
            await service.call("spin_up", [], "policy")
    await listener.stop()
