"""Recorded answers of real Gym servers; what must come of each was worked out by hand."""

import json
from pathlib import Path

import pytest
import torch

from gymrl.errors import RolloutFailure
from gymrl.gym.episode import EpisodeOptions, read_episode
from gymrl.tensors import to_batch
from gymrl.types import RolloutGroup, Row
from tests.parity import naive

CAPTURES = Path(__file__).parents[1] / "data" / "captures"

# The recording policy answered every call with these, so a second call repeats the first prompt.
PROMPT = [1, 2, 3, 4, 5, 6, 7]
SAMPLED = [1000, 1001, 1002, 1003, 1004]
LOGPROBS = [-0.1, -0.2, -0.3, -0.4, -0.5]

SECOND_CALL_REPEATS_THE_PROMPT = [
    ("v04_single_tool/client.json", 1.0, None),
    ("v07_single_tool/client.json", 1.0, None),
    ("v07_observability/client.json", 1.0, None),
    ("v07_multi/client_example_multi_step.json", 0.0, None),
    ("v07_multi/client_example_session_state_mgmt.json", 0.0, None),
    (
        "v07_multi/client_example_tool_call_multireward.json",
        2.0,
        {"correctness": 1.0, "schema_valid": 1.0, "format": 0.0},
    ),
]


def answers(name):
    records = json.loads((CAPTURES / name).read_text())
    return [
        json.dumps(record["resp_body"]).encode()
        for record in records
        if record["url"].endswith("/run") and record["status"] == 200
    ]


def check_first_turn(trajectory, reward, components):
    assert trajectory.token_ids.tolist() == PROMPT + SAMPLED
    assert trajectory.token_mask().tolist() == [False] * 7 + [True] * 5
    assert trajectory.logprobs.tolist() == pytest.approx([0.0] * 7 + LOGPROBS)
    assert trajectory.reward.verifier == reward
    assert trajectory.reward.components == components
    assert not trajectory.mask_sample
    assert trajectory.incomplete_reason is None


@pytest.mark.parametrize(("name", "reward", "components"), SECOND_CALL_REPEATS_THE_PROMPT)
def test_a_recorded_rollout_whose_policy_forgot_its_tokens_is_refused(name, reward, components):
    for body in answers(name):
        with pytest.raises(naive.Refused, match="NonContiguousTokensError"):
            naive.episode(body)
        with pytest.raises(RolloutFailure) as caught:
            read_episode(body, agent="recorded")
        assert type(caught.value).__name__ == "NonContiguousTokensError"
        assert (caught.value.turn, caught.value.position) == (1, 7)
        kept = read_episode(
            body, agent="recorded", options=EpisodeOptions(on_broken_prefix="truncate")
        )
        check_first_turn(kept, reward, components)
        assert kept.truncated_prefix


def test_a_recorded_rollout_of_one_call_becomes_one_turn():
    (body,) = answers("v07_multi/client_math_with_judge.json")
    trajectory = read_episode(body, agent="math_with_judge")
    check_first_turn(trajectory, 0.0, None)
    assert not trajectory.truncated_prefix
    row = Row(index=0, task_index=0, rollout_index=0, route="m", rollout_id="r", body=b"{}")
    group = RolloutGroup(index=0, task_index=0, rows=(row,), samples=(trajectory,))
    batch = to_batch([group], pad_token_id=0)
    assert batch.final_batch["total_reward"].tolist() == [0.0]
    assert batch.final_batch["length"].tolist() == [7]
    assert batch.token_ids.tolist() == [PROMPT + SAMPLED]
    assert batch.generation_logprobs.dtype == torch.float32
    kept = json.loads(trajectory.result)
    assert kept["expected_answer"] == "32"
    assert "prompt_token_ids" not in kept["response"]["output"][0]


def test_a_recorded_rollout_without_token_ids_says_what_the_server_lacks():
    (body,) = answers("v07_openai_model/client.json")
    with pytest.raises(naive.Refused, match="NoGenerationError"):
        naive.episode(body)
    with pytest.raises(RolloutFailure, match="return_token_id_information"):
        read_episode(body, agent="recorded")


def test_a_recorded_conversation_with_its_tokens_carried_forward_is_one_sequence():
    """The same recording with the second prompt as a server that carries tokens forward sends it."""
    for name, reward, components in SECOND_CALL_REPEATS_THE_PROMPT:
        for body in answers(name):
            answer = json.loads(body)
            last = answer["response"]["output"][-1]
            last["prompt_token_ids"] = [*PROMPT, *SAMPLED, 50, 51]
            trajectory = read_episode(json.dumps(answer).encode(), agent="recorded")
            expected = [*PROMPT, *SAMPLED, 50, 51, *SAMPLED]
            assert trajectory.token_ids.tolist() == expected
            assert (
                trajectory.token_mask().tolist()
                == [False] * 7 + [True] * 5 + [False] * 2 + [True] * 5
            )
            assert trajectory.reward.verifier == reward
            assert trajectory.reward.components == components
