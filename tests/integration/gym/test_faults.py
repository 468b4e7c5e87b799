"""Every way in which an answer goes wrong is a typed failure in its row's place, and only there."""

import pytest

from gymrl.actors import spawn
from gymrl.config import GymConfig
from gymrl.gym.service import GymService
from gymrl.testing.gym_server import FakeGymServer, Fault
from gymrl.types import Failure, Trajectory

FAILURES = {
    Fault.HTTP_400: ("data", "GymRequestError", 400, "maximum context length"),
    Fault.HTTP_408: ("infra", "GymTransportError", 408, "Request Timeout"),
    Fault.HTTP_413: ("data", "GymRequestError", 413, "takes no body of this size"),
    Fault.HTTP_422: ("data", "GymRequestError", 422, "Field required"),
    Fault.HTTP_429: ("infra", "GymTransportError", 429, "Too Many Requests"),
    Fault.HTTP_500: ("infra", "GymTransportError", 500, "RuntimeError('scripted')"),
    Fault.HTTP_503_RETRY_AFTER: ("infra", "GymTransportError", 503, "Service Unavailable"),
    Fault.HTTP_504: ("infra", "GymTransportError", 504, "Gateway Timeout"),
    Fault.CLOSED_AFTER_ACCEPT: ("infra", "GymTransportError", None, "disconnected"),
    Fault.SILENT: ("infra", "RolloutTimeout", None, "gym.row_timeout_s"),
    Fault.STALLED_BODY: ("infra", "RolloutTimeout", None, "within 5 s"),
    Fault.SHORT_BODY: ("infra", "GymTransportError", None, "ended early"),
    Fault.TRUNCATED_JSON: ("data", "GymSchemaError", None, "not JSON"),
    Fault.HTML_WITH_200: ("data", "GymSchemaError", None, "<html>try again later"),
    Fault.NAN_LOGPROB: ("data", "BadLogprobsError", None, "element 1 is null"),
    Fault.NAN_REWARD: ("data", "RewardContractError", None, "NaN and Infinity"),
    Fault.DEEP_NESTING: ("data", "GymSchemaError", None, "$.extra[0][0]"),
}
SURVIVED = {
    Fault.LONE_SURROGATE: {"replaced_surrogates": 1},
    Fault.HUGE_INTEGER: {},
}


@pytest.fixture
def roll_out():
    async def run(server, rows, **settings):
        config = GymConfig(registry_url=server.url, **settings)
        async with spawn(GymService, in_process=True, config=config) as gym:
            await gym.call("spin_up", [], "policy")
            return [result async for result in gym.stream("run_rollouts", rows)]

    return run


async def test_all_faults_at_once_fail_their_own_rows_and_the_others_go_on(roll_out, make_row):
    """THUDM/slime#2078: one row that raises takes no sibling with it."""
    faults = list(Fault)
    rows = [make_row(index) for index in range(len(faults) + 20)]
    async with FakeGymServer(dict(enumerate(faults))) as server:
        results = await roll_out(server, rows, row_timeout_s=5.0)
        assert set(server.requests.values()) == {1}, "nothing is sent twice here"
    outcomes = {result.index: result.outcome for result in results}
    assert sorted(outcomes) == list(range(len(rows)))
    assert FAILURES.keys() | SURVIVED.keys() == set(faults)
    for index, fault in enumerate(faults):
        outcome = outcomes[index]
        if fault in SURVIVED:
            assert isinstance(outcome, Trajectory), (fault, outcome)
            assert outcome.notes == SURVIVED[fault]
            continue
        kind, error, status, text = FAILURES[fault]
        assert isinstance(outcome, Failure), fault
        assert (outcome.kind, outcome.error, outcome.status) == (kind, error, status), outcome
        assert text in outcome.message
        assert outcome.row == index
        assert outcome.agent == "fake_agent"
        assert error in outcome.traceback
        assert "CancelledError" not in outcome.message
        if status is not None or kind == "infra":
            assert outcome.url == f"{server.url}/run"
    for index in range(len(faults), len(rows)):
        assert isinstance(outcomes[index], Trajectory)


async def test_retry_after_and_the_body_come_with_the_failure(roll_out, make_row):
    async with FakeGymServer({0: Fault.HTTP_503_RETRY_AFTER}) as server:
        [result] = await roll_out(server, [make_row(0)])
    assert result.outcome.fields["retry_after_s"] == 2.0
    assert result.outcome.fields["body"] == '"Service Unavailable"'


async def test_a_refused_connection_is_the_fleets_fault_and_names_the_url(roll_out, make_row):
    """NVIDIA-NeMo/Gym#2216."""
    async with FakeGymServer() as server:
        [result] = await roll_out(server, [make_row(0, FakeGymServer.refused_agent)])
    assert (result.outcome.kind, result.outcome.error) == ("infra", "GymTransportError")
    assert result.outcome.url in result.outcome.message
    assert result.agent == FakeGymServer.refused_agent


async def test_a_host_that_does_not_resolve_is_the_fleets_fault(make_row):
    from gymrl.errors import GymTransportError
    from gymrl.gym.client import GymClient, HttpPool

    async with HttpPool() as pool:
        client = GymClient(pool, 20.0)
        with pytest.raises(GymTransportError, match=r"nowhere\.invalid"):
            await client.run("http://nowhere.invalid:1/run", make_row(0), "a")


async def test_a_body_larger_than_any_default_limit_comes_back_whole(roll_out, make_row):
    """aio-libs/aiohttp#4474."""
    from gymrl.testing.gym_server import gym_answer

    big = gym_answer([([1], [2])], image="x" * (30 << 20))
    async with FakeGymServer({0: big}) as server:
        [result] = await roll_out(server, [make_row(0)])
    assert len(result.outcome.result) > 30 << 20


async def test_attempts_share_nothing(roll_out, make_row):
    """THUDM/slime#1861: after a failed attempt the next one's result is that of a fresh run."""
    from gymrl.testing.gym_server import gym_answer

    good = gym_answer([([1], [2])])
    broken = gym_answer([([1], [9]), ([1, 2], [3])])
    row = make_row(0)
    async with FakeGymServer({0: [broken, good]}) as server:
        [first] = await roll_out(server, [row])
        [second] = await roll_out(server, [row])
    assert first.outcome.error == "NonContiguousTokensError"
    assert second.outcome.token_ids.tolist() == [1, 2]
    assert server.requests[0] == 2
