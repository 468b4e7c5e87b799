"""``/v1/completions``: the public client, vLLM's token fields, the ledger, and gymrl as a client."""

import copy
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import numpy as np
import openai
import pytest
import torch
from openai.types import Completion
from tokenizers.processors import TemplateProcessing

from gymrl.concurrency import gather_bounded
from gymrl.config import GenerationConfig, SamplingParams, VllmConfig
from gymrl.errors import GenerationRequestError
from gymrl.generation.base import Generated
from gymrl.generation.batch import BatchGenerator
from gymrl.generation.chat import ChatFormat
from gymrl.generation.vllm_http import RemoteVllmGenerator
from gymrl.testing import ScriptedGenerator
from gymrl.token_ledger import LedgerFrame


@pytest.fixture
def chat(tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer)


@pytest.fixture
def talk(serve):
    @asynccontextmanager
    async def talking(script, **settings):
        generator = ScriptedGenerator(script, **settings)
        async with serve(generator) as client:
            async with openai.AsyncOpenAI(
                base_url=client.base_url, api_key="none", max_retries=0
            ) as caller:
                yield caller, generator

    return talking


def said(chat, text, finish_reason="stop", **more):
    ids = [*chat.encode(text), *([2] if finish_reason == "stop" else [])]
    return Generated(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=finish_reason, **more)


async def test_a_text_is_continued_without_a_template(talk, chat):
    async with talk([said(chat, " Paris")]) as (caller, generator):
        raw = await caller.completions.with_raw_response.create(
            model="policy", prompt="The capital is", logprobs=0
        )
    answer = Completion.model_validate_json(raw.content)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (" Paris", "stop")
    assert generator.calls[0].prompt_ids == chat.encode("The capital is")
    assert generator.calls[0].sampling.max_tokens == 16
    assert choice.token_ids == [*chat.encode(" Paris"), 2]
    assert choice.prompt_token_ids == chat.encode("The capital is")
    assert choice.logprobs.token_logprobs == [-0.5] * len(choice.token_ids)
    assert "".join(choice.logprobs.tokens) == " Paris<|im_end|>"
    assert choice.logprobs.text_offset[0] == 0
    assert answer.usage.prompt_tokens == len(chat.encode("The capital is"))
    assert answer.usage.completion_tokens == len(choice.token_ids)


async def test_token_ids_are_continued_as_they_are(talk, chat):
    async with talk([said(chat, "x")]) as (caller, generator):
        await caller.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=3)
    assert generator.calls[0].prompt_ids == [5, 6, 7]
    assert generator.calls[0].sampling.max_tokens == 3


async def test_many_prompts_and_choices_come_in_order_each_with_a_seed_of_its_own(talk, chat):
    def answer(prompt_ids, sampling):
        return said(chat, "".join(chr(96 + token) for token in prompt_ids))

    async with talk(answer) as (caller, generator):
        found = await caller.completions.create(
            model="policy", prompt=[[1], [2, 3]], n=2, seed=7, stop=["zz"]
        )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in found.choices] == ["a", "a", "bc", "bc"]
    seeds = [call.sampling.seed for call in generator.calls]
    assert len(set(seeds[:2])) == 2
    assert found.usage.prompt_tokens == 3


async def test_a_special_token_before_a_text_is_the_tokenizers_own(serve, tokenizer):
    own = copy.deepcopy(tokenizer)
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    chat = ChatFormat(own)
    generator = ScriptedGenerator(lambda *_: said(chat, "x"))
    async with serve(generator, chat=chat) as client:
        await client.ok("/completions", prompt="hi")
        await client.ok("/completions", prompt="hi", add_special_tokens=False)
        whole = await client.ok("/tokenize", prompt="hi")
        bare = await client.ok("/tokenize", prompt="hi", add_special_tokens=False)
    assert (whole["tokens"], bare["tokens"]) == ([0, *chat.encode("hi")], chat.encode("hi"))
    assert [call.prompt_ids for call in generator.calls] == [
        [0, *chat.encode("hi")],
        chat.encode("hi"),
    ]


async def test_a_stop_text_and_special_tokens_are_left_out_unless_they_are_asked_for(serve, chat):
    generated = Generated(
        token_ids=chat.encode("ab END"),
        logprobs=[-0.5] * len(chat.encode("ab END")),
        finish_reason="stop",
        stop_reason=" END",
    )
    generator = ScriptedGenerator([generated, generated, said(chat, "x"), said(chat, "x")])
    async with serve(generator) as client:
        cut = await client.ok("/completions", prompt="p", stop=" END")
        kept = await client.ok(
            "/completions", prompt="p", stop=" END", include_stop_str_in_output=True
        )
        shown = await client.ok("/completions", prompt="p", skip_special_tokens=False)
        bare = await client.ok("/completions", prompt="p", return_token_ids=False)
    assert [a["choices"][0]["text"] for a in (cut, kept, shown)] == ["ab", "ab END", "x<|im_end|>"]
    assert cut["choices"][0]["stop_reason"] == " END"
    assert "token_ids" not in bare["choices"][0]


async def test_a_stream_holds_every_token_once_and_the_text_of_the_whole(talk, chat):
    async with talk([said(chat, "hello wörld"), said(chat, "other")]) as (caller, _):
        stream = await caller.completions.create(
            model="policy",
            prompt="hi",
            n=2,
            stream=True,
            logprobs=0,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    texts, ids, prompts, logprobs = {0: "", 1: ""}, {0: [], 1: []}, {}, {0: [], 1: []}
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        ids[choice.index] += getattr(choice, "token_ids", [])
        if getattr(choice, "prompt_token_ids", None):
            prompts[choice.index] = choice.prompt_token_ids
        if choice.logprobs:
            logprobs[choice.index] += choice.logprobs.token_logprobs
    assert texts == {0: "hello wörld", 1: "other"}
    assert ids == {0: [*chat.encode("hello wörld"), 2], 1: [*chat.encode("other"), 2]}
    assert prompts == {0: chat.encode("hi"), 1: chat.encode("hi")}
    assert {k: len(v) for k, v in logprobs.items()} == {k: len(v) for k, v in ids.items()}
    reasons = [c.finish_reason for chunk in chunks[:-1] for c in chunk.choices if c.finish_reason]
    assert reasons == ["stop", "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ids[0]) + len(ids[1])


async def test_an_error_in_a_stream_is_told_in_it(serve, broken_off, caplog):
    async with serve(broken_off) as client:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as caller:
            stream = await caller.completions.create(model="policy", prompt="hi", stream=True)
            with pytest.raises(openai.APIError, match="it broke off"):
                async for _ in stream:
                    pass


async def test_a_client_that_leaves_frees_its_places(talk):
    async def answer(prompt_ids, sampling):
        await anyio.sleep_forever()

    async with talk(answer) as (caller, generator):
        async with anyio.create_task_group() as group:
            asked = {"model": "policy", "prompt": "hi", "n": 3, "stream": True}
            group.start_soon(lambda: caller.completions.create(**asked))
            while len(generator.calls) < 3:  # noqa: ASYNC110 - the server says when
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        while generator.cancelled < 3:  # noqa: ASYNC110 - the server says when
            await anyio.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": ["a"] * 3, "n": 100}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({}, "prompt"),
    ],
)
async def test_what_is_not_here_is_refused_by_name(serve, chat, body, param):
    async with serve(ScriptedGenerator([])) as client:
        status, answer = await client.post("/completions", body)
    assert status == 400, answer
    assert answer["error"]["param"] == param


async def test_a_prompt_that_is_too_long_is_told_with_both_numbers(serve):
    async with serve(ScriptedGenerator([], max_model_len=2)) as client:
        for stream in (False, True):
            status, answer = await client.post(
                "/completions", {"prompt": [1, 2, 3], "stream": stream}
            )
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_another_model_is_not_found(serve):
    async with serve(ScriptedGenerator([])) as client:
        status, _ = await client.post("/completions", {"prompt": "a", "model": "gpt"})
    assert status == 404


async def test_a_rollouts_completions_are_in_its_ledger(serve, chat):
    script = [said(chat, " b"), said(chat, " c", "length")]
    async with serve(ScriptedGenerator(script)) as client:
        first = await client.post("/ng-rollout/r1/v1/completions", {"prompt": "a"}, root=True)
        ids = first[1]["choices"][0]["prompt_token_ids"] + first[1]["choices"][0]["token_ids"]
        async with client.session.post(
            client.base_url + "/completions",
            json={"prompt": ids, "stream": True},
            headers={"x-gymrl-rollout-id": "r1"},
        ) as answer:
            await answer.read()
        async with client.session.get(client.root + "/ledger/r1") as answer:
            frame = LedgerFrame.decode(await answer.read())
    assert [call.num_sampled for call in frame.calls] == [3, 1]
    assert [call.parent for call in frame.calls] == [-1, 0]
    assert frame.calls[1].common == len(ids)
    assert np.frombuffer(frame.ids, "<i4").tolist() == [*ids, *chat.encode(" c")]
    assert frame.calls[1].content == " c"


async def test_gymrls_servers_by_url_sample_as_the_generator_behind_them(serve_tiny):
    """A fleet of our own servers, over plain completions."""
    async with (
        serve_tiny(num_threads=1, max_batch_size=1) as (first, local),
        serve_tiny(num_threads=1, max_batch_size=1) as (second, _),
    ):
        config = VllmConfig(base_urls=(first.base_url, second.base_url))
        remote = await RemoteVllmGenerator.connect(config, tuple(local.end_ids))
        try:
            assert remote.max_model_len == local.max_model_len
            samplings = [
                SamplingParams(seed=seed, max_tokens=8, temperature=0.9, top_p=0.9)
                for seed in range(6)
            ]
            here = await gather_bounded(lambda s: local.generate([5, 6, 7], s), samplings)
            there = await gather_bounded(lambda s: remote.generate([5, 6, 7], s), samplings)
            seen = []
            streamed = await remote.generate(
                [5, 6, 7], samplings[0], on_token=lambda token_id, _: seen.append(token_id)
            )
            policy = BatchGenerator(remote, pad_token_id=0, sampling=SamplingParams(max_tokens=8))
            batch = {
                "input_ids": torch.tensor([[5, 6, 7]] * 6),
                "input_lengths": torch.tensor([3] * 6),
                "seeds": list(range(6)),
            }
            outputs = {i: o async for i, o in policy.generate_async(batch)}
            with pytest.raises(GenerationRequestError, match="token 99999"):
                await remote.generate([99999], samplings[0])
        finally:
            await remote.close()
    assert [g.token_ids for g in there] == [g.token_ids for g in here]
    assert [g.finish_reason for g in there] == [g.finish_reason for g in here]
    assert [g.weight_versions for g in there] == [g.weight_versions for g in here]
    assert streamed.weight_versions == here[0].weight_versions
    assert here[0].weight_versions
    assert seen == streamed.token_ids == here[0].token_ids
    assert sorted(outputs) == [0, 1, 2, 3, 4, 5]


async def test_plain_code_samples_batches_from_a_fleet_by_url(serve_tiny, tiny_directory):
    async with (
        serve_tiny(num_threads=1, max_batch_size=1) as (first, local),
        serve_tiny(num_threads=1, max_batch_size=1) as (second, _),
    ):
        urls = (first.base_url, second.base_url)
        config = GenerationConfig(
            model=str(tiny_directory), backend="vllm", vllm=VllmConfig(base_urls=urls)
        )
        batch = {
            "input_ids": torch.tensor([[5, 6, 7], [8, 0, 0]]),
            "input_lengths": torch.tensor([3, 1]),
            "seeds": [1, 2],
            "max_new_tokens": [6, 6],
        }

        def blocking():
            with BatchGenerator.open(config) as policy:
                return policy.generate(batch)

        output = await anyio.to_thread.run_sync(blocking)
        single = await local.generate([8], SamplingParams(seed=2, max_tokens=6))
    assert output["output_ids"][1, 1 : 1 + len(single.token_ids)].tolist() == single.token_ids
