"""The public OpenAI client talks to the server and validates every answer against its schema."""

from contextlib import asynccontextmanager

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from gymrl.generation.chat import ChatFormat
from gymrl.testing import ScriptedGenerator

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<think>hm</think>ok<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


@pytest.fixture
def chat(tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer)


@pytest.fixture
def plain(tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer, reasoning_parser="none")


@pytest.fixture
def talk(serve):
    @asynccontextmanager
    async def talking(script, chat):
        is_script = isinstance(script, list)
        generator = ScriptedGenerator(script) if is_script else script
        async with serve(generator, chat=chat) as client:
            async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none") as caller:
                yield caller

    return talking


async def test_a_response_fits_the_public_schema_and_goes_back_as_it_came(talk, chat):
    async with talk([[*chat.encode(CALL), 2], [*chat.encode("done"), 2]], chat) as caller:
        raw = await caller.responses.with_raw_response.create(
            model="policy", input="hi", tools=[TOOL]
        )
        first = Response.model_validate_json(raw.content)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        items = [item.model_dump() for item in first.output]
        answer = {
            "type": "function_call_output",
            "call_id": items[-1]["call_id"],
            "output": "42",
        }
        second = await caller.responses.create(
            model="policy",
            input=[{"role": "user", "content": "hi"}, *items, answer],
            tools=[TOOL],
        )
    truth = items[-1]["prompt_token_ids"] + items[-1]["generation_token_ids"]
    assert second.output[-1].prompt_token_ids[: len(truth)] == truth
    assert second.output_text == "done"


async def test_a_chat_completion_fits_the_public_schema(talk, chat):
    async with talk([[*chat.encode(CALL), 2]], chat) as caller:
        raw = await caller.chat.completions.with_raw_response.create(
            model="policy",
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
            logprobs=True,
        )
    completion = ChatCompletion.model_validate_json(raw.content)
    assert completion.choices[0].message.tool_calls[0].function.arguments == '{"x": 1}'


async def test_chat_chunks_fit_the_public_schema(talk, plain):
    async with talk([[*plain.encode("hello world"), 2]], plain) as caller:
        stream = await caller.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hi"}], stream=True, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "hello world"


async def test_a_streamed_text_is_the_response_that_ends_it(talk, plain):
    async with talk([[*plain.encode("hello world"), 2]], plain) as caller:
        async with caller.responses.stream(model="policy", input="hi") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == final.output_text == "hello world"
    numbers = [e.sequence_number for e in events if hasattr(e, "sequence_number")]
    assert numbers == sorted(numbers)
    assert final.output[-1].generation_token_ids == [*plain.encode("hello world"), 2]
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {final.output[0].id}


async def test_a_streamed_tool_call_is_the_response_that_ends_it(talk, chat):
    async with talk([[*chat.encode(CALL), 2]], chat) as caller:
        async with caller.responses.stream(model="policy", input="hi", tools=[TOOL]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done.arguments == final.output[-1].arguments == '{"x": 1}'
    assert final.output_text == "ok"
    assert events[-1].type == "response.completed"


async def test_reasoning_and_text_are_streamed_while_tools_are_offered(talk, chat):
    sampled = chat.encode("<think>\nhm so\n</think>\n\nhello world")
    async with talk([[*sampled, 2]], chat) as caller:
        async with caller.responses.stream(
            model="policy", input="hi", tools=[TOOL], include=["message.output_text.logprobs"]
        ) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    thought = [e for e in events if e.type == "response.reasoning_summary_text.delta"]
    said = [e for e in events if e.type == "response.output_text.delta"]
    assert len(thought) > 1
    assert len(said) > 1
    reasoning, message = final.output
    assert "".join(e.delta for e in thought) == reasoning.summary[0].text == "hm so"
    assert "".join(e.delta for e in said) == final.output_text == "hello world"
    assert [e.item.type for e in events if e.type == "response.output_item.done"] == [
        "reasoning",
        "message",
    ]
    assert {e.item_id for e in thought} == {reasoning.id}
    assert {(e.item_id, e.output_index) for e in said} == {(message.id, 1)}
    assert len(message.content[0].logprobs) == len(message.generation_token_ids)


async def test_reasoning_that_a_call_follows_is_closed_before_it(talk, chat):
    sampled = chat.encode('<think>hm</think><tool_call>{"name": "f", "arguments": {}}</tool_call>')
    async with talk([[*sampled, 2]], chat) as caller:
        async with caller.responses.stream(model="policy", input="hi", tools=[TOOL]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
    done = [(e.output_index, e.item.id) for e in events if e.type == "response.output_item.done"]
    assert done == list(enumerate(item.id for item in final.output))
    assert [item.type for item in final.output] == ["reasoning", "function_call"]


async def test_an_error_in_a_streamed_response_is_an_event(talk, chat, broken_off, caplog):
    async with talk(broken_off, chat) as caller:
        stream = await caller.responses.create(model="policy", input="hi", stream=True)
        events = [event async for event in stream]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert (events[-1].type, events[-1].code) == ("error", "GenerationTransportError")
    assert events[-1].message == "it broke off"


async def test_errors_are_the_clients_own(talk, chat):
    async with talk([], chat) as caller:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await caller.responses.create(model="policy", input="hi", temperature=-1)
        with pytest.raises(openai.NotFoundError, match="gpt"):
            await caller.responses.create(model="gpt", input="hi")
