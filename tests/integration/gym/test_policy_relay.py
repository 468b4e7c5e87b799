"""The relay in front of the policy servers, for agents that know one address."""

import json
from functools import partial

import pytest
from yarl import URL

from gymrl.gym.client import HttpPool
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.policy_relay import PolicyRelay
from gymrl.testing.model_server import ModelCall, ScriptedModelServer

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


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("get", "/v1/files"),
        ("get", "/metrics"),
        ("get", "/v1/ledger/another-rollout"),
        ("get", "/v1/models/../files"),
        ("get", "/v1/models/%2e%2e/files"),
        ("get", "/ng-rollout/r7/ledger/another-rollout"),
        ("post", "/v1/files"),
        ("post", "/v1/responses/../files"),
        ("post", "/v1/load_lora_adapter"),
        ("post", "/collective_rpc"),
        ("post", "/ng-rollout/%2e%2e/collective_rpc"),
    ],
)
async def test_agents_reach_nothing_but_the_model_with_the_policys_key(method, path):
    asked = []

    class Policy(HttpPool):
        async def get(self, url):
            asked.append(url)
            return await super().get(url)

        async def post(self, url, body, cookies=None):
            asked.append(url)
            return await super().post(url, body, cookies)

    async with Policy() as keyed, HttpPool() as pool:
        relay = Listener(PolicyRelay(keyed, ["http://127.0.0.1:9"], "p").application(), PortRange())
        await relay.start()
        ask = pool.get if method == "get" else partial(pool.post, body=b"{}")
        answer = await ask(URL(relay.url + path, encoded=True))
        await relay.stop()
    assert (answer.status, asked) == (404, [])
    assert b"is not passed on to the policy" in answer.body


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/tokenize",
        "/tokenize",
        "/ng-rollout/r7/training-token-capture/v1/responses",
    ],
)
async def test_every_way_to_ask_a_model_is_passed_on(pool, path):
    relay = Listener(PolicyRelay(pool, ["http://127.0.0.1:9"], "p").application(), PortRange())
    await relay.start()
    answer = await pool.post(relay.url + path, BODY)
    await relay.stop()
    assert answer.status == 502
    assert f"http://127.0.0.1:9{path}".encode() in answer.body
