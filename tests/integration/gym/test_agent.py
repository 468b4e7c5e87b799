import json

import anyio
import pytest

from gymrl.gym.client import HttpPool
from gymrl.gym.embedded import Peers, ResourcesServer, ToolError, Verdict, tool
from gymrl.gym.embedded.simple_agent import SimpleAgent
from gymrl.gym.episode import read_episode
from gymrl.gym.listener import Listener, PortRange
from gymrl.testing.model_server import ModelCall, ScriptedModelServer
from tests.integration.actors.watching import until


class Counter(ResourcesServer):
    """Counts, and keeps what it was asked."""

    seeds = 0

    async def seed_session(self, row):
        Counter.seeds += 1
        return {"count": int(row.get("start", 0))}

    @tool
    async def increment(self, state: dict[str, int], by: int = 1) -> str:
        if by > 100:
            raise ToolError("too much at once")
        state["count"] += by
        return str(state["count"])

    @tool
    async def explode(self, state: dict[str, int]) -> str:
        raise KeyError("inside the tool")

    @tool
    async def state_of(self, state: dict[str, int]) -> dict[str, int]:
        return state

    async def verify(self, row, reply, state):
        if row.get("broken"):
            raise ZeroDivisionError("the verifier's own")
        count = state["count"] if state else None
        return Verdict(
            reward=float(count == row.get("expected")),
            components={"count": float(count == row.get("expected"))},
            mask_sample=bool(row.get("mask")),
            extras={"count": count, "said": reply.text, "calls": len(reply.tool_calls)},
        )


class Setting:
    """One agent, one environment and a scripted model on sockets."""

    def __init__(self, script, **settings):
        self.model = ScriptedModelServer(script)
        self.peers = Peers("policy")
        self.environment = Counter("counter", {}, self.peers)
        references = {
            "resources_server": {"name": "counter"},
            "model_server": {"name": "policy_model"},
        }
        self.agent = SimpleAgent("agent", {**references, **settings}, self.peers)
        self.pool = HttpPool()
        self.listeners = {
            "counter": Listener(self.environment.application(), PortRange()),
            "agent": Listener(self.agent.application(), PortRange()),
        }

    async def __aenter__(self):
        await self.model.__aenter__()
        await self.agent.open()
        await self.pool.__aenter__()
        for name, listener in self.listeners.items():
            await listener.start()
            self.peers.set(name, listener.url)
        self.peers.set("policy_model", self.model.base_url.removesuffix("/v1"))
        return self

    async def __aexit__(self, *_):
        await self.pool.close()
        for listener in self.listeners.values():
            await listener.stop()
        await self.agent.close()
        await self.model.stop()

    async def post(self, path="/run", server="agent", **row):
        row.setdefault("responses_create_params", {"input": "count"})
        body = json.dumps(row).encode()
        return await self.pool.post(self.listeners[server].url + path, body)

    async def outputs(self, **row):
        answer = json.loads((await self.post(**row)).body)
        items = answer["response"]["output"]
        return [i["output"] for i in items if i["type"] == "function_call_output"]


def call(name, arguments):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ModelCall(tool_calls=((name, text),))


DONE = ModelCall(text="done")


async def test_tools_act_on_the_state_of_their_own_session():
    script = [call("increment", {"by": 2}), call("increment", {}), DONE]
    async with Setting(script) as setting:
        answer = json.loads((await setting.post(start=4, expected=7)).body)
    assert answer["reward"] == 1.0
    assert answer["reward_components"] == {"count": 1.0}
    assert (answer["count"], answer["said"], answer["calls"]) == (7, "done", 2)
    assert answer["mask_sample"] is False
    assert len(setting.environment.sessions) == 0


async def test_token_fields_travel_byte_for_byte_and_the_rollout_is_contiguous():
    script = [call("increment", {"by": 2}), DONE]
    async with Setting(script) as setting:
        answer = await setting.post()
    assert setting.model.raw_bodies[1].count(b"-0.30000000000000004") == len(
        json.loads(answer.body)["response"]["output"][0]["generation_log_probs"]
    )
    assert b"-0.30000000000000004" in answer.body
    assert len(read_episode(answer.body, agent="agent").turns) == 2


async def test_several_calls_of_one_answer_are_done_in_order():
    script = [
        ModelCall(tool_calls=(("increment", '{"by": 1}'), ("increment", '{"by": 10}'))),
        DONE,
    ]
    async with Setting(script) as setting:
        assert await setting.outputs() == ["1", "11"]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("increment", "{bad", "no JSON object"),
        ("increment", "", "no JSON object"),
        ("increment", "null", "no JSON object"),
        ("increment", "[1]", "no JSON object"),
        ("increment", '"x"', "no JSON object"),
        ("increment", "3", "no JSON object"),
        ("increment", "你好", "no JSON object"),
        ("increment", '{"by": "two"}', "value_error"),
        ("increment", '{"amount": 2}', "amount"),
        ("increment", '{"by": 1000}', "too much at once"),
        ("explode", "{}", "inside the tool"),
        ("no_such_tool", "{}", "Not Found"),
        ("verify", "{}", "there is no tool called"),
        ("seed_session", "{}", "there is no tool called"),
        ("../verify", "{}", "there is no tool called"),
        ("a/b", "{}", "there is no tool called"),
        ("", "{}", "there is no tool called"),
    ],
)
async def test_a_tool_call_that_goes_wrong_is_something_for_the_model_to_read(
    name, arguments, text
):
    """lsdefine/GenericAgent#746, vllm-project/vllm#13078."""
    async with Setting([call(name, arguments), DONE]) as setting:
        [output] = await setting.outputs()
    assert text in output


async def test_bad_arguments_are_quoted_back_only_in_part():
    async with Setting([call("increment", "x" * 100_000), DONE]) as setting:
        [output] = await setting.outputs()
    assert len(output) < 1200


async def test_the_episode_ends_with_the_last_step_that_is_allowed():
    async with Setting([call("increment", {})], max_steps=3) as setting:
        assert await setting.outputs() == ["1", "2", "3"]
    assert len(setting.model.bodies) == 3


async def test_a_call_that_was_cut_short_ends_the_episode_before_its_tools():
    cut = ModelCall(tool_calls=(("increment", "{}"),), incomplete_reason="max_output_tokens")
    async with Setting([cut]) as setting:
        answer = json.loads((await setting.post()).body)
    assert answer["count"] == 0
    assert answer["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert len(setting.model.bodies) == 1


async def test_keys_that_the_agent_does_not_know_reach_the_model():
    """NVIDIA-NeMo/Gym#1545: nothing of a request is lost on the way."""
    params = {
        "input": "go",
        "temperature": 0.7,
        "metadata": {"extra_body": '{"seed": 3}'},
        "x_y": 1,
    }
    async with Setting([DONE]) as setting:
        await setting.post(responses_create_params=params)
    expected = [{"role": "user", "content": "go", "type": "message"}]
    assert setting.model.bodies == [{**params, "input": expected, "model": "policy"}]


async def test_usage_is_summed_over_the_calls():
    async with Setting([call("increment", {}), DONE]) as setting:
        answer = json.loads((await setting.post()).body)
    tokens = [i for i in answer["response"]["output"] if "prompt_token_ids" in i]
    usage = answer["response"]["usage"]
    assert usage["input_tokens"] == sum(len(i["prompt_token_ids"]) for i in tokens)
    assert usage["output_tokens"] == sum(len(i["generation_token_ids"]) for i in tokens)
    assert usage["input_tokens_details"] == {"cached_tokens": 0}


async def test_the_models_cookie_is_kept_over_the_calls_and_apart_from_the_environments():
    async with Setting([call("increment", {}), DONE]) as setting:
        await setting.post()
    assert setting.model.cookies == [{}, {"ScriptedModel___policy_model": "m0"}]


async def test_a_rollout_named_in_the_path_is_named_to_the_model_too():
    async with Setting([DONE]) as setting:
        answer = await setting.post("/ng-rollout/abc-1/run")
        assert answer.status == 200
        await setting.post("/ng-rollout/abc-2/v1/responses", input="hi")
    assert setting.model.paths == [
        "/ng-rollout/abc-1/v1/responses",
        "/ng-rollout/abc-2/v1/responses",
    ]


async def test_the_responses_route_alone_runs_the_loop_in_the_callers_session():
    async with Setting([call("increment", {"by": 5}), DONE]) as setting:
        seeded = await setting.post("/seed_session", "counter")
        body = json.dumps({"input": [{"role": "user", "content": "go"}]}).encode()
        url = f"{setting.listeners['agent'].url}/v1/responses"
        answer = await setting.pool.post(url, body, seeded.cookies)
        assert answer.status == 200
        assert set(answer.cookies) == {
            "SimpleAgent___agent",
            "Counter___counter",
            "ScriptedModel___policy_model",
        }
        response = json.loads(answer.body)
    assert [i["type"] for i in response["output"]] == [
        "function_call",
        "function_call_output",
        "message",
    ]


@pytest.mark.parametrize(
    ("status", "ours"),
    [(400, 400), (413, 413), (422, 422), (429, 429), (500, 500), (502, 500), (503, 503)],
)
async def test_the_models_status_goes_on_to_the_caller(status, ours):
    """vllm-project/vllm#45273: a refused request keeps its status and its body."""
    script = [ModelCall(status=status, text="this model's maximum context length is 16")]
    async with Setting(script) as setting:
        answer = await setting.post()
    assert answer.status == ours
    message = json.loads(answer.body)
    assert message.startswith("Hit an exception in SimpleAgent___agent calling an inner server: ")
    assert "maximum context length is 16" in message


async def test_a_dead_model_fails_the_row_instead_of_holding_it():
    async with Setting([DONE]) as setting:
        await setting.model.stop()
        with anyio.fail_after(30):
            answer = await setting.post()
    assert answer.status == 502
    assert "ConnectorError" in json.loads(answer.body)


async def test_a_silent_model_fails_the_row_after_the_agents_deadline():
    async with Setting([ModelCall(delay_s=60)], model_timeout_s=0.3) as setting:
        answer = await setting.post()
    assert answer.status == 504
    assert "agent.model_timeout_s" in json.loads(answer.body)


async def test_a_client_that_leaves_ends_the_models_work():
    async with Setting([ModelCall(delay_s=60)]) as setting:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(setting.post)
            await until(lambda: setting.model.bodies)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(30):
            await setting.model.wait_for_disconnects(1)


async def test_the_verifiers_exception_is_a_500_with_its_repr():
    async with Setting([DONE]) as setting:
        answer = await setting.post(broken=True)
        direct = await setting.post("/verify", "counter", broken=True, response={"output": []})
    assert (answer.status, direct.status) == (500, 500)
    assert json.loads(direct.body) == 'ZeroDivisionError("the verifier\'s own")'
    assert "ZeroDivisionError" in json.loads(answer.body)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{bad", 422),
        (b"[]", 422),
        (b'{"question": 1}', 422),
        (b'{"responses_create_params": null}', 422),
        (b'{"responses_create_params": {}}', 422),
        (b'{"responses_create_params": []}', 422),
    ],
)
async def test_a_row_of_the_wrong_shape_is_refused_before_the_model_is_asked(body, status):
    async with Setting([DONE]) as setting:
        answer = await setting.pool.post(f"{setting.listeners['agent'].url}/run", body)
    assert answer.status == status
    assert json.loads(answer.body)["detail"]
    assert setting.model.bodies == []


async def test_half_a_surrogate_pair_from_the_model_does_not_end_the_episode():
    async with Setting([ModelCall(text="a\ud800b")]) as setting:
        answer = await setting.post()
    assert answer.status == 200
    assert json.loads(answer.body)["said"] == "a\ufffdb"


async def test_a_tool_call_without_a_seeded_session_is_refused():
    async with Setting([DONE]) as setting:
        answer = await setting.post("/increment", "counter", by=1)
    assert answer.status == 400
    assert "seed_session" in json.loads(answer.body)["detail"]


async def test_a_cookie_that_was_not_given_out_here_opens_no_session():
    async with Setting([DONE]) as setting:
        seeded = await setting.post("/seed_session", "counter")
        [(name, value)] = seeded.cookies.items()
        forged = {name: value[:-2] + "xx"}
        url = f"{setting.listeners['counter'].url}/state_of"
        assert (await setting.pool.post(url, b"{}", forged)).status == 400
        assert json.loads((await setting.pool.post(url, b"{}", {name: value})).body) == {"count": 0}


async def test_metrics_are_aggregated_by_prompt_and_over_all():
    responses = [
        {"reward": 1.0, "_ng_task_index": 0, "_ng_rollout_index": 0, "response": {}},
        {"reward": 0.0, "_ng_task_index": 0, "_ng_rollout_index": 1, "response": {}},
    ]
    async with Setting([DONE]) as setting:
        answer = await setting.post("/aggregate_metrics", "counter", verify_responses=responses)
        refused = await setting.post("/aggregate_metrics", "counter", verify_responses="x")
    assert refused.status == 422
    metrics = json.loads(answer.body)
    assert metrics["agent_metrics"] == {
        "mean/reward": 0.5,
        "max/reward": 1.0,
        "min/reward": 0.0,
        "median/reward": 0.5,
        "std/reward": 0.7071067811865476,
    }
    [group] = metrics["group_level_metrics"]
    assert (group["_ng_task_index"], group["num_rollouts"]) == (0, 2)
    assert metrics["key_metrics"] == {"mean/reward": 0.5}


async def test_two_policy_servers_take_turns_and_an_episode_stays_with_one():
    async with Setting([call("increment", {}), DONE, call("increment", {}), DONE]) as setting:
        async with ScriptedModelServer([call("increment", {}), DONE]) as other:
            roots = [m.base_url.removesuffix("/v1") for m in (setting.model, other)]
            setting.peers.set("policy_model", *roots)
            for _ in range(3):
                assert (await setting.post()).status == 200
        assert len(setting.model.bodies) == 4
        assert len(other.bodies) == 2
