import random
from contextlib import asynccontextmanager

import aiohttp
import pytest

from gymrl.errors import LedgerMismatchError
from gymrl.gym.client import HttpPool
from gymrl.gym.ledger import LedgerClient
from gymrl.testing import ScriptedGenerator
from gymrl.token_ledger import LedgerFrame, LedgerReader, read_chains, rollout_base_url

USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "and?"}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


class Caller:
    def __init__(self, session, base_url, rollout_id="r", headers=None) -> None:
        self.session = session
        self.url = rollout_base_url(base_url, rollout_id) if rollout_id else base_url
        self.base_url = base_url
        self.headers = headers

    async def post(self, path, **body):
        async with self.session.post(self.url + path, json=body, headers=self.headers) as answer:
            return answer.status, await answer.json()

    async def chat(self, *messages, **body):
        status, answer = await self.post("/chat/completions", messages=list(messages), **body)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    async def frame(self, rollout_id="r") -> LedgerFrame:
        async with self.session.get(f"{self.base_url}/ledger/{rollout_id}") as answer:
            assert answer.status == 200, await answer.text()
            return LedgerFrame.decode(await answer.read())


@pytest.fixture
def call(serve):
    @asynccontextmanager
    async def calling(script, **options):
        generator = ScriptedGenerator(script)
        async with serve(generator) as base_url, aiohttp.ClientSession() as session:
            yield Caller(session, base_url, **options), generator

    return calling


def split(chat, *texts):
    """Each text a byte a token: nothing that the tokenizer would ever write."""
    return [[*(i for c in text for i in chat.encode(c)), 2] for text in texts]


def plain(message) -> dict:
    kept = {k: v for k, v in message.items() if k in ("role", "content", "tool_calls")}
    return {k: v for k, v in kept.items() if v}


@pytest.mark.parametrize("by", ["path", "header"])
async def test_a_plain_history_continues_the_sampled_tokens(call, chat, by):
    script = split(chat, "hello world", "good")
    assert chat.encode("hello world") != script[0][:-1]
    options = (
        {"rollout_id": "r"}
        if by == "path"
        else {
            "rollout_id": None,
            "headers": {"X-Gymrl-Rollout-Id": "r"},
        }
    )
    async with call(script, **options) as (caller, generator):
        first = await caller.chat(USER)
        await caller.chat(USER, plain(first), MORE)
        truth = generator.calls[0].prompt_ids + script[0]
        assert generator.calls[1].prompt_ids[: len(truth)] == truth
        frame = await caller.frame()
    (chain,) = read_chains(LedgerReader(frame))
    assert chain.places == (0, 1)


async def test_without_a_rollout_id_a_plain_history_is_written_anew(call, chat):
    script = split(chat, "hello world", "good")
    async with call(script, rollout_id=None) as (caller, generator):
        first = await caller.chat(USER)
        await caller.chat(USER, plain(first), MORE)
    truth = generator.calls[0].prompt_ids + script[0]
    assert generator.calls[1].prompt_ids[: len(truth)] != truth


async def test_tool_calls_and_dropped_reasoning_continue_the_sampled_tokens(call, chat):
    text = '<think>hm</think>ok<tool_call>{"name":  "f", "arguments": {"x":  1}}</tool_call>'
    script = [[*chat.encode(text), 2], *split(chat, "done")]
    async with call(script) as (caller, generator):
        first = await caller.chat(USER, tools=[TOOL])
        assert first["reasoning_content"] == "hm"
        answer = {"role": "tool", "tool_call_id": "x", "content": "3"}
        await caller.chat(USER, plain(first), answer, tools=[TOOL])
    truth = generator.calls[0].prompt_ids + script[0]
    assert generator.calls[1].prompt_ids[: len(truth)] == truth


async def test_the_responses_api_without_token_fields_continues_them_too(call, chat):
    script = split(chat, "hello world", "good")
    async with call(script) as (caller, generator):
        _, first = await caller.post("/responses", input="hi")
        text = first["output"][0]["content"][0]["text"]
        history = [USER, {"role": "assistant", "content": text}, MORE]
        status, _ = await caller.post("/responses", input=history)
    assert status == 200
    truth = generator.calls[0].prompt_ids + script[0]
    assert generator.calls[1].prompt_ids[: len(truth)] == truth


async def test_streams_and_every_choice_are_recorded(call, chat):
    script = split(chat, "aa", "bb", "cc", "dd")
    async with call(script) as (caller, _):
        async with caller.session.post(
            f"{caller.url}/chat/completions", json={"messages": [USER], "stream": True}
        ) as answer:
            assert "[DONE]" in await answer.text()
        async with caller.session.post(
            f"{caller.url}/responses", json={"input": "hi", "stream": True}
        ) as answer:
            assert "response.completed" in await answer.text()
        await caller.post("/chat/completions", messages=[USER], n=2)
        frame = await caller.frame()
    reader = LedgerReader(frame)
    tails = [
        reader.token_ids(place)[call.num_prompt :].tolist()
        for place, call in enumerate(frame.calls)
    ]
    assert tails == script
    assert frame.in_flight == 0


async def test_a_history_with_answers_of_somebody_else_is_marked(call, chat):
    async with call(split(chat, "a")) as (caller, _):
        await caller.chat(USER, {"role": "assistant", "content": "never said"}, MORE)
        (recorded,) = (await caller.frame()).calls
    assert recorded.is_unmatched


async def test_carried_tokens_that_were_never_served_are_refused(call, chat):
    async with call(split(chat, "hello", "no")) as (caller, _):
        first = await caller.chat(USER)
        first["generation_token_ids"] = [first["generation_token_ids"][0]]
        status, answer = await caller.post("/chat/completions", messages=[USER, first, MORE])
    assert status == 400
    assert answer["error"]["code"] == "prefix_rewritten"
    assert "did not give" in answer["error"]["message"]


async def test_a_failed_call_is_no_call(call):
    async with call([]) as (caller, _):
        status, _ = await caller.post("/chat/completions", messages=[USER])
        frame = await caller.frame()
    assert status == 500
    assert (frame.calls, frame.in_flight) == ((), 0)


async def test_a_taken_ledger_is_gone_and_its_absence_has_a_code(call, chat):
    async with call(split(chat, "a")) as (caller, _):
        await caller.chat(USER)
        url = f"{caller.base_url}/ledger/r"
        async with caller.session.delete(url) as answer:
            frame = LedgerFrame.decode(await answer.read())
        async with caller.session.get(url) as answer:
            missing = await answer.json()
        assert (answer.status, missing["error"]["code"]) == (404, "ledger_not_found")
        assert missing["server_id"] == frame.server_id


@pytest.mark.parametrize("rollout_id", ["-a", "a b", "a" * 256])
async def test_an_id_that_is_none_is_refused(call, chat, rollout_id):
    headers = {"x-gymrl-rollout-id": rollout_id}
    async with call(split(chat, "a"), rollout_id=None, headers=headers) as (caller, _):
        status, answer = await caller.post("/chat/completions", messages=[USER])
    assert status == 400
    assert "no rollout id" in answer["error"]["message"]


async def test_a_path_and_a_header_that_disagree_are_refused(call, chat):
    async with call(split(chat, "a"), headers={"x-gymrl-rollout-id": "q"}) as (caller, _):
        status, answer = await caller.post("/chat/completions", messages=[USER])
    assert status == 400
    assert answer["error"]["param"] == "x-gymrl-rollout-id"


async def test_a_rollout_that_two_servers_served_is_refused(serve, chat):
    first, second = (ScriptedGenerator(split(chat, "a")) for _ in range(2))
    async with serve(first) as one, serve(second) as other:
        async with aiohttp.ClientSession() as session, HttpPool() as pool:
            for url in (one, other):
                await Caller(session, url).chat(USER)
            ledgers = LedgerClient(pool, [one, other])
            await ledgers.greet()
            with pytest.raises(LedgerMismatchError, match="2 policy servers"):
                async with ledgers.rollout("r") as ledger:
                    await ledger.take()


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_is_sampled_a_plain_conversation_stays_one_chain(call, chat, seed):
    """Ids at random, tags and turn markers among them, ended by a marker or cut by length."""
    choose = random.Random(seed)
    script = []
    for _ in range(6):
        ids = [choose.randrange(len(chat.tokenizer)) for _ in range(choose.randrange(1, 30))]
        ids = [i for i in ids if i not in chat.end_ids]
        script.append([*ids, 2] if choose.random() < 0.5 else [*ids, 9])
    async with call(script) as (caller, generator):
        messages = [USER]
        for _ in script:
            answer = await caller.chat(*messages, tools=[TOOL])
            messages += [{**plain(answer), "content": answer["content"] or ""}, MORE]
        frame = await caller.frame()
    (chain,) = read_chains(LedgerReader(frame))
    assert chain.places == tuple(range(len(script)))
    whole = LedgerReader(frame).token_ids(chain.places[-1]).tolist()
    for recorded, sampled in zip(generator.calls, script, strict=True):
        sequence = [*recorded.prompt_ids, *sampled]
        assert whole[: len(sequence)] == sequence
    assert not any(one.is_unmatched for one in frame.calls)
