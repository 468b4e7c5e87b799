"""The relay in front of the policy servers, for agents that know one address."""

import json

import pytest

from gymrl.gym.client import HttpPool
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.policy_relay import PolicyRelay
from gymrl.testing.gym_server import ModelCall, ScriptedModelServer

BODY = b'{"input": [{"role": "user", "content": "hi"}]}'


@pytest.fixture
async def pool():
    async with HttpPool() as opened:
        yield opened


@pytest.fixture
async def relayed(pool):
    async with (
        ScriptedModelServer([ModelCall(text="first")]) as first,
        ScriptedModelServer([ModelCall(text="second")]) as second,
    ):
        roots = [server.base_url.removesuffix("/v1") for server in (first, second)]
        relay = Listener(PolicyRelay(pool, roots, "policy").application(), PortRange())
        await relay.start()
        yield relay.url, first, second
        await relay.stop()


def text_of(answer):
    return json.loads(answer.body)["output"][-1]["content"][0]["text"]


async def test_conversations_take_turns_and_each_stays_where_it_began(relayed, pool):
    url, *_ = relayed
    one = await pool.post(f"{url}/v1/responses", BODY)
    other = await pool.post(f"{url}/v1/responses", BODY)
    assert {text_of(one), text_of(other)} == {"first", "second"}
    for begun in (one, other, one, one):
        again = await pool.post(f"{url}/v1/responses", BODY, begun.cookies)
        assert text_of(again) == text_of(begun)


async def test_the_model_is_put_in_where_it_is_left_out_and_no_other_byte_changes(relayed, pool):
    url, first, second = relayed
    for body in (BODY, b'{"model": null, "input": []}', b'{"model": "mine", "input": []}'):
        await pool.post(f"{url}/v1/responses", body, {"gymrl_policy": "0"})
    assert [body["model"] for body in first.bodies] == ["policy", "policy", "mine"]
    assert first.raw_bodies[0] == b'{"model":"policy",' + BODY[1:]
    assert first.raw_bodies[2] == b'{"model": "mine", "input": []}'
    assert second.bodies == []


async def test_a_rollouts_prefix_stays_in_the_path(relayed, pool):
    url, first, _ = relayed
    await pool.post(f"{url}/ng-rollout/r7/v1/responses", BODY, {"gymrl_policy": "0"})
    assert first.paths == ["/ng-rollout/r7/v1/responses"]


async def test_a_policy_that_refuses_connections_is_an_answer(pool):
    relay = Listener(PolicyRelay(pool, ["http://127.0.0.1:9"], "p").application(), PortRange())
    await relay.start()
    answer = await pool.post(f"{relay.url}/v1/responses", BODY)
    await relay.stop()
    assert answer.status == 502
    assert "http://127.0.0.1:9/v1/responses" in json.loads(answer.body)


async def test_what_the_policy_refuses_comes_back_as_it_is(pool):
    async with ScriptedModelServer([ModelCall(status=400, text="too long")]) as policy:
        root = policy.base_url.removesuffix("/v1")
        relay = Listener(PolicyRelay(pool, [root], "p").application(), PortRange())
        await relay.start()
        answer = await pool.post(f"{relay.url}/v1/responses", BODY)
        await relay.stop()
    assert answer.status == 400
    assert b"too long" in answer.body
