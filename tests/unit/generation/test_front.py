"""What a request costs beside its generation, counted in calls of Python functions.

Processor time says the same (docs/design/performance.md), but not on a busy machine.
"""

import gc
import sys

import msgspec

from gymrl.generation import chat_api
from gymrl.generation.base import Generated
from gymrl.generation.http_errors import json_answer
from gymrl.generation.policy import Policy
from gymrl.generation.requests import ChatRequest, read_request
from gymrl.testing import ScriptedGenerator

BODY = msgspec.json.encode({"messages": [{"role": "user", "content": "What is 6 times 7?"}]})


async def test_a_short_request_is_served_in_few_steps(tiny_chat):
    """It took 418 when settings read their annotations for each, 287 with a thread; it takes 195."""
    sampled = tiny_chat.encode("The answer is 42.")
    generated = Generated(token_ids=sampled, logprobs=[-0.5] * len(sampled), finish_reason="stop")
    policy = Policy(ScriptedGenerator(lambda *_: generated), tiny_chat)

    async def serve():
        request = read_request(BODY, ChatRequest)
        conversation = await policy.images.read(chat_api.conversation_of(request))
        prompt_ids = await policy.prompt(conversation)
        sampling = request.sampling(*request.limit)
        completion = await policy.sample(prompt_ids, conversation, sampling)
        answer = chat_api.completion_of(request, [completion], tiny_chat, policy.model_name)
        return json_answer(answer)

    await serve()  # what is made once is made
    steps = 0

    def count(frame, event, arg):
        nonlocal steps
        steps += event == "call"

    gc.disable()  # what other tests left behind may have finalizers
    sys.setprofile(count)
    try:
        answer = await serve()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert b"The answer is 42." in answer.body
    assert 50 < steps < 260
