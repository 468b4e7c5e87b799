"""How often a row is sent, seen from the server's side."""

import copy
import logging

import anyio
import pytest

from gymrl.config import GymConfig, RolloutConfig
from gymrl.errors import GymTransportError, RolloutRedispatchExhausted, RolloutStreamError
from gymrl.rollout.engine import RolloutEngine
from gymrl.testing.gym_server import FakeGymServer, Fault, gym_answer
from gymrl.types import Trajectory

GOOD = gym_answer([([1, 2, 3], [4, 5])])

INFRA = [
    Fault.HTTP_408,
    Fault.HTTP_429,
    Fault.HTTP_500,
    Fault.HTTP_503_RETRY_AFTER,
    Fault.HTTP_504,
    Fault.CLOSED_AFTER_ACCEPT,
    Fault.SHORT_BODY,
]
HANGING = [Fault.SILENT, Fault.STALLED_BODY]
DATA = [
    Fault.HTTP_400,
    Fault.HTTP_413,
    Fault.HTTP_422,
    Fault.TRUNCATED_JSON,
    Fault.HTML_WITH_200,
    Fault.NAN_LOGPROB,
    Fault.NAN_REWARD,
    Fault.DEEP_NESTING,
]


def row(agent="fake_agent", **fields):
    return {
        "responses_create_params": {"input": "2+2?"},
        "agent_ref": {"name": agent},
        **fields,
    }


@pytest.fixture
def open_engine():
    """An engine whose one worker, in this process, asks the agents of a fake server."""

    def make(server, *, row_timeout_s=30.0, **settings):
        gym = GymConfig(registry_url=server.url, row_timeout_s=row_timeout_s)
        settings.setdefault("retry_delay_s", 0.05)
        return RolloutEngine(RolloutConfig(gym=gym, in_process=True, **settings))

    return make


@pytest.mark.parametrize(("faults", "row_timeout_s"), [(INFRA, 30.0), (HANGING, 3.0)])
async def test_a_row_whose_failures_are_the_fleets_is_sent_five_times(
    open_engine, faults, row_timeout_s
):
    """NVIDIA-NeMo/Gym#1788: a 503 that lost its status was taken for the row's fault."""
    script = {index: [fault] * 4 + [GOOD] for index, fault in enumerate(faults)}
    async with (
        FakeGymServer(script) as server,
        open_engine(server, row_timeout_s=row_timeout_s) as engine,
    ):
        with anyio.fail_after(55):
            groups = await engine.run([row() for _ in faults])
        assert dict(server.requests) == dict.fromkeys(range(len(faults)), 5)
        assert engine.progress.redispatches == 4 * len(faults)
    assert all(isinstance(group.samples[0], Trajectory) for group in groups)


async def test_the_fifth_failure_of_the_fleet_ends_the_run_whatever_the_policy(open_engine):
    script = {0: Fault.HTTP_500}
    async with FakeGymServer(script) as server:
        async with open_engine(server, failure_policy="mask") as engine:
            stream = engine.stream([row(), row(), row()])
            with anyio.fail_after(50):
                first = {(await anext(stream)).index, (await anext(stream)).index}
                with pytest.raises(RolloutRedispatchExhausted) as caught:
                    await anext(stream)
        assert first == {1, 2}, "what is done is yielded before"
        assert server.requests[0] == 5
    assert (caught.value.row, caught.value.attempts) == (0, 5)
    cause = caught.value.__cause__
    assert isinstance(cause, GymTransportError)
    assert (cause.status, cause.url) == (500, f"{server.url}/run")
    assert "RuntimeError('scripted')" in cause.body


@pytest.mark.parametrize("policy", ["mask", "drop_group"])
async def test_a_row_whose_failures_are_its_own_is_sent_twice(open_engine, policy):
    script = dict(enumerate(DATA))
    async with FakeGymServer(script) as server:
        async with open_engine(server, failure_policy=policy) as engine:
            groups = await engine.run([row() for _ in range(len(DATA) + 3)])
            progress = engine.progress
        assert [server.requests[index] for index in range(len(DATA))] == [2] * len(DATA)
        assert [server.requests[len(DATA) + n] for n in range(3)] == [1, 1, 1]
    assert (progress.rows_done, progress.rows_failed) == (3, len(DATA))
    assert sum(progress.failures.values()) == len(DATA)
    if policy == "mask":
        failures = [group.failures[0] for group in groups if group.failures]
        assert [failure.attempts for failure in failures] == [2] * len(DATA)
        assert all(failure.kind == "data" and failure.traceback for failure in failures)
        assert failures[0].status == 400
        assert "maximum context length" in failures[0].message
    else:
        assert len(groups) == 3
        assert progress.groups_dropped == len(DATA)


async def test_the_second_failure_of_a_row_ends_the_run_under_the_policy_raise(open_engine):
    async with FakeGymServer({1: Fault.HTTP_400}) as server, open_engine(server) as engine:
        with pytest.raises(RolloutStreamError, match=r"row 1 .*maximum context length") as caught:
            await engine.run([row(), row()])
        assert server.requests[1] == 2
    assert (caught.value.row, caught.value.__cause__.status) == (1, 400)


async def test_the_two_budgets_do_not_mix(open_engine):
    script = {0: [Fault.HTTP_500, Fault.NAN_LOGPROB, Fault.HTTP_500, GOOD]}
    async with FakeGymServer(script) as server, open_engine(server) as engine:
        (group,) = await engine.run([row()])
        assert server.requests[0] == 4
    assert len(group.trajectories) == 1


async def test_a_refused_connection_is_no_attempt_but_not_tried_for_ever(open_engine):
    """NVIDIA-NeMo/Gym#2216: connection refused was tried again without end."""
    async with FakeGymServer() as server:
        async with open_engine(server, max_infra_attempts=3) as engine:
            with anyio.fail_after(30):
                with pytest.raises(RolloutRedispatchExhausted) as caught:
                    await engine.run([row(server.refused_agent)])
        assert server.requests.total() == 0
    cause = caught.value.__cause__
    assert (caught.value.attempts, cause.was_sent) == (3, False)
    assert cause.url.endswith("/run")


async def test_a_server_that_says_when_is_not_asked_before(open_engine):
    times = []

    def script(body):
        times.append(anyio.current_time())
        return GOOD if len(times) > 1 else Fault.HTTP_503_RETRY_AFTER

    async with FakeGymServer(script) as server, open_engine(server) as engine:
        await engine.run([row()])
    assert times[1] - times[0] >= 2.0


async def test_after_a_retry_the_result_is_that_of_a_fresh_run(open_engine):
    """THUDM/slime#1861: the second attempt still held tokens of the first."""
    first = gym_answer([([1, 2], [3]), ([1, 2, 9, 9], [7])])  # breaks off after one good turn
    second = gym_answer([([1, 2], [4]), ([1, 2, 4, 5], [6])], reward=0.5)
    rows = [row(extra={"answer": [1, {"deep": 2}]})]
    before = copy.deepcopy(rows)
    async with FakeGymServer({0: [first, second]}) as server:
        async with open_engine(server, seed=11) as engine:
            (group,) = await engine.run(rows)
            retried = server.bodies[0]
        async with open_engine(server, seed=11) as engine:
            (fresh,) = await engine.run(rows)  # the last answer repeats
    assert rows == before
    (sample,), (other,) = group.trajectories, fresh.trajectories
    assert sample.token_ids.tolist() == other.token_ids.tolist() == [1, 2, 4, 5, 6]
    assert sample.logprobs.tolist() == other.logprobs.tolist()
    assert (sample.turns, sample.reward) == (other.turns, other.reward)
    asked = server.bodies[0]
    assert retried["_ng_rollout_id"] != asked["_ng_rollout_id"]
    assert {**retried, "_ng_rollout_id": ""} == {**asked, "_ng_rollout_id": ""}


async def test_no_failure_is_a_reward_of_zero(open_engine):
    """NVIDIA-NeMo/RL#3470: failures became samples with reward 0 and moved the baseline."""
    async with FakeGymServer({2: Fault.HTTP_400}) as server:
        async with open_engine(server, failure_policy="mask") as engine:
            (group,) = await engine.run([row()], num_generations=4)
    assert [type(sample).__name__ for sample in group.samples] == [
        "Trajectory",
        "Trajectory",
        "Failure",
        "Trajectory",
    ]
    assert group.metrics["total_reward/mean"] == 1.0
    assert group.metrics["rollout_failures/GymRequestError"] == 1


async def test_one_row_of_a_hundred_that_cannot_be_read_is_one_failure(open_engine, caplog):
    """THUDM/slime#2078: one row that raised left only cancellations of its siblings in the log."""
    async with FakeGymServer({57: Fault.TRUNCATED_JSON}) as server:
        async with open_engine(server, failure_policy="mask") as engine:
            with caplog.at_level(logging.ERROR):
                groups = await engine.run([row() for _ in range(100)])
    failures = [failure for group in groups for failure in group.failures]
    assert sum(len(group.trajectories) for group in groups) == 99
    (failure,) = failures
    assert (failure.row, failure.error) == (57, "GymSchemaError")
    assert "not JSON" in failure.message
    assert "Traceback" in failure.traceback
    assert "CancelledError" not in failure.traceback
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(
    ("fault", "said"), [("x", r"KeyError\('x'\)"), ("exit", r"SystemExit\(3\)")]
)
async def test_a_server_whose_code_raises_for_one_row_costs_no_other_row(caplog, fault, said):
    """``sys.exit`` in it would else end the worker, with all that the others have under way."""
    async with FakeGymServer() as policy:
        block = {"entrypoint": "tests.integration.rollout.servers:BrokenAgent", "after": 99}
        servers = {"math": {"responses_api_agents": {"a": block}}}
        gym = GymConfig(servers=servers, base_urls=(f"{policy.url}/v1",))
        config = RolloutConfig(gym=gym, max_infra_attempts=2, retry_delay_s=0.5)
        rows = [row("math") for _ in range(100)]
        rows[57]["broken"] = fault
        async with RolloutEngine(config) as engine:
            stream = engine.stream(rows)
            groups = [await anext(stream) for _ in range(99)]
            with pytest.raises(RolloutRedispatchExhausted, match=rf"row 57 .*{said}") as e:
                await anext(stream)
    assert sorted(group.index for group in groups) == [n for n in range(100) if n != 57]
    assert "Traceback" in e.value.__cause__.__notes__[0]
    assert "CancelledError" not in str(e.value)
    assert "never retrieved" not in caplog.text
