"""Recorded traffic of real Gym servers, replayed against ours: paths, cookies, bodies."""

import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gymrl.errors import RolloutFailure
from gymrl.gym.client import GymClient, HttpPool
from gymrl.gym.embedded import Peers, ResourcesServer, Verdict, tool
from gymrl.gym.embedded.simple_agent import SimpleAgent
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.registry import RegistryServer, RouteTable, read_registry
from gymrl.types import Row

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
RESOURCES = "example_single_tool_call"
AGENT = "example_single_tool_call_simple_agent"


def lines(name):
    text = (CAPTURES / "v07_single_tool" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


class RecordedServer:
    """Answers with the recorded answers in order and keeps what it was asked."""

    def __init__(self, recorded):
        self.recorded = list(recorded)
        self.asked = []
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.listener = Listener(app, PortRange())

    async def answer(self, request):
        recorded = self.recorded[len(self.asked)]
        body = await request.json()
        self.asked.append((request.method, request.path, request.headers.get("Cookie"), body))
        text = json.dumps(recorded["resp_body"], separators=(",", ":"), ensure_ascii=False)
        response = web.Response(
            text=text, status=recorded["status"], content_type="application/json"
        )
        for name, value in recorded["resp_headers"]:
            if name == "set-cookie":
                response.headers.add("Set-Cookie", value)
        return response


def header(record, name):
    return next((value for key, value in record["req_headers"] if key == name), None)


def without_defaults(body):
    """A recorded body less the defaults that Gym's models fill in on the way."""
    params = {
        key: value
        for key, value in body["responses_create_params"].items()
        if value is not None and key not in ("parallel_tool_calls", "tool_choice")
    }
    params["input"] = [{"role": i["role"], "content": i["content"]} for i in params["input"]]
    return {**body, "responses_create_params": params}


@pytest.fixture
async def replay():
    resources = RecordedServer(lines("example_single_tool_call.jsonl")[:3])
    model = RecordedServer(lines("policy_model.jsonl")[:2])
    peers = Peers("fake")
    settings = {
        "resources_server": {"type": "resources_servers", "name": RESOURCES},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "entrypoint": "app.py",
        "datasets": [],
    }
    agent = SimpleAgent(AGENT, settings, peers)
    listener = Listener(agent.application(), PortRange())
    for name, server in ((RESOURCES, resources), ("policy_model", model)):
        await server.listener.start()
        peers.set(name, server.listener.url)
    await agent.open()
    await listener.start()
    run = next(
        r for r in lines("example_single_tool_call_simple_agent.jsonl") if r["path"] == "/run"
    )
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as client:
        async with client.post(f"{listener.url}/run", json=run["req_body"]) as response:
            answer = await response.json()
            cookies = response.cookies
    yield run, answer, cookies, resources.asked, model.asked
    await listener.stop()
    await agent.close()
    await resources.listener.stop()
    await model.listener.stop()


async def test_our_agent_answers_run_with_what_the_verifier_answered(replay):
    run, answer, cookies, _, _ = replay
    assert answer == run["resp_body"]
    assert list(cookies) == [f"SimpleAgent___{AGENT}"]
    cookie = cookies[f"SimpleAgent___{AGENT}"]
    recorded = dict(run["resp_headers"])["set-cookie"]
    assert recorded.startswith(f"SimpleAgent___{AGENT}=")
    assert (cookie["path"], cookie["max-age"], cookie["httponly"], cookie["samesite"]) == (
        "/",
        "1209600",
        True,
        "lax",
    )


async def test_our_agent_asks_the_environment_what_gyms_agent_asked(replay):
    _, _, _, asked, _ = replay
    recorded = lines("example_single_tool_call.jsonl")[:3]
    assert [(method, path) for method, path, _, _ in asked] == [
        ("POST", "/seed_session"),
        ("POST", "/get_weather"),
        ("POST", "/verify"),
    ]
    seed, weather, verify = asked
    assert seed[3] == without_defaults(recorded[0]["req_body"])
    assert weather[3] == recorded[1]["req_body"]
    ours, theirs = verify[3], without_defaults(recorded[2]["req_body"])
    assert ours["response"]["output"] == [
        {k: v for k, v in item.items() if item["type"] != "function_call_output" or v is not None}
        for item in theirs["response"]["output"]
    ]
    assert {**ours, "response": None} == {**theirs, "response": None}


async def test_our_agent_forwards_each_servers_cookie_where_gyms_agent_did(replay):
    _, _, _, asked, model = replay
    recorded = lines("example_single_tool_call.jsonl")[:3]
    assert [cookie for _, _, cookie, _ in asked[:2]] == [
        header(recorded[0], "cookie"),
        header(recorded[1], "cookie"),
    ]
    ours, theirs = asked[2][2].split("; "), header(recorded[2], "cookie").split("; ")
    assert [c.split("=")[0] for c in ours] == [c.split("=")[0] for c in theirs]
    assert ours[1:] == theirs[1:]
    recorded_model = lines("policy_model.jsonl")[:2]
    assert [cookie for _, _, cookie, _ in model] == [
        header(record, "cookie") for record in recorded_model
    ]


async def test_our_agent_asks_the_model_what_gyms_agent_asked(replay):
    _, _, _, _, model = replay
    recorded = lines("policy_model.jsonl")[:2]
    assert [(method, path) for method, path, _, _ in model] == [("POST", "/v1/responses")] * 2
    for (_, _, _, body), record in zip(model, recorded, strict=True):
        assert body == {**record["req_body"], "model": "fake"}


class SimpleWeatherResourcesServer(ResourcesServer):
    @tool
    async def get_weather(self, state: None, city: str) -> dict[str, str]:
        return {"city": city, "weather_description": f"The weather in {city} is cold."}

    async def verify(self, row, reply, state):
        return Verdict(reward=1.0)


async def test_our_environment_answers_the_recorded_requests_like_gyms():
    server = SimpleWeatherResourcesServer(RESOURCES, {}, Peers())
    listener = Listener(server.application(), PortRange())
    await listener.start()
    recorded = lines("example_single_tool_call.jsonl")[:3]
    cookies = {}
    async with HttpPool() as pool:
        for record in recorded:
            body = json.dumps(record["req_body"]).encode()
            answer = await pool.post(listener.url + record["path"], body, cookies)
            assert answer.status == record["status"]
            theirs = record["resp_body"]
            assert json.loads(answer.body) == {
                **theirs,
                **(
                    {"mask_sample": False, "failure_kind": None, "failure_reason": None}
                    if "reward" in theirs
                    else {}
                ),
            }
            assert list(answer.cookies) == [f"SimpleWeatherResourcesServer___{RESOURCES}"]
            assert not cookies or answer.cookies == cookies
            cookies = answer.cookies
    await listener.stop()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/seed_session", {}, 200),
        ("/nosuchtool", {}, 404),
        ("/get_weather", {}, 422),
        ("/verify", {"responses_create_params": {"input": "x"}}, 422),
    ],
)
async def test_our_environment_refuses_like_gyms(path, body, status):
    """The requests and statuses of the recorded direct calls."""
    server = SimpleWeatherResourcesServer(RESOURCES, {}, Peers())
    listener = Listener(server.application(), PortRange())
    await listener.start()
    async with HttpPool() as pool:
        seeded = await pool.post(f"{listener.url}/seed_session", b"{}")
        answer = await pool.post(listener.url + path, json.dumps(body).encode(), seeded.cookies)
    await listener.stop()
    assert answer.status == status
    if status == 404:
        assert json.loads(answer.body) == {"detail": "Not Found"}
    if status == 422:
        detail = json.loads(answer.body)["detail"][0]
        assert detail["loc"][0] == "body"


@pytest.mark.parametrize("folder", ["v04_single_tool", "v07_single_tool"])
async def test_the_registry_of_real_gym_is_read_and_ours_answers_in_its_shape(folder):
    recorded = json.loads((CAPTURES / folder / "client.json").read_text())
    answers = {r["url"].split(":11000")[-1]: r for r in recorded if ":11000" in r["url"]}
    theirs = RecordedRegistry(answers)
    await theirs.listener.start()
    async with HttpPool() as pool:
        table = await read_registry(pool, theirs.listener.url)
        run = next(r["url"] for r in recorded if r["url"].endswith("/run"))
        agent_port = answers["/server_instances"]["resp_body"][1]["port"]
        assert table.routes == (RESOURCES, AGENT)
        assert table.run_url(AGENT) == f"http://127.0.0.1:{agent_port}/run"
        assert table.run_url(RESOURCES) == table.run_url(AGENT)
        assert run.startswith("http://127.0.0.1:")
        ours = RegistryServer()
        instances = answers["/server_instances"]["resp_body"]
        import yaml

        ours.publish(yaml.safe_load(answers["/global_config_dict_yaml"]["resp_body"]), instances)
        listener = Listener(ours.application(), PortRange())
        await listener.start()
        for path, record in answers.items():
            if record["status"] != 200:
                continue
            answer = await pool.get(listener.url + path)
            assert answer.status == 200
            body = json.loads(answer.body)
            if path == "/global_config_dict_yaml":
                assert yaml.safe_load(body) == yaml.safe_load(record["resp_body"])
            else:
                assert body == record["resp_body"]
        again = await read_registry(pool, listener.url)
        assert again.routes == table.routes
        await listener.stop()
    await theirs.listener.stop()


class RecordedRegistry:
    def __init__(self, answers):
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        self.answers = answers
        self.listener = Listener(app, PortRange())

    async def answer(self, request):
        record = self.answers[request.path]
        return web.json_response(record["resp_body"], status=record["status"])


async def test_our_registry_says_starting_until_it_is_told_of_servers():
    registry = RegistryServer()
    listener = Listener(registry.application(), PortRange())
    await listener.start()
    async with HttpPool() as pool:
        assert (await pool.get(f"{listener.url}/livez")).status == 200
        for path in ("/readyz", "/healthz", "/health"):
            answer = await pool.get(listener.url + path)
            assert (answer.status, json.loads(answer.body)) == (503, {"status": "starting"})
        registry.publish({}, [])
        assert (await pool.get(f"{listener.url}/readyz")).status == 200
    await listener.stop()


def test_a_typed_environment_server_in_front_of_an_agent_gets_its_rows():
    config = {
        "env": {"resources_servers": {"env": {"host": "127.0.0.1", "port": 1}}},
        "agent": {
            "responses_api_agents": {
                "simple_agent": {
                    "resources_server": {"name": "env"},
                    "host": "127.0.0.1",
                    "port": 2,
                }
            }
        },
        "front": {
            "environment_servers": {
                "single_agent_turn": {
                    "agent_server": {"name": "agent"},
                    "host": "127.0.0.1",
                    "port": 3,
                }
            }
        },
    }
    assert RouteTable(config).run_url("env") == "http://127.0.0.1:3/run"


def recorded_runs():
    """Every recorded ``/run`` call of a client, with its answer."""
    found = [
        (record["req"], record["status"], record["resp_body"])
        for path in sorted(CAPTURES.rglob("client*.json"))
        for record in json.loads(path.read_text())
        if record["url"].endswith("/run")
    ]
    direct = json.loads((CAPTURES / "v07_multi" / "direct_calls.json").read_text())
    found += [(r["req"], r["status"], r["resp"]) for r in direct if r["path"] == "/run"]
    return found


RUNS = recorded_runs()


@pytest.mark.parametrize("number", range(len(RUNS)))
async def test_our_client_reads_every_recorded_run(number):
    asked, status, answered = RUNS[number]
    server = RecordedServer([{"resp_body": answered, "status": status, "resp_headers": []}])
    await server.listener.start()
    row = Row(
        index=0,
        task_index=0,
        rollout_index=0,
        route="a",
        rollout_id="r",
        body=json.dumps(asked).encode(),
    )
    async with HttpPool() as pool:
        client = GymClient(pool, 20.0)
        url = f"{server.listener.url}/run"
        if status == 200:
            assert json.loads(await client.run(url, row, "a")) == answered
        else:
            with pytest.raises(RolloutFailure) as caught:
                await client.run(url, row, "a")
            assert caught.value.status == status
            assert caught.value.kind == ("infra" if status == 500 else "data")
            text = json.dumps(answered, separators=(",", ":"), ensure_ascii=False)
            assert caught.value.body == text[:2000]
    await server.listener.stop()
    assert server.asked == [("POST", "/run", None, asked)]


def test_the_recordings_hold_good_and_refused_and_failed_runs():
    assert {status for _, status, _ in RUNS} == {200, 422, 500}
