import pytest

from gymrl.gym.conduct import detect_invalid_tool_call_and_malformed_thinking as detect


def message(text):
    return {"type": "message", "content": [{"type": "output_text", "text": text}]}


def reasoning(text):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


@pytest.mark.parametrize(
    ("item", "invalid_call", "malformed"),
    [
        (message("4"), False, False),
        (message("<tool_call>"), True, False),
        (message("</function_call>"), True, False),
        (message("<think>"), False, True),
        (message("</think>"), False, True),
        (message("<think></think>x</think>"), False, True),
        (reasoning("<think>hm</think>"), False, False),
        (reasoning("<think>hm<think>"), False, True),
        (reasoning("</think></think>"), False, True),
        (reasoning("<tool_call>"), True, False),
        ({"type": "function_call", "name": "f", "arguments": "<tool_call>"}, False, False),
        ({"content": None, "summary": None}, False, False),
        ({"content": "plain <think>"}, False, True),
        ({"content": [{"text": None}, {"type": "refusal"}, None, 3]}, False, False),
        ({}, False, False),
    ],
)
def test_items_are_flagged(item, invalid_call, malformed):
    assert detect(item) == (invalid_call, malformed)


def test_patterns_and_tags_can_be_chosen():
    item = message("[CALL] <reason>")
    assert detect(item) == (False, False)
    assert detect(item, ["[CALL]"], ["<reason>"]) == (True, True)
    assert detect(message("<think><tool_call>"), [], []) == (False, False)
