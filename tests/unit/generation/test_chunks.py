import json

import anyio
import anyio.lowlevel
import pytest

from gymrl.errors import GenerationError
from gymrl.generation.chunks import Chunks, ClientGoneError, write_chunks


class Client:
    """What a client has received; gone after `leaves_after` events."""

    path = "/v1/chat/completions"

    def __init__(self, leaves_after=None):
        self.events = []
        self._leaves_after = leaves_after

    @property
    def is_open(self):
        return bool(self.events)

    async def send(self, data):
        if len(self.events) == self._leaves_after:
            raise ClientGoneError("gone")
        text = data.decode().removeprefix("data: ").removesuffix("\n\n")
        self.events.append(text if text == "[DONE]" else json.loads(text))


def chunks_of(sample, num_choices=2, usage=None):
    return Chunks(
        envelope={"id": "x"},
        num_choices=num_choices,
        sample=sample,
        opening=lambda index: {"choices": [{"index": index}]},
        token=lambda index, token_id, logprob: {"index": index, "token": [token_id, logprob]},
        last=lambda index, sampled: {"index": index, "whole": sampled},
        usage=usage,
    )


async def test_every_choice_is_opened_then_told_as_it_comes_and_used_tokens_last():
    client = Client()

    async def later_choices_first(index, on_token):
        while index == 0 and '"whole": "choice 1"' not in json.dumps(client.events):
            await anyio.lowlevel.checkpoint()
        on_token(40 + index, -0.5)
        return f"choice {index}"

    await write_chunks(client, chunks_of(later_choices_first, usage=lambda all_: {"of": all_}))
    assert client.events == [
        {"id": "x", "choices": [{"index": 0}]},
        {"id": "x", "choices": [{"index": 1}]},
        {"id": "x", "choices": [{"index": 1, "token": [41, -0.5]}]},
        {"id": "x", "choices": [{"index": 1, "whole": "choice 1"}]},
        {"id": "x", "choices": [{"index": 0, "token": [40, -0.5]}]},
        {"id": "x", "choices": [{"index": 0, "whole": "choice 0"}]},
        {"id": "x", "choices": [], "usage": {"of": ["choice 0", "choice 1"]}},
        "[DONE]",
    ]


async def test_a_failure_is_the_last_event_and_ends_the_other_choices():
    ended = []

    async def sample(index, on_token):
        if index == 0:
            on_token(7, -0.25)
            raise GenerationError("the engine broke")
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(index)

    client = Client()
    await write_chunks(client, chunks_of(sample, usage=lambda all_: {"of": all_}))
    error = {"message": "the engine broke", "type": "GenerationError", "param": None, "code": None}
    assert client.events[-1] == {"error": error}
    assert "[DONE]" not in client.events
    assert ended == [1]


async def test_a_failure_before_the_first_token_is_raised_while_a_status_can_tell_it():
    """The client got 200 and an event that it does not try again for."""

    async def sample(index, on_token):
        raise GenerationError("the engine ended")

    client = Client()
    with pytest.raises(GenerationError, match="the engine ended"):
        await write_chunks(client, chunks_of(sample))
    assert client.events == []


async def test_a_client_that_is_gone_ends_every_choice_and_is_told_nothing():
    ended = []

    async def sample(index, on_token):
        on_token(7, -0.25)
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(index)

    client = Client(leaves_after=3)
    with pytest.raises(ClientGoneError):
        await write_chunks(client, chunks_of(sample))
    assert sorted(ended) == [0, 1]
    assert len(client.events) == 3


async def test_tokens_that_come_when_the_client_is_gone_are_dropped():
    """A decoding thread has some on their way; each was an error in the log."""
    late = []

    async def sample(index, on_token):
        late.append(on_token)
        on_token(7, -0.25)
        await anyio.sleep_forever()

    with pytest.raises(ClientGoneError):
        await write_chunks(Client(leaves_after=3), chunks_of(sample))
    for on_token in late:
        on_token(8, -0.25)
