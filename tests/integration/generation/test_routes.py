"""Routes on the wire of the generation server, in every shape that an answer has."""

import json
from contextlib import asynccontextmanager

import pytest
import torch

from gymrl.config import GenerationConfig
from gymrl.generation.chat import ChatFormat
from gymrl.generation.transformers import TransformersGenerator
from gymrl.routed_experts import decode_routes
from gymrl.testing import build_tiny_model
from gymrl.token_ledger import LedgerFrame, LedgerReader

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def moe_directory(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("moe"), architecture="mixtral")


@pytest.fixture
def serve_moe(moe_directory, serve):
    @asynccontextmanager
    async def serving():
        config = GenerationConfig(model=str(moe_directory), return_routed_experts=True)
        generator, tokenizer = TransformersGenerator.load(config)
        chat = ChatFormat.from_config(tokenizer, config, tuple(generator.end_ids))
        async with serve(generator, chat=chat) as client:
            yield client, generator.model

    return serving


def assert_routes(model, envelope: str, prompt: list[int], sampled: list[int]) -> None:
    """They are those of a plain forward pass, from the routers' logits."""
    routes = decode_routes(envelope)
    with torch.inference_mode():
        outputs = model(torch.tensor([[*prompt, *sampled]]), output_router_logits=True)
    expected = torch.stack([x.topk(2).indices for x in outputs.router_logits], dim=1)
    assert envelope.startswith(f"nrlre1:int8:{len(prompt) + len(sampled)}x2x2:")
    assert routes[:-1].tolist() == expected[:-1].tolist()
    assert (routes[-1] == -1).all()


async def test_the_last_item_of_a_response_carries_routes_and_may_be_sent_back(serve_moe):
    async with serve_moe() as (client, model):
        items = USER
        for _ in range(2):
            answer = await client.ok("/responses", input=items, max_output_tokens=6)
            *others, last = answer["output"]
            assert all("routed_experts" not in item for item in others)
            assert_routes(
                model,
                last["routed_experts"],
                last["prompt_token_ids"],
                last["generation_token_ids"],
            )
            items = [*items, *answer["output"], *USER]


async def test_every_choice_of_a_chat_completion_carries_its_own_routes(serve_moe):
    async with serve_moe() as (client, model):
        answer = await client.ok("/chat/completions", messages=USER, max_tokens=5, n=3, seed=1)
    for choice in answer["choices"]:
        message = choice["message"]
        prompt = message["prompt_token_ids"]
        assert_routes(model, message["routed_experts"], prompt, choice["token_ids"])
    assert len({choice["message"]["routed_experts"] for choice in answer["choices"]}) == 3


async def streamed(client, path: str, body: dict) -> list[dict]:
    async with client.session.post(client.base_url + path, json={"stream": True, **body}) as answer:
        text = (await answer.read()).decode()
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_a_streamed_response_ends_with_its_routes(serve_moe):
    async with serve_moe() as (client, model):
        events = await streamed(client, "/responses", {"input": USER, "max_output_tokens": 5})
    last = events[-1]["response"]["output"][-1]
    assert_routes(
        model, last["routed_experts"], last["prompt_token_ids"], last["generation_token_ids"]
    )
    carriers = [event["type"] for event in events if "routed_experts" in json.dumps(event)]
    assert carriers == ["response.output_item.done", "response.incomplete"]


async def test_the_last_chunk_of_a_chat_stream_has_the_routes(serve_moe):
    async with serve_moe() as (client, model):
        events = await streamed(client, "/chat/completions", {"messages": USER, "max_tokens": 5})
    choices = [event["choices"][0] for event in events]
    sampled = [token for choice in choices for token in choice.get("token_ids", [])]
    assert_routes(model, choices[-1]["routed_experts"], events[0]["prompt_token_ids"], sampled)
    assert all("routed_experts" not in choice for choice in choices[:-1])


async def test_the_ledger_of_a_rollout_has_the_routes_of_its_calls(serve_moe):
    async with serve_moe() as (client, _):
        body = {"input": USER, "max_output_tokens": 5}
        _, answer = await client.post("/ng-rollout/r1/v1/responses", body, root=True)
        url = f"{client.root}/v1/ledger/r1"
        async with client.session.delete(url) as taken:
            frame = LedgerFrame.decode(await taken.read())
    assert (
        LedgerReader(frame).routes(0).tolist()
        == decode_routes(answer["output"][-1]["routed_experts"]).tolist()
    )
