import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import SamplingParams
from gymrl.errors import ConfigError, GenerationRequestError
from gymrl.generation import responses_api
from gymrl.generation.chat_api import conversation_of
from gymrl.generation.completions_api import CompletionRequest
from gymrl.generation.requests import (
    ChatRequest,
    ResponsesRequest,
    TokenizeRequest,
    check_text_format,
    check_tool_choice,
    convert,
    decode_body,
    read_request,
)


def responses(**fields) -> ResponsesRequest:
    return convert({"input": "hi", **fields}, ResponsesRequest)


def test_extra_body_is_merged_into_the_request():
    body = {"input": "hi", "metadata": {"extra_body": '{"seed": 7, "top_k": 5}', "note": "kept"}}
    request = convert(decode_body(msgspec.json.encode(body)), ResponsesRequest)
    sampling = request.sampling(None, "max_output_tokens")
    assert (sampling.seed, sampling.top_k) == (7, 5)
    assert request.metadata == body["metadata"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([0.5, 1.0, "", "auto", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "seed"]), inner)
    ),
    max_leaves=6,
)


def told(read, cls):
    """The plain fields of a request, or what is told of it."""
    try:
        request = read()
    except GenerationRequestError as error:
        return str(error), error.param
    own = {"input", "messages", "prompt"}.isdisjoint
    return {name: getattr(request, name) for name in cls.__struct_fields__ if own({name})}


@pytest.mark.parametrize("cls", [ResponsesRequest, ChatRequest, CompletionRequest, TokenizeRequest])
@settings(max_examples=30, deadline=None)
@given(
    fields=st.dictionaries(
        st.sampled_from(sorted({*ChatRequest.__struct_fields__, *ChatRequest.refused, "store"})),
        _JSON,
        max_size=3,
    )
)
def test_one_pass_over_a_body_reads_what_decoding_all_of_it_would(cls, fields):
    own = {"input": "hi", "messages": [], "prompt": "hi"}
    needed = {name: value for name, value in own.items() if name in cls.__struct_fields__}
    body = msgspec.json.encode(fields | needed)
    whole = told(lambda: convert(decode_body(body), cls), cls)
    assert told(lambda: read_request(body, cls), cls) == whole


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"input": "hi"', "the body is not valid JSON"),
        (b'{"input": "hi"} x', "the body is not valid JSON"),
        (b'["hi"]', "the body is a JSON list; an object is needed"),
        (b'{"input": "hi", "min_p": 0.1}', "min_p=0.1 is not supported"),
        (b'{"input": "hi", "metadata": {"extra_body": "{\\"min_p\\": 1}"}}', "min_p=1 is not"),
        (b'{"input": "hi", "metadata": {"extra_body": "x"}}', "metadata.extra_body is not valid"),
        (b'{"input": "hi", "seed": "x"}', "Expected `int | null`, got `str` - at `$.seed`"),
        (b'{"model": "m"}', "Object missing required field `input`"),
    ],
)
def test_a_body_that_can_not_be_served_is_told_why(body, said):
    with pytest.raises(GenerationRequestError) as caught:
        read_request(body, ResponsesRequest)
    assert str(caught.value).startswith(said)


def test_a_body_with_a_lone_surrogate_or_further_fields_for_the_server_is_read_like_any_other():
    read = read_request(b'{"input": "a\\ud800b"}', ResponsesRequest)
    assert read.input == "a\ufffdb"
    extra = b'{"input": "a", "seed": 1, "metadata": {"extra_body": "{\\"seed\\": 7}"}}'
    assert read_request(extra, ResponsesRequest).seed == 7


@pytest.mark.parametrize("extra", ["{bad", "[1]", "3", 5, "[" * 100_000])
def test_an_extra_body_that_is_no_object_is_refused_by_name(extra):
    body = msgspec.json.encode({"metadata": {"extra_body": extra}})
    with pytest.raises(GenerationRequestError, match="extra_body") as caught:
        decode_body(body)
    assert caught.value.param == "metadata.extra_body"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000, b"<html>"])
def test_a_body_that_is_no_json_is_refused(body):
    with pytest.raises(GenerationRequestError, match="not valid JSON"):
        decode_body(body)


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"3"])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(GenerationRequestError, match="an object is needed"):
        decode_body(body)


def test_a_lone_surrogate_becomes_the_replacement_character():
    """raullenchai/Rapid-MLX#730: JSON can spell what UTF-8 can't."""
    assert decode_body(b'{"input": "a\\ud800b \\ud83d\\ude00"}') == {"input": "a\ufffdb 😀"}


@pytest.mark.parametrize("text", ["a\u0000b", "\ufeffx", "a\r\nb", "𠮷野家"])
def test_unusual_characters_pass_as_they_are(text):
    assert decode_body(msgspec.json.encode({"input": text})) == {"input": text}


@pytest.mark.parametrize(
    "cls", [ResponsesRequest, ChatRequest, TokenizeRequest], ids=lambda cls: cls.__name__
)
def test_every_optional_field_may_be_null(cls):
    """NVIDIA-NeMo/Gym#1096."""
    needed = {ResponsesRequest: {"input": "hi"}, ChatRequest: {"messages": []}}.get(cls, {})
    nulls = {name: None for name in cls.__struct_fields__ if name not in needed}
    request = convert({**nulls, **needed}, cls)
    if cls is not TokenizeRequest:
        assert request.sampling(None, "max_tokens") == SamplingParams()


def test_every_optional_field_of_an_item_may_be_null():
    from gymrl.generation.requests import ChatMessage, InputItem

    nulls = dict.fromkeys(InputItem.__struct_fields__)
    request = convert({"input": [{**nulls, "role": "user"}]}, ResponsesRequest)
    assert request.input[0].role == "user"
    nulls = dict.fromkeys(ChatMessage.__struct_fields__)
    assert convert({"messages": [{**nulls, "role": "user"}]}, ChatRequest).messages


def test_unknown_fields_are_tolerated():
    assert responses(store=True, truncation="auto", something={"deep": [1]}).input == "hi"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"content": [{"text": []}]}]}, "input[0].content[0].text"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": [1]}, "stop[0]"),
        ({"seed": 1.5}, "seed"),
        ({"tools": {}}, "tools"),
    ],
)
def test_a_wrong_type_is_refused_with_its_place(fields, param):
    with pytest.raises(GenerationRequestError) as caught:
        responses(**fields)
    assert caught.value.param == param


def test_a_missing_field_is_named():
    with pytest.raises(GenerationRequestError, match="input") as caught:
        convert({}, ResponsesRequest)
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("logit_bias", {"5": 1}),
        ("structured_outputs", {"regex": "a"}),
        ("top_logprobs", 5),
        ("guided_choice", ["a"]),
        ("bad_words", ["a"]),
        ("allowed_token_ids", [5]),
        ("use_beam_search", True),
        ("truncate_prompt_tokens", 5),
        ("chat_template", "{{ 1 }}"),
        ("prompt", {"id": "p"}),
        ("conversation", "c"),
    ],
)
def test_what_would_change_the_distribution_is_refused_and_its_neutral_value_is_not(name, value):
    with pytest.raises(GenerationRequestError, match=name) as caught:
        responses(**{name: value})
    assert caught.value.param == name
    numbers = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    others = {"min_p": 0, "top_logprobs": 0, "logit_bias": {}, "bad_words": []}
    responses(**{name: (numbers | others | {"use_beam_search": False}).get(name)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("echo", True),
    ],
)
def test_what_chat_can_ask_for_and_is_not_here_is_refused_instead_of_ignored(name, value):
    with pytest.raises(GenerationRequestError, match=name):
        convert({"messages": [], name: value}, ChatRequest)
    convert({"messages": [], "modalities": ["text"], "function_call": "auto"}, ChatRequest)


@pytest.mark.parametrize(
    ("cls", "name", "value", "here"),
    [
        (ResponsesRequest, "max_tokens", 5, "max_output_tokens"),
        (ResponsesRequest, "max_completion_tokens", 5, "max_output_tokens"),
        (ResponsesRequest, "messages", [{"role": "user"}], "input"),
        (ResponsesRequest, "response_format", {"type": "json_object"}, "text.format"),
        (ResponsesRequest, "reasoning_effort", "low", "reasoning.effort"),
        (ResponsesRequest, "logprobs", True, "include"),
        (ResponsesRequest, "n", 2, "leave it out"),
        (ChatRequest, "max_output_tokens", 5, "max_completion_tokens"),
        (ChatRequest, "instructions", "Be brief.", "role system"),
        (ChatRequest, "input", "hi", "messages"),
        (ChatRequest, "reasoning", {"effort": "low"}, "reasoning_effort"),
        (ChatRequest, "text", {"format": {"type": "json_object"}}, "response_format"),
        (ChatRequest, "previous_response_id", "resp_1", "leave it out"),
        (CompletionRequest, "max_completion_tokens", 5, "max_tokens"),
        (CompletionRequest, "messages", [{"role": "user"}], "prompt"),
        (CompletionRequest, "tools", [{"type": "function"}], "leave it out"),
        (CompletionRequest, "response_format", {"type": "json_object"}, "leave it out"),
    ],
)
def test_a_field_of_another_api_is_refused_with_its_name_here(cls, name, value, here):
    """`max_tokens` on `/v1/responses` was ignored, and the answer filled the context."""
    asked = {"input": "hi", "messages": [], "prompt": "hi"}
    own = {ResponsesRequest: "input", ChatRequest: "messages", CompletionRequest: "prompt"}[cls]
    with pytest.raises(GenerationRequestError, match=name) as caught:
        convert({own: asked[own], name: value}, cls)
    assert here in str(caught.value)
    assert caught.value.param == name
    convert({own: asked[own], name: None}, cls)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("add_special_tokens", True),
        ("include_reasoning", False),
        ("mm_processor_kwargs", {"max_pixels": 5}),
        ("prompt_embeds", "AAAA"),
        ("vllm_xargs", {"a": 1}),
        ("verbosity", "low"),
    ],
)
def test_what_conversations_can_not_ask_for_is_refused_instead_of_ignored(name, value):
    for cls, own in ((ResponsesRequest, {"input": "hi"}), (ChatRequest, {"messages": []})):
        with pytest.raises(GenerationRequestError, match="leave it out") as caught:
            convert({**own, name: value}, cls)
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("effort", "variables", "seen"),
    [
        ("high", None, {"reasoning_effort": "high", "enable_thinking": True}),
        ("none", None, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            "high",
            {"enable_thinking": False},
            {"reasoning_effort": "high", "enable_thinking": False},
        ),
        (None, {"enable_thinking": False}, {"enable_thinking": False}),
        (None, None, None),
    ],
)
def test_an_effort_of_reasoning_is_a_variable_of_the_template(effort, variables, seen):
    """It was ignored, so that `none` left a model thinking."""
    own = {"chat_template_kwargs": variables}
    chat = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": effort, **own}
    conversation = conversation_of(convert(chat, ChatRequest), lambda _: True)
    assert conversation.template_kwargs == seen
    asked = responses(reasoning={"effort": effort}, **own)
    assert responses_api.conversation_of(asked, lambda _: True).template_kwargs == seen


def test_an_effort_that_the_template_does_not_read_makes_no_other_conversation():
    asked = responses(reasoning={"effort": "high"})
    of = responses_api.conversation_of
    assert of(asked, lambda name: name == "reasoning_effort").template_kwargs == {
        "reasoning_effort": "high"
    }
    assert of(asked, lambda _: False) == of(responses())


@pytest.mark.parametrize(
    ("field", "value"), [("parameters", "x"), ("parameters", []), ("description", 7)]
)
def test_a_tool_of_the_wrong_shape_is_refused_before_a_template_writes_it(field, value):
    tool = {"type": "function", "function": {"name": "f", field: value}}
    asked = convert({"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}, ChatRequest)
    with pytest.raises(GenerationRequestError) as caught:
        conversation_of(asked)
    assert caught.value.param == f"tools[0].{field}"


def test_an_answer_in_the_older_form_of_one_call_keeps_its_call():
    asked = convert(
        {
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "1"},
            ]
        },
        ChatRequest,
    )
    (call,) = conversation_of(asked).messages[1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}


def test_sampling_reads_the_request():
    request = responses(temperature=0.7, top_p=0.9, top_k=3, seed=1, stop="END", stop_token_ids=[4])
    assert request.sampling(5, "max_output_tokens") == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=3,
        seed=1,
        stop=("END",),
        stop_token_ids=(4,),
        max_tokens=5,
    )


@pytest.mark.parametrize("off", [0, -1, None])
def test_top_k_can_be_off_in_the_ways_clients_write_it(off):
    assert responses(top_k=off).sampling(None, "max_output_tokens").top_k is None


def test_an_empty_stop_text_stops_nothing():
    assert responses(stop=["", "x"]).sampling(None, "max_output_tokens").stop == ("x",)


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_that_is_not_positive_is_refused_under_its_own_name(limit):
    with pytest.raises(GenerationRequestError) as caught:
        responses().sampling(limit, "max_output_tokens")
    assert caught.value.param == "max_output_tokens"


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": 0}, {"top_k": -7}])
def test_values_out_of_range_name_the_setting(fields):
    with pytest.raises(ConfigError) as caught:
        responses(**fields).sampling(None, "max_output_tokens")
    assert caught.value.setting == next(iter(fields))


def test_a_call_can_be_left_to_the_model_or_ruled_out_but_not_forced():
    assert check_tool_choice(None)
    assert check_tool_choice("auto")
    assert not check_tool_choice("none")
    for forced in ("required", {"type": "function", "name": "f"}):
        with pytest.raises(GenerationRequestError, match="constrained decoding"):
            check_tool_choice(forced)


def test_structured_output_is_refused():
    check_text_format(None, "text.format")
    check_text_format({"type": "text"}, "text.format")
    check_text_format({}, "text.format")
    with pytest.raises(GenerationRequestError, match="json_schema"):
        check_text_format({"type": "json_schema"}, "text.format")
    for odd in ({"json_schema": {}}, "json_object", ["text"]):
        with pytest.raises(GenerationRequestError, match="constrained decoding"):
            check_text_format(odd, "text.format")
    with pytest.raises(GenerationRequestError) as caught:
        responses_api.check_request(responses(text={"verbosity": "low"}))
    assert caught.value.param == "text.verbosity"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "return_dict", "messages"])
def test_no_program_comes_in_among_the_variables_of_the_template(name):
    with pytest.raises(GenerationRequestError, match="no variable of a template") as caught:
        responses(chat_template_kwargs={"enable_thinking": False, name: "{{ 'A' * 10**10 }}"})
    assert caught.value.param == f"chat_template_kwargs.{name}"
    kept = responses(chat_template_kwargs={"enable_thinking": False})
    assert kept.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("stop", [["ab"] * 257, ["a" * 16385], "a" * 16385])
def test_stop_texts_are_bounded_as_all_of_them_are_looked_for_after_each_token(stop):
    with pytest.raises(GenerationRequestError, match="stop: ") as caught:
        responses(stop=stop).sampling(5, "max_output_tokens")
    assert caught.value.param == "stop"
    assert len(responses(stop=["ab"] * 256).sampling(5, "max_output_tokens").stop) == 256
