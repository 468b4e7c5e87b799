"""Where prompts are made: short ones at once, long ones beside the event loop."""

import threading

import pytest

from gymrl.generation.chat import ChatFormat
from gymrl.generation.policy import SHORT_BYTES, Conversation, Policy
from gymrl.testing import ScriptedGenerator


class NotedChat(ChatFormat):
    """Notes the threads in which it renders."""

    def __init__(self, tokenizer):
        self.threads = []
        super().__init__(tokenizer)

    def render(self, *args, **settings):
        self.threads.append(threading.current_thread())
        return super().render(*args, **settings)


TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


def asked(text, **more):
    return Conversation(messages=[{"role": "user", "content": text}], **more)


@pytest.mark.parametrize(
    ("conversation", "is_here"),
    [
        (asked("What is 6 times 7?", tools=[TOOL]), True),
        (asked("word " * (SHORT_BYTES // 5)), False),
        (asked("hi", tools=[TOOL] * (SHORT_BYTES // len(str(TOOL)) + 20)), False),
        (asked("hi", template_kwargs={"note": "word " * (SHORT_BYTES // 5)}), False),
    ],
)
async def test_a_short_prompt_is_made_at_once_and_a_long_one_beside_the_loop(
    tiny_tokenizer, conversation, is_here
):
    chat = NotedChat(tiny_tokenizer)
    policy = Policy(ScriptedGenerator([]), chat)
    ids = await policy.prompt(conversation)
    assert [thread is threading.current_thread() for thread in chat.threads] == [is_here]
    shown = conversation.messages, conversation.tools
    assert ids == chat.render(*shown, template_kwargs=conversation.template_kwargs)
