import gzip
import json
import math
import resource

import aiohttp
import anyio
import pytest
import yarl

from gymrl.errors import GenerationTransportError
from gymrl.generation.base import Generated
from gymrl.generation.chat import ChatFormat
from gymrl.generation.policy import Policy
from gymrl.generation.server import GenerationServer
from gymrl.testing import ScriptedGenerator

USER = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def generated(token_ids, finish="stop", logprob=-0.5) -> Generated:
    return Generated(token_ids=token_ids, logprobs=[logprob] * len(token_ids), finish_reason=finish)


@pytest.fixture
def chat(tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer)


async def test_a_responses_call_returns_text_and_tokens(serve, chat):
    sampled = [*chat.encode("hello world"), 2]
    async with serve(ScriptedGenerator([sampled])) as client:
        answer = await client.ok("/responses", input="hi")
    (item,) = answer["output"]
    assert item["content"][0]["text"] == "hello world"
    assert item["prompt_token_ids"] == chat.render(USER)
    assert item["generation_token_ids"] == sampled
    assert item["generation_log_probs"] == [-0.5] * len(sampled)
    assert answer["object"] == "response"
    assert answer["usage"]["input_tokens"] == len(chat.render(USER))
    assert answer["usage"]["output_tokens"] == len(sampled)


async def test_a_tool_call_comes_back_and_its_answer_continues_the_tokens(serve, chat):
    called = [*chat.encode('<tool_call>{"name": "weather", "arguments": {"city": "X"}}'), 5]
    called += [*chat.encode("</tool_call>"), 2]
    called.remove(5)
    generator = ScriptedGenerator([called, [*chat.encode("cold"), 2]])
    async with serve(generator) as client:
        first = await client.ok("/responses", input=USER, tools=[WEATHER])
        (item,) = first["output"]
        assert (item["type"], item["name"]) == ("function_call", "weather")
        assert json.loads(item["arguments"]) == {"city": "X"}
        answer = {"type": "function_call_output", "call_id": item["call_id"], "output": "cold"}
        second = await client.ok("/responses", input=[*USER, item, answer], tools=[WEATHER])
    truth = item["prompt_token_ids"] + item["generation_token_ids"]
    prompt = second["output"][-1]["prompt_token_ids"]
    assert prompt[: len(truth)] == truth
    assert generator.calls[1].prompt_ids == prompt
    assert "<tool_response>\ncold" in chat.tokenizer.decode(prompt[len(truth) :])


async def test_seeds_and_top_k_travel_in_extra_body(serve):
    generator = ScriptedGenerator([[5]])
    async with serve(generator) as client:
        await client.ok(
            "/responses",
            input="hi",
            temperature=0.7,
            top_p=0.9,
            max_output_tokens=9,
            metadata={"extra_body": '{"seed": 11, "top_k": 4}'},
        )
    sampling = generator.calls[0].sampling
    assert (sampling.seed, sampling.top_k, sampling.max_tokens) == (11, 4, 9)
    assert (sampling.temperature, sampling.top_p) == (0.7, 0.9)


async def test_every_post_is_also_served_under_a_rollouts_id(serve, chat):
    async with serve(ScriptedGenerator([[5], [5]])) as client:
        for path, body in [
            ("/v1/responses", {"input": "hi"}),
            ("/v1/chat/completions", {"messages": USER}),
            ("/tokenize", {"messages": USER}),
            ("/v1/tokenize", {"prompt": "hi"}),
        ]:
            status, _ = await client.post(f"/ng-rollout/t1-r0{path}", body, root=True)
            assert status == 200
        deeper = "/ng-rollout/t1-r0/training-token-capture/v1/tokenize"
        assert (await client.post(deeper, {"prompt": "hi"}, root=True))[0] == 200


async def test_an_agent_may_ask_its_own_url_which_models_there_are(serve):
    """Many harnesses do before their first call, and got 404."""
    async with serve(ScriptedGenerator([]), model_name="mine") as client:
        for path in ("/ng-rollout/t1-r0/v1/models", "/ng-rollout/t1-r0/v1/models/mine"):
            async with client.session.get(client.root + path) as answer:
                assert answer.status == 200
                found = await answer.json()
            assert (found["data"][0] if "data" in found else found)["id"] == "mine"


async def test_chat_completions_carry_tokens_the_way_vllm_writes_them(serve, chat):
    sampled = [*chat.encode("ab"), 2]
    async with serve(ScriptedGenerator([sampled])) as client:
        answer = await client.ok(
            "/chat/completions", messages=USER, logprobs=True, return_tokens_as_token_ids=True
        )
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == chat.render(USER)
    assert choice["token_ids"] == sampled
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in sampled]
    assert choice["message"]["generation_token_ids"] == sampled
    assert choice["finish_reason"] == "stop"


async def test_several_choices_share_a_prompt_and_not_a_seed(serve):
    generator = ScriptedGenerator([[5], [6], [7]])
    async with serve(generator) as client:
        answer = await client.ok("/chat/completions", messages=USER, n=3, seed=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({call.sampling.seed for call in generator.calls}) == 3
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_chat_tool_call_has_its_finish_reason(serve, chat):
    called = chat.encode('<tool_call>{"name": "weather", "arguments": {}}</tool_call>')
    tool = {"type": "function", "function": {"name": "weather"}}
    async with serve(ScriptedGenerator([[*called, 2]])) as client:
        answer = await client.ok("/chat/completions", messages=USER, tools=[tool])
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}


async def test_a_chat_message_sent_back_continues_its_tokens_and_tokenize_agrees(serve, chat):
    odd = [35, 98, 257]
    generator = ScriptedGenerator([generated(odd, "length"), [5]])
    async with serve(generator) as client:
        first = await client.ok("/chat/completions", messages=USER)
        message = first["choices"][0]["message"]
        messages = [*USER, message, {"role": "user", "content": "more"}]
        second = await client.ok("/chat/completions", messages=messages)
        tokenized = await client.ok("/tokenize", messages=messages)
    truth = first["prompt_token_ids"] + odd
    assert second["prompt_token_ids"][: len(truth) + 1] == [*truth, 2]
    assert tokenized["tokens"] == second["prompt_token_ids"]
    assert tokenized["count"] == len(tokenized["tokens"])


async def test_tokenize_takes_a_conversation_or_a_text(serve, chat):
    async with serve(ScriptedGenerator([])) as client:
        of_text = await client.ok("/tokenize", prompt="hello", return_token_strs=True)
        assert of_text["tokens"] == chat.encode("hello")
        assert of_text["token_strs"] == ["hello"]
        assert of_text["max_model_len"] == 4096
        bare = await client.ok("/tokenize", messages=USER, add_generation_prompt=False)
        assert bare["tokens"] == chat.render(USER, add_generation_prompt=False)
        for body in ({}, {"prompt": "a", "messages": USER}):
            assert (await client.post("/tokenize", body))[0] == 400


async def test_models_and_health(serve):
    async with serve(ScriptedGenerator([]), model_name="mine") as client:
        async with client.session.get(client.base_url + "/models") as answer:
            (model,) = (await answer.json())["data"]
        async with client.session.get(client.base_url + "/models/mine") as answer:
            assert (await answer.json())["max_model_len"] == 4096
        async with client.session.get(client.base_url + "/models/org/other") as answer:
            assert answer.status == 404
        async with client.session.get(client.root + "/health") as answer:
            assert answer.status == 200
    assert (model["id"], model["max_model_len"]) == ("mine", 4096)


async def test_a_model_that_is_not_served_is_not_found(serve):
    async with serve(ScriptedGenerator([[5]]), aliases=["org/real"]) as client:
        status, answer = await client.post("/responses", {"input": "hi", "model": "gpt-4"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        await client.ok("/responses", input="hi", model="org/real")


async def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(serve, chat):
    async with serve(ScriptedGenerator([[5]], max_model_len=8)) as client:
        for path, body in [
            ("/responses", {"input": "hi"}),
            ("/chat/completions", {"messages": USER}),
            ("/chat/completions", {"messages": USER, "stream": True}),
        ]:
            status, answer = await client.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert "maximum context length is 8 tokens" in answer["error"]["message"]
            assert f"{len(chat.render(USER))} tokens" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": "hi", "temperature": -1}, "temperature"),
        ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": "hi", "tool_choice": "required"}, "tool_choice"),
        ({"input": "hi", "text": {"format": {"type": "json_object"}}}, "text.format"),
        (b"{", None),
        (b"[1]", None),
        (b'{"input": "hi", "temperature": NaN}', None),
    ],
)
async def test_a_malformed_body_names_its_field(serve, body, param):
    async with serve(ScriptedGenerator([[5]])) as client:
        status, answer = await client.post("/responses", body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/chat/completions", {"messages": []}, "messages"),
        ("/responses", {"input": []}, "input"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/chat/completions",
            {"messages": USER, "max_completion_tokens": 0},
            "max_completion_tokens",
        ),
        ("/chat/completions", {"messages": USER, "max_tokens": 0}, "max_tokens"),
        ("/chat/completions", {"messages": [*USER * 3000]}, "messages"),
        ("/responses", {"input": [*USER * 3000]}, "input"),
        ("/completions", {"prompt": [1] * 5000}, "prompt"),
    ],
)
async def test_what_is_wrong_is_named_as_the_route_calls_it(serve, path, body, param):
    """All of them said `input`, and every limit was `max_tokens`."""
    async with serve(ScriptedGenerator([])) as client:
        status, answer = await client.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_token_that_no_model_has_is_told_under_the_field_that_it_came_in(serve_tiny):
    carried = {"prompt_token_ids": [1, 99_999], "generation_token_ids": [5]}
    answer = {"role": "assistant", "content": "x", **carried}
    asked = [*USER, answer, *USER]
    async with serve_tiny() as (client, _):
        for path, body, param in (
            ("/chat/completions", {"messages": asked}, "messages"),
            ("/responses", {"input": asked, "stream": True}, "input"),
            ("/completions", {"prompt": [99_999]}, "prompt"),
        ):
            status, told = await client.post(path, body)
            assert (status, told["error"]["param"]) == (400, param)
            assert "99999" in told["error"]["message"]


async def test_an_error_repeats_the_beginning_of_what_it_was_given(serve):
    async with serve(ScriptedGenerator([])) as client:
        for body in (
            {"messages": USER, "model": "m" * 100_000},
            {"messages": USER, "logit_bias": dict.fromkeys(map(str, range(10_000)), 1)},
            {"messages": [{"role": "r" * 100_000}]},
        ):
            _, answer = await client.post("/chat/completions", body)
            assert len(answer["error"]["message"]) < 5000


async def test_a_body_over_the_limit_is_413_and_says_so(serve):
    async with serve(ScriptedGenerator([[5]]), limit=1000) as client:
        status, answer = await client.post("/responses", {"input": "x" * 2000})
    assert status == 413
    assert "max_body_bytes=1000" in answer["error"]["message"]


async def test_a_body_that_says_it_is_over_the_limit_is_not_waited_for(serve):
    async with serve(ScriptedGenerator([[5]]), limit=1000) as client:
        url = yarl.URL(client.base_url)
        async with await anyio.connect_tcp(url.host, url.port) as stream:
            await stream.send(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\n")
            await stream.send(b"Content-Length: 999999999999\r\n\r\n")
            assert (await stream.receive()).startswith(b"HTTP/1.1 413")


async def test_a_body_that_is_not_compressed_as_it_says_is_the_clients_mistake(serve):
    async with serve(ScriptedGenerator([[5]])) as client:
        async with client.session.post(
            client.base_url + "/responses", data=b"plain", headers={"Content-Encoding": "gzip"}
        ) as answer:
            assert answer.status == 400
            assert "can't be read" in (await answer.json())["error"]["message"]
        packed = gzip.compress(b'{"input": "hi"}')
        async with client.session.post(
            client.base_url + "/responses", data=packed, headers={"Content-Encoding": "gzip"}
        ) as answer:
            assert answer.status == 200


async def test_a_body_beyond_aiohttps_own_limit_is_served(serve):
    """aio-libs/aiohttp#4474: the framework's default is 1 MiB."""
    async with serve(ScriptedGenerator([[5]]), limit=64 << 20) as client:
        await client.ok("/responses", input="hi", unknown="x" * (30 << 20))


async def test_a_lone_surrogate_in_a_tool_result_does_not_fail_the_call(serve):
    async with serve(ScriptedGenerator([[5]])) as client:
        status, _ = await client.post("/responses", b'{"input": "a\\ud800b"}')
    assert status == 200


async def test_half_a_character_in_what_an_agent_says_that_a_tool_was_called_with_is_mended(serve):
    """It is spelled in a JSON text inside the JSON body; the tokenizer refused it: HTTP 500."""
    called = {"name": "weather", "arguments": '{"city": "\\ud83d"}'}
    chat_call = {"role": "assistant", "tool_calls": [{"id": "1", "function": called}]}
    answered = {"role": "tool", "content": "cold", "tool_call_id": "1"}
    item = {"type": "function_call", "call_id": "1", **called}
    output = {"type": "function_call_output", "call_id": "1", "output": "cold"}
    odd = {"extra_body": '{"stop": "\\ud83d", "seed": 5}'}
    generator = ScriptedGenerator([[5]] * 3)
    async with serve(generator) as client:
        await client.ok("/chat/completions", messages=[*USER, chat_call, answered])
        await client.ok("/responses", input=[*USER, item, output], tools=[WEATHER])
        await client.ok("/responses", input="hi", metadata=odd)
    assert generator.calls[2].sampling.stop == ("\ufffd",)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
async def test_a_log_probability_that_is_no_number_is_an_error_and_never_null(serve, bad):
    """NVIDIA-NeMo/RL#2962."""
    async with serve(ScriptedGenerator([generated([5], logprob=bad)])) as client:
        status, answer = await client.post("/responses", {"input": "hi"})
    assert (status, answer["error"]["type"]) == (500, "BadLogprobsError")


async def test_an_unforeseen_error_is_500_with_its_type_and_no_stack(serve, caplog):
    def broken(prompt_ids, sampling):
        raise KeyError("x")

    async with serve(ScriptedGenerator(broken)) as client:
        status, answer = await client.post("/responses", {"input": "hi"})
    assert (status, answer["error"]["type"]) == (500, "KeyError")
    assert "line" not in answer["error"]["message"]
    assert "Traceback" in caplog.text


class Gone(ScriptedGenerator):
    """A generator whose servers are all out."""

    fault = "no vLLM server takes calls: http://a: refused"

    async def generate(self, prompt_ids, sampling, *, on_token=None):
        raise GenerationTransportError("no vLLM server can take the call")


async def test_a_generator_that_does_not_serve_is_503_and_says_why(serve, caplog):
    async with serve(Gone([[5]])) as client:
        status, answer = await client.post("/responses", {"input": "hi"})
        assert (status, answer["error"]["type"]) == (503, "GenerationTransportError")
        async with client.session.get(client.root + "/health") as health:
            assert health.status == 503
            assert "http://a: refused" in (await health.json())["error"]["message"]
    assert not caplog.records, "no stack for each of a thousand calls"


async def test_a_generator_that_closes_under_the_call_is_503(serve):
    async with serve(ScriptedGenerator([generated([5], "abort")])) as client:
        status, _ = await client.post("/responses", {"input": "hi"})
    assert status == 503


async def test_an_unknown_path_and_a_wrong_method_are_told_in_json(serve):
    async with serve(ScriptedGenerator([])) as client:
        assert (await client.post("/nowhere", {}))[0] == 404
        async with client.session.get(client.base_url + "/responses") as answer:
            assert answer.status == 405
            assert "GET /v1/responses" in (await answer.json())["error"]["message"]
            assert answer.headers["Allow"] == "POST"


async def test_a_client_that_disconnects_cancels_its_generation(serve):
    started = anyio.Event()

    async def never(prompt_ids, sampling):
        started.set()
        await anyio.sleep_forever()

    generator = ScriptedGenerator(never)
    async with serve(generator) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(client.post, "/responses", {"input": "hi"})
            await started.wait()
            group.cancel_scope.cancel()
        for _ in range(500):
            if generator.cancelled:
                break
            await anyio.sleep(0.01)
        assert generator.cancelled == 1


async def test_rewritten_history_is_refused_or_starts_a_segment(serve):
    from gymrl.testing import build_tiny_tokenizer

    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} "
        "{% if loop.last %}{{ m.reasoning_content or '' }}{% endif %}{{ m.content }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    chat = ChatFormat(build_tiny_tokenizer(template))
    carried = {"prompt_token_ids": [1], "generation_token_ids": [5]}
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    answered = {"role": "assistant", "content": "a", **carried}
    items = [*USER, reasoning, answered, *USER]
    async with serve(ScriptedGenerator([[5]]), chat=chat) as client:
        status, answer = await client.post("/responses", {"input": items})
        assert (status, answer["error"]["code"]) == (400, "prefix_rewritten")
        assert "at token" in answer["error"]["message"]
    async with serve(ScriptedGenerator([[5]]), chat=chat, on_rewrite="segment") as client:
        answer = await client.ok("/responses", input=items)
        messages = [*USER, {"role": "assistant", "content": "a"}, *USER]
        assert answer["output"][0]["prompt_token_ids"] == chat.render(messages)


async def read_events(client, **body) -> list:
    url = client.base_url + "/chat/completions"
    async with client.session.post(url, json={"stream": True, **body}) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        text = (await answer.read()).decode()
    lines = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    assert lines[-1] == "[DONE]" or "error" in lines[-1]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_a_stream_adds_up_to_the_answer_without_one(serve, chat):
    plain = ChatFormat(chat.tokenizer, reasoning_parser="none")
    sampled = [*chat.encode("héllo 🤗 world"), 2]
    async with serve(ScriptedGenerator([sampled, sampled]), chat=plain) as client:
        events = await read_events(
            client, messages=USER, logprobs=True, stream_options={"include_usage": True}
        )
        whole = await client.ok("/chat/completions", messages=USER, logprobs=True)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert [i for choice in choices for i in choice.get("token_ids", [])] == sampled
    pieces = [choice["delta"].get("content") or "" for choice in choices]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"] == "héllo 🤗 world"
    assert len([piece for piece in pieces if piece]) > 3
    logprobs = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    assert choices[-1]["finish_reason"] == "stop"
    assert events[-1]["usage"] == whole["usage"]


async def test_a_stream_with_tools_ends_with_the_call(serve, chat):
    called = chat.encode('<think>hm</think><tool_call>{"name": "f", "arguments": {}}</tool_call>')
    tool = {"type": "function", "function": {"name": "f"}}
    async with serve(ScriptedGenerator([[*called, 2]])) as client:
        events = await read_events(client, messages=USER, tools=[tool])
    last = events[-1]["choices"][0]
    assert last["delta"]["tool_calls"][0]["function"]["name"] == "f"
    deltas = [e["choices"][0]["delta"] for e in events[:-1]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert last["finish_reason"] == "tool_calls"


async def test_a_stream_of_several_choices_keeps_them_apart(serve):
    async with serve(ScriptedGenerator([[5, 6], [7, 8]])) as client:
        events = await read_events(client, messages=USER, n=2)
    by_index: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        for choice in event["choices"]:
            by_index[choice["index"]] += choice.get("token_ids", [])
    assert sorted(by_index.values()) == [[5, 6], [7, 8]]


async def test_an_error_in_a_stream_is_an_event(serve, broken_off, caplog):
    async with serve(broken_off) as client:
        events = await read_events(client, messages=USER)
    assert [choice["token_ids"] for choice in events[1]["choices"]] == [[5]]
    assert events[-1]["error"] == {
        "message": "it broke off",
        "type": "GenerationTransportError",
        "param": None,
        "code": None,
    }


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/chat/completions", {"messages": USER}),
        ("/responses", {"input": "hi"}),
        ("/completions", {"prompt": "hi"}),
    ],
)
async def test_a_stream_that_fails_before_its_first_token_has_the_status_of_its_error(
    serve, caplog, path, asked
):
    """It was 200 and an event, so that no client tried again."""

    def closing(prompt_ids, sampling):
        return generated([], finish="abort")

    async with serve(ScriptedGenerator(closing)) as client:
        status, answer = await client.post(path, asked | {"stream": True})
        assert (status, answer["error"]["type"]) == (503, "ServerClosingError")
    async with serve(ScriptedGenerator([])) as client:
        status, answer = await client.post(path, asked | {"stream": True})
        assert (status, answer["error"]["type"]) == (500, "GenerationError")


async def test_a_client_that_leaves_while_tokens_come_is_no_error_in_the_log(serve_tiny, caplog):
    body = {"messages": USER, "stream": True, "n": 2, "max_tokens": 1000, "ignore_eos": True}
    async with serve_tiny() as (client, generator):
        answer = await client.session.post(client.base_url + "/chat/completions", json=body)
        await answer.content.readline()
        answer.close()
        for _ in range(2000):
            if not generator.num_running + generator.num_waiting:
                break
            await anyio.sleep(0.01)
        assert not generator.num_running + generator.num_waiting
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_leaves_a_stream_cancels_its_generation(serve):
    async def never(prompt_ids, sampling):
        await anyio.sleep_forever()

    generator = ScriptedGenerator(never)
    async with serve(generator) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(client.post, "/chat/completions", {"messages": USER, "stream": True})
            while not generator.calls:  # noqa: ASYNC110 - the server says when
                await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        while not generator.cancelled:  # noqa: ASYNC110 - the server says when
            await anyio.sleep(0.01)
    assert generator.cancelled == 1


async def test_two_thousand_calls_at_once_are_all_in_flight(serve):
    """A server that answers only when all of them are there: nobody is refused or queued."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count, arrived, all_there = 2048, 0, anyio.Event()

    async def together(prompt_ids, sampling):
        nonlocal arrived
        arrived += 1
        if arrived == count:
            all_there.set()
        await all_there.wait()
        return generated([5])

    statuses = []
    async with serve(ScriptedGenerator(together)) as client:
        timeout = aiohttp.ClientTimeout(total=None)

        async def call() -> None:
            async with client.session.post(
                client.base_url + "/responses", json={"input": "hi"}, timeout=timeout
            ) as answer:
                statuses.append(answer.status)

        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(call)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert statuses == [200] * count


async def test_a_web_page_of_another_site_gets_nothing_sampled_and_no_model_named(serve):
    async with serve(ScriptedGenerator([[5]])) as client:
        page = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
        url = f"{client.base_url}/completions"
        async with client.session.post(url, data=b'{"prompt": [1]}', headers=page) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (
                403,
                "not_for_web_pages",
            )
        rebound = {"Host": "evil.example"}
        async with client.session.get(f"{client.base_url}/models", headers=rebound) as answer:
            assert answer.status == 421


async def test_a_server_beyond_loopback_says_that_it_asks_for_no_key(tokenizer, caplog):
    server = GenerationServer(
        Policy(ScriptedGenerator([[5]]), ChatFormat(tokenizer)), host="0.0.0.0"
    )
    await server.start()
    await server.close()
    assert "listens on 0.0.0.0 and asks for no key" in caplog.text
