"""What the agent for environments of verifiers asks and answers, before any process runs."""

import json

import pytest

from gymrl.errors import ConfigError
from gymrl.gym.embedded.base import Peers, RefusedRequest
from gymrl.gym.embedded.verifiers import VerifiersAgent, chat_sampling, interpreter, items_of
from gymrl.gym.embedded.verifiers_peer import RolloutError, score_group

SETTINGS = {"environment": "my_env", "model_server": {"name": "policy_model"}}


def test_an_agent_without_tokens_demands_the_ledger():
    with pytest.raises(ConfigError, match=r"'verifiers_my_env'.*token_source to 'ledger'"):
        VerifiersAgent("verifiers_my_env", SETTINGS, Peers())


def test_a_timeout_of_nothing_is_refused():
    peers = Peers(names_rollouts=True)
    with pytest.raises(ConfigError, match="rollout_timeout_s=0"):
        VerifiersAgent("verifiers_my_env", {**SETTINGS, "rollout_timeout_s": 0}, peers)


def test_sampling_of_a_row_is_said_in_the_words_of_chat_completions():
    params = {
        "input": [],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 7,
        "metadata": {"extra_body": json.dumps({"seed": 11, "top_k": 3})},
    }
    assert chat_sampling(params) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": 11,
        "extra_body": {"top_k": 3},
    }
    assert chat_sampling({"input": [], "temperature": None, "metadata": None}) == {}


@pytest.mark.parametrize("text", ["{", "[1]", 3])
def test_options_that_are_no_json_object_are_refused(text):
    with pytest.raises(RefusedRequest, match=r"metadata\.extra_body"):
        chat_sampling({"metadata": {"extra_body": text}})


def test_an_interpreter_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="python='/no/such/python'"):
        interpreter("/no/such/python")


class Rubric:
    """Scores a group by how many it is, or raises; notes what it cleaned up behind."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.cleaned: list[dict] = []

    async def score_group(self, states):
        if self._error is not None:
            raise self._error
        for state in states:
            state["reward"] = float(len(states))

    async def cleanup(self, state):
        self.cleaned.append(state)


async def test_a_rubric_that_raises_on_a_group_is_no_fault_of_the_fleets():
    """It would be tried again five times, and then end the run."""
    states = [{"name": "a"}, {"name": "b"}]
    rubric = Rubric(IndexError("list index out of range"))
    with pytest.raises(RolloutError, match="failed on a whole group: IndexError") as caught:
        await score_group(rubric, states)
    assert caught.value.status == 422
    assert rubric.cleaned == states
    await score_group(Rubric(), states)
    assert [state["reward"] for state in states] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("ended", "raised"),
    [(ValueError("no page"), ValueError), ({"error": "ModelError: gone"}, RolloutError)],
)
async def test_a_group_with_a_rollout_that_failed_is_not_scored_and_leaves_nothing(ended, raised):
    rubric, state = Rubric(), {"name": "a"}
    with pytest.raises(raised):
        await score_group(rubric, [state, ended])
    assert "reward" not in state
    assert rubric.cleaned == [each for each in (state, ended) if isinstance(each, dict)]


def test_chat_messages_become_items():
    calls = [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "Wait.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": None, "tool_calls": None},
    ]
    assert [item for message in messages for item in items_of(message)] == [
        {"type": "message", "role": "user", "content": "Add."},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
