"""Requests and answers of NeMo Gym's own policy model server, recorded, against ours."""

import json
from pathlib import Path

import pytest

from gymrl.generation.chat import ChatFormat
from gymrl.testing import ScriptedGenerator

CAPTURES = Path(__file__).parents[2] / "data" / "captures"
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "San Francisco"}}</tool_call>'
# Fields of the recorded answers that only say which build of a client wrote them.
LATER_ADDITIONS = {"moderation", "prompt_cache_retention"}


def recorded(name: str, path: str) -> list[dict]:
    lines = (CAPTURES / "v07_single_tool" / name).read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["path"] == path]


@pytest.fixture
def chat(tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer)


def without_tokens(items: list[dict]) -> list[dict]:
    """The recorded token ids are another tokenizer's."""
    fields = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    return [{k: v for k, v in item.items() if k not in fields} for item in items]


def shape(value, path: str = "") -> dict[str, str]:
    """Every field of an answer by path, with the kind of its value."""
    if isinstance(value, dict):
        found = {}
        for key, inner in value.items():
            found |= shape(inner, f"{path}.{key}")
        return found
    return {path: type(value).__name__}


async def test_recorded_requests_get_answers_with_every_recorded_field(serve, chat):
    exchanges = recorded("policy_model.jsonl", "/v1/responses")
    assert len(exchanges) >= 2
    script = [
        [*chat.encode(CALL), 2]
        if exchange["resp_body"]["output"][0]["type"] == "function_call"
        else [*chat.encode("The answer is \\boxed{4}."), 2]
        for exchange in exchanges
    ]
    async with serve(ScriptedGenerator(script)) as client:
        for exchange in exchanges:
            body = exchange["req_body"]
            if isinstance(body["input"], list):
                body = {**body, "input": without_tokens(body["input"])}
            answer = await client.ok("/responses", **body)
            theirs = exchange["resp_body"]
            assert theirs.keys() - answer.keys() <= LATER_ADDITIONS
            assert answer["status"] == theirs["status"]
            assert answer["tool_choice"] == theirs["tool_choice"]
            (item,), (their_item,) = answer["output"], theirs["output"]
            assert item["type"] == their_item["type"]
            optional = {"routed_experts", "namespace", "phase"}
            assert their_item.keys() - item.keys() <= optional
            for field in item.keys() & their_item.keys():
                assert type(item[field]) is type(their_item[field]), field
            ours = shape(answer["usage"])
            assert shape(theirs["usage"]).keys() <= ours.keys()


async def test_recorded_tool_arguments_are_what_the_agent_parsed(serve, chat):
    (first, *_) = recorded("policy_model.jsonl", "/v1/responses")
    async with serve(ScriptedGenerator([[*chat.encode(CALL), 2]])) as client:
        answer = await client.ok("/responses", **first["req_body"])
    theirs = first["resp_body"]["output"][0]
    assert json.loads(answer["output"][0]["arguments"]) == json.loads(theirs["arguments"])
    assert answer["output"][0]["name"] == theirs["name"]


async def test_gyms_model_server_can_stand_in_front_of_ours(serve, chat):
    """It asks for chat completions with `token_id:N` tokens, then for /tokenize as the prompt."""
    completions = recorded("fake_openai.jsonl", "/v1/chat/completions")
    tokenizes = recorded("fake_openai.jsonl", "/tokenize")
    sampled = [*chat.encode("sunny"), 2]
    async with serve(ScriptedGenerator([sampled] * len(completions)), aliases=["fake"]) as client:
        for asked, tokenized in zip(completions, tokenizes, strict=True):
            body = {**asked["req_body"], "messages": without_tokens(asked["req_body"]["messages"])}
            answer = await client.ok("/chat/completions", **body)
            (choice,) = answer["choices"]
            tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
            assert [int(token.removeprefix("token_id:")) for token in tokens] == sampled
            # Where a backend gives token ids, Gym wants the prompt's as well.
            assert choice["token_ids"] == sampled
            assert answer["prompt_token_ids"]
            prompt = tokenized["req_body"]
            prompt = {**prompt, "messages": without_tokens(prompt["messages"])}
            status, tokens = await client.post("/tokenize", prompt, root=True)
            assert status == 200
            assert tokens["tokens"] == answer["prompt_token_ids"]
