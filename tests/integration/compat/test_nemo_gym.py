"""``NemoGym`` before a scripted Gym, with real worker processes where a test needs them."""

import contextlib
import sys

import anyio
import anyio.to_thread
import pytest
import torch

from gymrl.compat.nemo_rl import (
    NemoGym,
    run_async_nemo_gym_rollout,
    run_nemo_gym_rollout_sync,
    spinup_nemo_gym_actor,
)
from gymrl.errors import (
    ConfigError,
    NoGenerationError,
    RowValueError,
    ServerError,
    UnsupportedOptionError,
)
from gymrl.testing import FakeGymServer, build_tiny_tokenizer
from gymrl.testing.gym_server import Fault, gym_answer

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "max_new_tokens": 8}


class Letters:
    pad_token_id = 0

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]


class Policy:
    max_model_len = 64


def row(agent="fake_agent", **fields):
    return {
        "responses_create_params": {"input": "hi"},
        "agent_ref": {"name": agent},
        **fields,
    }


def cfg_for(server):
    host, port = server.url.removeprefix("http://").split(":")
    head = {"head_server": {"host": host, "port": int(port)}}
    return {
        "model_name": "policy",
        "base_urls": [],
        "initial_global_config_dict": head,
        "in_process": True,
    }


@contextlib.asynccontextmanager
async def spun_up(script=None, agents=("fake_agent",)):
    async with FakeGymServer(script, agents=agents) as server:
        environment = NemoGym(cfg_for(server))
        await anyio.to_thread.run_sync(environment._spinup)
        try:
            yield environment, server
        finally:
            await anyio.to_thread.run_sync(environment.shutdown)


def rollout(environment, rows, num_generations, **options):
    batch = {"extra_env_info": rows, **options.pop("batch", {})}
    options = {"log_full_result_tables": False, **options}
    return run_async_nemo_gym_rollout(
        Policy(), batch, Letters(), {"nemo_gym": environment}, SAMPLING, num_generations, **options
    )


async def test_groups_come_in_completion_order_and_the_last_has_the_timings():
    async with spun_up({0: Fault.SILENT}) as (environment, server):
        results = rollout(environment, [row() for _ in range(4)], 2)
        first = await anext(results)
        assert first.task_index == 1
        assert not any(name.startswith("timing/") for name in first.rollout_metrics)
        await results.aclose()
        with anyio.fail_after(30):
            await server.wait_until_idle()
    async with spun_up() as (environment, _):
        found = [result async for result in rollout(environment, [row() for _ in range(4)], 2)]
    timings = ["timing/rollout/total" in result.rollout_metrics for result in found]
    assert timings == [False, True]


async def test_leaving_early_and_cancellation_end_what_is_in_flight():
    script = {1: Fault.SILENT, 3: Fault.SILENT}
    async with spun_up(script) as (environment, server):

        async def collect() -> None:
            async for _ in rollout(environment, [row() for _ in range(4)], 2):
                raise AssertionError("no group is complete")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(collect)
            await server.wait_for_requests(4)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(30):
            await server.wait_until_idle()
        assert server.disconnects == 2
        # The environment is as good as before.
        assert len([r async for r in rollout(environment, [row()], 1)]) == 1


async def test_three_numbers_stay_three():
    agents = ("a_agent", "b_agent")
    rows = [row("a_agent"), row("a_agent"), row("b_agent"), row("b_agent")]
    async with spun_up(agents=agents) as (environment, server):
        (result,) = [
            result
            async for result in rollout(
                environment,
                rows,
                4,
                returns_entire_batch=True,
                routing_group_size=1,
                identity_num_generations=2,
            )
        ]
        assert result.task_index is None
        assert [ref["name"] for ref in result.final_batch["agent_ref"]] == [
            "a_agent",
            "a_agent",
            "b_agent",
            "b_agent",
        ]
        tasks = [server.bodies[index]["_ng_task_index"] for index in range(4)]
        assert tasks == [0, 0, 1, 1]
        with pytest.raises(ValueError, match="mix routes"):
            await anext(rollout(environment, rows, 4, returns_entire_batch=True))
        with pytest.raises(ValueError, match="returns_entire_batch"):
            await anext(rollout(environment, rows, 2, returns_entire_batch=True))
        with pytest.raises(ValueError, match="identity_num_generations=3"):
            await anext(rollout(environment, rows, 2, identity_num_generations=3))


async def test_what_this_road_does_not_have_is_refused_before_any_request():
    async with spun_up() as (environment, server):
        for options in (
            {"greedy": True},
            {"max_rollout_turns": 3},
            {"sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": 5}},
        ):
            with pytest.raises(AssertionError):
                await anext(rollout(environment, [row()], 1, **options))
        with pytest.raises(UnsupportedOptionError, match="stop"):
            await anext(
                run_async_nemo_gym_rollout(
                    Policy(),
                    {"extra_env_info": [row()]},
                    Letters(),
                    {"nemo_gym": environment},
                    {**SAMPLING, "stop_strings": ["x"]},
                    1,
                    False,
                )
            )
        with pytest.raises(TypeError, match="row 1"):
            await anext(rollout(environment, [row(), {"agent_ref": {"name": "fake_agent"}}], 1))
        with pytest.raises(RowValueError, match="3 message logs for 1 rows"):
            await anext(rollout(environment, [row()], 1, batch={"message_log": [1, 2, 3]}))
        effort = {"low_weight": 1.0, "low_string": "x", "low_ub": 0}
        with pytest.raises(ConfigError, match="low_ub"):
            await anext(rollout(environment, [row()], 1, effort_config=effort))
        with pytest.raises(ConfigError, match="task_to_env"):
            await anext(rollout(object(), [row()], 1))
        assert not server.requests


async def test_the_callers_batch_is_not_changed_and_its_multipliers_are_carried():
    rows = [row(), row()]
    multipliers = torch.tensor([1.0, 0.0])
    async with spun_up() as (environment, _):
        (result,) = [
            r async for r in rollout(environment, rows, 2, batch={"loss_multiplier": multipliers})
        ]
    assert result.final_batch["loss_multiplier"].tolist() == [1.0, 0.0]
    assert rows == [row(), row()]
    assert multipliers.tolist() == [1.0, 0.0]


async def test_flags_are_carried_or_left_out():
    flagged = {0: gym_answer([([1], [2])], mask_sample=True)}
    async with spun_up(flagged) as (environment, _):
        (kept,) = [r async for r in rollout(environment, [row(), row()], 2)]
        (left,) = [
            r async for r in rollout(environment, [row(), row()], 2, mask_env_flagged_samples=False)
        ]
    assert kept.final_batch["mask_sample"].tolist() == [True, False]
    assert "mask_sample" not in left.final_batch


async def test_a_limit_above_the_context_is_warned_of_once(caplog):
    async with spun_up() as (environment, _):
        for _ in range(2):
            assert [r async for r in rollout(environment, [row()], 1, max_seq_len=4099)]
    warned = [record for record in caplog.records if "max_seq_len=4099" in record.message]
    assert len(warned) == 1


async def test_rows_are_run_as_they_are_by_the_environment_itself():
    rows = [row(_rowidx=7, note="x"), row(_rowidx=8)]
    async with spun_up() as (environment, server):
        found = [item async for item in environment.run_rollouts(rows, "timing/mine")]
    assert sorted(index for index, _, _ in found) == [7, 8]
    assert server.bodies[7] == rows[0]
    _, result, timings = found[-1]
    assert timings["timing/mine/total"] > 0
    assert found[0][2] is None
    assert set(result) == {"message_log", "input_message_log", "full_result", "agent_ref"}
    assert result["full_result"]["reward"] == 1.0
    assert [message["role"] for message in result["message_log"]] == ["user", "assistant"]


async def test_a_row_that_fails_in_the_environment_is_a_typed_runtime_error():
    broken = gym_answer([])
    async with spun_up({0: broken}) as (environment, _):
        with pytest.raises(RuntimeError) as caught:
            async for _ in environment.run_rollouts([row(_rowidx=0)], "timing/rollout"):
                pass
    assert isinstance(caught.value, NoGenerationError)


async def test_a_blocking_rollout_is_refused_where_a_loop_runs():
    async with spun_up() as (environment, _):
        with pytest.raises(RuntimeError, match="run_async_nemo_gym_rollout"):
            run_nemo_gym_rollout_sync(
                Policy(),
                {"extra_env_info": [row()]},
                Letters(),
                {"nemo_gym": environment},
                SAMPLING,
                False,
                num_generations_per_prompt=1,
            )


async def test_blocking_rollouts_one_after_the_other_and_side_by_side_share_the_environment():
    """Connections belong to a loop that outlives the calls."""
    async with spun_up() as (environment, server):

        def once():
            return (
                run_nemo_gym_rollout_sync(
                    Policy(),
                    {"extra_env_info": [row(), row()]},
                    Letters(),
                    {"nemo_gym": environment},
                    SAMPLING,
                    False,
                    num_generations_per_prompt=2,
                )
                .final_batch["total_reward"]
                .tolist()
            )

        found = [await anyio.to_thread.run_sync(once) for _ in range(2)]

        async def keep():
            found.append(await anyio.to_thread.run_sync(once))

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(keep)
        assert found == [[1.0, 1.0]] * 5
        assert server.requests.total() == 10


async def test_workers_of_their_own_and_a_tokenizer_that_is_installed_once():
    tokenizer = build_tiny_tokenizer()
    text = tokenizer.encode("hello", add_special_tokens=False)
    async with FakeGymServer(lambda body: gym_answer([(text, text)])) as server:
        host, port = server.url.removeprefix("http://").split(":")
        block = {"head_server": {"host": host, "port": int(port)}, "num_workers": 2}
        environment = await anyio.to_thread.run_sync(
            lambda: spinup_nemo_gym_actor(
                {"nemo_gym": block},
                [],
                "policy",
                tokenizer=tokenizer,
                enable_router_replay=False,
                routed_experts_dtype="int16",
                use_fastokens=False,
            )
        )
        with pytest.raises(ServerError, match="before _spinup"):
            environment.set_tokenizer(tokenizer)
        with pytest.raises(ServerError, match="already"):
            environment._spinup()
        results = run_async_nemo_gym_rollout(
            Policy(),
            {"extra_env_info": [row() for _ in range(4)]},
            tokenizer,
            {"nemo_gym": environment},
            SAMPLING,
            2,
            False,
        )
        found = [result async for result in results]
        assert block["num_workers"] == 2
        await anyio.to_thread.run_sync(environment.shutdown)
        await anyio.to_thread.run_sync(environment.shutdown)
    log = found[0].final_batch["message_log"][0]
    assert [message["content"] for message in log] == ["hello", "hello"]
    shards = [n for n in found[1].rollout_metrics if n.startswith("timing/rollout/shard/default/")]
    assert shards


async def test_gpu_nodes_are_refused():
    options = {"tokenizer": "/x", "routed_experts_dtype": "int8", "use_fastokens": False}
    with pytest.raises(UnsupportedOptionError, match="num_gpu_nodes"):
        spinup_nemo_gym_actor(
            {"nemo_gym": {"num_gpu_nodes": 1}}, [], "m", enable_router_replay=False, **options
        )


async def test_a_script_that_forgets_to_shut_down_still_ends():
    script = """
import sys
from gymrl.compat.nemo_rl import NemoGym
host, port = sys.argv[1].split(":")
environment = NemoGym({
    "model_name": "policy",
    "base_urls": [],
    "initial_global_config_dict": {"head_server": {"host": host, "port": int(port)}},
})
environment._spinup()
raise SystemExit(3)
"""
    async with FakeGymServer() as server:
        address = server.url.removeprefix("http://")
        with anyio.fail_after(50):
            ended = await anyio.run_process([sys.executable, "-c", script, address], check=False)
    assert ended.returncode == 3, ended.stderr.decode()
