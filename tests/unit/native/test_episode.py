import json
import math

import pytest

from gymrl.config import SamplingParams
from gymrl.environments.base import Step
from gymrl.errors import (
    BadLogprobsError,
    EnvironmentContractError,
    GenerationError,
    NoGenerationError,
    RewardContractError,
    RolloutInfraFailure,
)
from gymrl.generation import Generated
from gymrl.rollout.episode import Episode, EpisodeRules
from gymrl.rollout.native_answers import has_broken_tool_call, has_malformed_thinking
from gymrl.rollout.native_rows import NativePrompt, prepare_samples
from tests.unit.native.worlds import Characters, observation, says


def an_episode(prompt="ab", *, metadata=None, stop=None, seed=None, **rules):
    task = NativePrompt(
        task_name="world",
        messages=[{"role": "user", "content": prompt}],
        metadata=metadata,
        stop_strings=stop,
    )
    [sample] = prepare_samples([task], 1, ["world"], Characters(), seed)
    return Episode(sample, EpisodeRules(**{"max_seq_len": 100, **rules}), Characters())


def a_step(content="", *, reward=0.0, terminated=False, metadata=None, stop=None, answer=None):
    return Step(observation(content), metadata, stop, reward, terminated, answer)


def text_of(trajectory):
    return "".join(chr(token) for token in trajectory.token_ids)


def facts_of(trajectory):
    result = json.loads(trajectory.result)
    return {
        name: result[name]
        for name in ("terminated", "truncated", "max_turns_reached", "num_turns", "env_tokens")
    }


def test_two_turns_become_spans_over_the_tokens_as_sampled():
    episode = an_episode("ab")

    assert episode.next_request().prompt_ids == [ord("a"), ord("b")]
    episode.take_generation(says("cd", logprob=-0.25))
    episode.take_step(a_step("ef", reward=0.5))
    assert episode.next_request().prompt_ids == [ord(c) for c in "abcdef"]
    episode.take_generation(says("g", logprob=-1.0))
    episode.take_step(a_step("bye", reward=1.0, terminated=True, answer="g"))
    assert episode.next_request() is None

    trajectory = episode.trajectory()
    assert text_of(trajectory) == "abcdefg"
    assert [(t.start, t.generation_start, t.end) for t in trajectory.turns] == [
        (0, 2, 4),
        (4, 6, 7),
    ]
    assert trajectory.logprobs.tolist() == [0.0, 0.0, -0.25, -0.25, 0.0, 0.0, -1.0]
    assert trajectory.reward.total == 1.5
    assert trajectory.agent == "world"
    assert [turn.prompt_text for turn in trajectory.turns] == ["ab", "ef"]
    result = json.loads(trajectory.result)
    assert result["final_observation"] == {
        "role": "environment",
        "content": "bye",
        "token_ids": [ord(c) for c in "bye"],
    }
    assert result["answer"] == "g"


def test_a_response_cut_at_the_token_limit_is_scored_and_ends_the_episode():
    episode = an_episode("ab", max_seq_len=5)
    assert episode.next_request().sampling.max_tokens == 3

    episode.take_generation(says("cde", finish_reason="length"))
    assert episode.message_log()[-1] == {"role": "assistant", "content": "cde"}
    episode.take_step(a_step("go on", reward=0.25))

    assert episode.next_request() is None
    trajectory = episode.trajectory()
    assert trajectory.reward.total == 0.25
    assert trajectory.incomplete_reason == "max_output_tokens"
    assert facts_of(trajectory) == {
        "terminated": False,
        "truncated": True,
        "max_turns_reached": False,
        "num_turns": 1,
        "env_tokens": 0,
    }


def test_a_response_cut_by_the_cap_of_one_call_is_truncated_as_well():
    episode = an_episode("ab", sampling=SamplingParams(max_tokens=2))

    episode.take_generation(says("cd", finish_reason="length"))
    episode.take_step(a_step("x", terminated=True))

    assert facts_of(episode.trajectory())["truncated"]
    assert facts_of(episode.trajectory())["terminated"]


def test_an_observation_of_ten_thousand_tokens_is_cut_to_the_five_that_are_left():
    episode = an_episode("ab", max_seq_len=10)

    episode.take_generation(says("cde"))
    episode.take_step(a_step("x" * 10_000, reward=1.0))

    assert episode.next_request() is None
    trajectory = episode.trajectory()
    result = json.loads(trajectory.result)
    assert result["final_observation"]["token_ids"] == [ord("x")] * 5
    assert trajectory.num_tokens <= 10
    assert result["truncated"]
    assert not result["max_turns_reached"]
    assert trajectory.reward.total == 1.0


def test_an_observation_that_fills_the_context_leaves_no_call_to_make():
    episode = an_episode("ab", max_seq_len=6)

    episode.take_generation(says("cd"))
    episode.take_step(a_step("ef"))

    assert episode.next_request() is None
    assert facts_of(episode.trajectory())["truncated"]


def test_a_last_observation_that_just_fits_truncates_nothing():
    episode = an_episode("ab", max_seq_len=6)

    episode.take_generation(says("cd"))
    episode.take_step(a_step("ef", terminated=True))

    assert not facts_of(episode.trajectory())["truncated"]
    assert facts_of(episode.trajectory())["terminated"]


def test_max_turns_is_reached_only_without_an_end_of_another_kind():
    plain = an_episode(max_turns=1)
    plain.take_generation(says("x"))
    plain.take_step(a_step("y"))
    assert plain.next_request() is None
    assert facts_of(plain.trajectory())["max_turns_reached"]

    natural = an_episode(max_turns=1)
    natural.take_generation(says("x"))
    natural.take_step(a_step("y", terminated=True))
    assert not facts_of(natural.trajectory())["max_turns_reached"]

    cut = an_episode(max_turns=1, max_seq_len=4)
    cut.take_generation(says("x"))
    cut.take_step(a_step("yyyy"))
    assert facts_of(cut.trajectory()) == {
        "terminated": False,
        "truncated": True,
        "max_turns_reached": False,
        "num_turns": 1,
        "env_tokens": 1,
    }


def test_a_list_of_stop_texts_replaces_and_none_keeps():
    episode = an_episode(stop=["<a>"], sampling=SamplingParams(stop=("END",)))
    seen = [episode.next_request().sampling.stop]
    for stop in (None, ["<b>", "END"], None, []):
        episode.take_generation(says("x"))
        episode.take_step(a_step("y", stop=stop))
        seen.append(episode.next_request().sampling.stop)

    assert seen == [("END", "<a>"), ("END", "<a>"), ("END", "<b>"), ("END", "<b>"), ("END",)]


def test_metadata_of_none_keeps_what_was_there():
    episode = an_episode(metadata={"n": 1})
    for metadata, expected in ((None, {"n": 1}), ({"n": 2}, {"n": 2}), (None, {"n": 2})):
        episode.take_generation(says("x"))
        episode.take_step(a_step("y", metadata=metadata))
        assert episode.metadata == expected


def test_component_rewards_add_up_by_name_and_their_sum_is_the_total():
    episode = an_episode()
    for reward in ({"format": 0.5}, {"format": 0.25, "answer": 1.0}, {}):
        episode.take_generation(says("x"))
        episode.take_step(a_step("y", reward=reward))

    reward = episode.trajectory().reward
    assert reward.components == {"format": 0.75, "answer": 1.0}
    assert reward.total == 1.75


def test_a_number_after_components_is_refused():
    episode = an_episode()
    episode.take_generation(says("x"))
    episode.take_step(a_step("y", reward={"format": 0.5}))
    episode.take_generation(says("x"))

    with pytest.raises(EnvironmentContractError, match="'world' gave a number on one turn"):
        episode.take_step(a_step("y", reward=1.0))


@pytest.mark.parametrize(
    "reward", [None, math.nan, math.inf, "1.0", True, {"a": None}, {"a": math.nan}, {"a": False}]
)
def test_a_reward_that_is_no_finite_number_is_never_a_zero(reward):
    episode = an_episode()
    episode.take_generation(says("x"))

    with pytest.raises(RewardContractError):
        episode.take_step(a_step("y", reward=reward))


@pytest.mark.parametrize(
    ("logprobs", "position"),
    [
        ([-0.1, -0.2], 2),
        ([-0.1, None, -0.3], 1),
        ([-0.1, -0.2, math.nan], 2),
        ([-math.inf, -0.2, -0.3], 0),
        (None, 0),
    ],
)
def test_bad_logprobs_are_refused_with_their_turn_and_position(logprobs, position):
    episode = an_episode()

    with pytest.raises(BadLogprobsError, match="turn 0") as caught:
        episode.take_generation(
            Generated(token_ids=[5, 6, 7], logprobs=logprobs, finish_reason="stop")
        )
    assert (caught.value.turn, caught.value.position) == (0, position)


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**40])
def test_a_token_that_no_vocabulary_has_fails_its_sample(token_id):
    """Tokenizers raise OverflowError for it, which would end the whole run."""
    episode = an_episode()
    answer = Generated(token_ids=[5, token_id], logprobs=[-0.1, -0.2], finish_reason="stop")
    with pytest.raises(GenerationError, match=f"turn 0: .* token {token_id} at position 1"):
        episode.take_generation(answer)


def test_the_clamped_logprob_of_an_impossible_token_is_a_number():
    episode = an_episode()
    episode.take_generation(Generated(token_ids=[65], logprobs=[-9999.0], finish_reason="stop"))
    episode.take_step(a_step(terminated=True))

    assert episode.trajectory().logprobs[-1] == -9999.0


def test_an_empty_first_generation_is_a_placeholder_that_keeps_its_reward():
    episode = an_episode("ab")
    episode.take_generation(says("", finish_reason="length"))
    episode.take_step(a_step("y", reward=0.5))

    trajectory = episode.trajectory()
    assert (trajectory.placeholder, trajectory.mask_sample) == (True, True)
    assert text_of(trajectory) == "ab"
    assert not trajectory.token_mask().any()
    assert trajectory.incomplete_reason == "max_output_tokens"
    assert trajectory.reward.total == 0.5
    assert trajectory.notes == {"empty_generations": 1}


def test_an_empty_second_generation_keeps_the_first_turn_as_the_last_to_train_on():
    episode = an_episode("ab")
    episode.take_generation(says("cd"))
    episode.take_step(a_step("ef", reward=1.0))
    episode.take_generation(says("", finish_reason="length"))
    episode.take_step(a_step("gh", reward=1.0))

    trajectory = episode.trajectory()
    assert text_of(trajectory) == "abcd"
    assert len(trajectory.turns) == 1
    assert not trajectory.placeholder
    assert trajectory.reward.total == 2.0
    assert facts_of(trajectory)["truncated"]
    assert facts_of(trajectory)["num_turns"] == 2


def test_a_prompt_that_fills_max_seq_len_is_a_failure_and_no_call():
    with pytest.raises(NoGenerationError, match="2 tokens leaves no room") as caught:
        an_episode("ab", max_seq_len=2)
    assert caught.value.prompt_length == 2


def test_a_generator_that_gave_up_is_the_fleets_fault():
    with pytest.raises(RolloutInfraFailure):
        an_episode().take_generation(says("x", finish_reason="abort"))


def test_a_lone_surrogate_in_an_observation_becomes_a_replacement_character():
    episode = an_episode()
    episode.take_generation(says("x"))
    episode.take_step(a_step("a\ud800b"))

    assert episode.message_log()[-1]["content"] == "a\ufffdb"
    episode.take_generation(says("x"))
    episode.take_step(a_step(terminated=True))
    assert episode.trajectory().notes == {"replaced_surrogates": 1}


def test_metadata_that_json_has_no_form_for_is_left_out_of_the_record():
    episode = an_episode()
    episode.take_generation(says("x"))
    episode.take_step(a_step(metadata={"big": 2**70}, terminated=True))

    trajectory = episode.trajectory()
    assert json.loads(trajectory.result)["metadata"] is None
    assert trajectory.notes == {"unencodable_metadata": 1}


def test_an_environment_that_changes_its_log_and_metadata_changes_nobody_elses():
    given = {"seen": []}
    episode = an_episode(metadata=given)
    episode.take_generation(says("x"))
    episode.message_log()[0]["content"] = "changed"
    episode.metadata["seen"].append(1)

    assert episode.message_log()[0]["content"] == "ab"
    assert given == {"seen": []}


def test_turns_of_a_seeded_episode_draw_different_numbers():
    episode = an_episode(seed=7)
    first = episode.next_request().sampling.seed
    episode.take_generation(says("x"))
    episode.take_step(a_step("y"))

    assert episode.next_request().sampling.seed != first
    assert an_episode(seed=7).next_request().sampling.seed == first


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n\n</tool_call>",
        '<tool_call>{"arguments":{}}</tool_call>',
        '<tool_call>{"name":"a","arguments":{}}\n{"name":"b"}</tool_call>',
        '<tool_call>{"name":"a" "arguments":1}</tool_call>',
        '<tool_call>{"name":"a","arguments":null}</tool_call>',
        '<tool_call>{"name":"a","arguments":[]}</tool_call>',
        '<tool_call>{"name":"a","arguments":"x"}</tool_call>',
        "<tool_call>",
        "<tool_call>" * 10_000,
    ],
)
def test_a_tool_call_that_does_not_parse_is_flagged(text):
    assert has_broken_tool_call(text)


def test_a_well_formed_tool_call_is_not_flagged():
    assert not has_broken_tool_call('<tool_call>{"name":"a","arguments":{}}</tool_call>')
    assert not has_broken_tool_call("plain")


@pytest.mark.parametrize(
    ("text", "malformed"),
    [
        ("<think>a</think>b", False),
        ("a</think>b", False),
        ("<think></think>x</think>", True),
        ("<think><think>x</think>", True),
        ("</think>x<think>", True),
        ("no tags", False),
    ],
)
def test_thinking_tags_are_one_pair_at_most(text, malformed):
    assert has_malformed_thinking(text) is malformed
