"""One generation, one scoring, and whole rollouts, with policies that have the batch face."""

import asyncio

import anyio
import pytest
import torch

from gymrl.compat.nemo_rl import (
    async_generate_response_for_sample_turn,
    calculate_rewards,
    generate_responses,
    generate_responses_async,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
    run_sample_multi_turn_rollout,
)
from gymrl.compat.nemo_rl.policies import PolicyGenerator
from gymrl.config import SamplingParams
from gymrl.environments import EnvironmentReturn
from gymrl.errors import (
    BadLogprobsError,
    ContextOverflowError,
    EnvironmentContractError,
    GenerationError,
    RewardContractError,
    RolloutFailure,
    RowValueError,
    UnsupportedOptionError,
)
from gymrl.generation import BatchGenerator, Generated
from gymrl.testing import ScriptedGenerator


class Characters:
    pad_token_id = 0

    def encode(self, text, add_special_tokens=False):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids)


def says_ab(prompt_ids, sampling):
    return Generated(token_ids=[97, 98], logprobs=[-0.5, -0.25], finish_reason="stop")


def tokens(text):
    return torch.tensor([ord(c) for c in text])


def batch_of(*texts, **columns):
    return {
        "message_log": [
            [{"role": "user", "content": text, "token_ids": tokens(text)}] for text in texts
        ],
        **columns,
    }


def inputs(*texts):
    width = max(map(len, texts))
    return {
        "input_ids": torch.tensor([[*map(ord, t), *[0] * (width - len(t))] for t in texts]),
        "input_lengths": torch.tensor([len(t) for t in texts]),
    }


def policy(script=says_ab, **settings):
    sampling = SamplingParams(**settings)
    return BatchGenerator(ScriptedGenerator(script), pad_token_id=0, sampling=sampling)


class ForeignPolicy:
    """What somebody else's policy looks like: the batch face alone, and a ``cfg``."""

    def __init__(self, answer="ab", is_async=False, **changes):
        self.answer = answer
        self.changes = changes
        self.seen = []
        self.cfg = {"temperature": 0.7, "stop_strings": ["END"]}
        if is_async:
            self.generate_async = self._generate_async

    def generate(self, data, greedy=False):
        self.seen.append((data, greedy))
        said = [ord(c) for c in self.answer]
        rows = [
            ids[:length].tolist() + said
            for ids, length in zip(data["input_ids"], data["input_lengths"], strict=True)
        ]
        width = max(map(len, rows))
        prompts = data["input_lengths"].tolist()
        output = {
            "output_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            "generation_lengths": torch.tensor([len(said)] * len(rows)),
            "unpadded_sequence_lengths": torch.tensor([len(row) for row in rows]),
            "logprobs": torch.tensor(
                [[0.0] * n + [-0.5] * len(said) + [0.0] * (width - n - len(said)) for n in prompts]
            ),
            "truncated": torch.tensor([False] * len(rows)),
        }
        return {**output, **self.changes}

    async def _generate_async(self, data, greedy=False):
        for sample in reversed(range(len(data["input_lengths"]))):
            length = int(data["input_lengths"][sample])
            one = {
                "input_ids": data["input_ids"][sample : sample + 1, :length],
                "input_lengths": data["input_lengths"][sample : sample + 1],
                "stop_strings": data["stop_strings"][sample : sample + 1],
            }
            yield sample, self.generate(one, greedy)


def check_answers(found, batch):
    returned, generated_ids, metrics = found
    assert returned is batch
    assert [ids.tolist() for ids in generated_ids] == [[97, 98], [97, 98]]
    assert [log[-1]["content"] for log in batch["message_log"]] == ["ab", "ab"]
    assert [log[-1]["role"] for log in batch["message_log"]] == ["assistant", "assistant"]
    assert batch["message_log"][1][1]["token_ids"].tolist() == [97, 98]
    assert batch["message_log"][0][1]["generation_logprobs"].tolist() == [-0.5, -0.25]
    assert metrics["mean_generation_length"] == 2.0
    assert metrics["total_generated_tokens"] == 4
    assert metrics["_response_truncated"].tolist() == [False, False]


def test_answers_are_appended_to_the_message_logs_in_place():
    batch = batch_of("hi", "hello")
    data = inputs("hi", "hello")
    found = generate_responses(policy(), data, batch, Characters(), data["input_lengths"])
    check_answers(found, batch)
    assert "stop_strings" not in data


async def test_answers_are_appended_in_the_order_of_the_batch_whatever_ends_first():
    first_may_end = anyio.Event()

    async def answer(prompt_ids, sampling):
        if len(prompt_ids) == 2:
            await first_may_end.wait()
        else:
            first_may_end.set()
        return says_ab(prompt_ids, sampling)

    batch = batch_of("hi", "hello")
    data = inputs("hi", "hello")
    found = await generate_responses_async(
        policy(answer), data, batch, Characters(), data["input_lengths"]
    )
    check_answers(found, batch)


def test_the_batchs_stop_texts_win_over_those_of_the_input():
    generator = ScriptedGenerator(says_ab)
    batcher = BatchGenerator(generator, pad_token_id=0)
    batch = batch_of("hi", "ho", stop_strings=[["x"], None])
    data = {**inputs("hi", "ho"), "stop_strings": [["y"], ["y"]]}
    generate_responses(batcher, data, batch, Characters(), data["input_lengths"])
    assert [call.sampling.stop for call in generator.calls] == [("x",), ()]


def test_messages_go_without_log_probabilities_where_none_are_wanted():
    batch, data = batch_of("hi"), inputs("hi")
    generate_responses(
        policy(), data, batch, Characters(), data["input_lengths"], include_logprobs=False
    )
    assert "generation_logprobs" not in batch["message_log"][0][1]


def test_a_truncated_answer_is_told():
    batch, data = batch_of("hi"), inputs("hi")
    cut = policy(max_tokens=1)
    _, ids, metrics = generate_responses(cut, data, batch, Characters(), data["input_lengths"])
    assert ids[0].tolist() == [97]
    assert metrics["_response_truncated"].tolist() == [True]


def test_an_answer_that_does_not_fit_the_batch_appends_nothing():
    batch, data = batch_of("hi"), inputs("hi")
    wrong = ForeignPolicy(unpadded_sequence_lengths=torch.tensor([9]))
    with pytest.raises(GenerationError, match="sample 0 of the batch: the policy says 9 tokens"):
        generate_responses(wrong, data, batch, Characters(), data["input_lengths"])
    assert len(batch["message_log"][0]) == 1


async def test_a_policy_without_the_async_face_is_named():
    with pytest.raises(UnsupportedOptionError, match="ForeignPolicy has no generate_async"):
        await generate_responses_async(
            ForeignPolicy(), inputs("hi"), batch_of("hi"), Characters(), torch.tensor([2])
        )


async def test_a_stream_that_ends_early_appends_nothing():
    class Half(ForeignPolicy):
        async def _generate_async(self, data, greedy=False):
            async for sample, output in super()._generate_async(data, greedy):
                yield sample, output
                return

    batch, data = batch_of("hi", "ho"), inputs("hi", "ho")
    with pytest.raises(GenerationError, match=r"without the samples \[0\]"):
        await generate_responses_async(
            Half(is_async=True), data, batch, Characters(), data["input_lengths"]
        )
    assert [len(log) for log in batch["message_log"]] == [1, 1]


async def test_one_turn_of_one_sample_appends_to_its_log_and_stays_within_its_length():
    generator = ScriptedGenerator(says_ab)
    log = [
        {"role": "user", "content": "hi", "token_ids": tokens("hi")},
        {"role": "user", "content": "!", "token_ids": tokens("!")},
    ]
    found, ids, lengths, metrics = await async_generate_response_for_sample_turn(
        BatchGenerator(generator, pad_token_id=0), log, ["x"], Characters(), max_seq_len=4
    )
    assert found is log
    assert ids.tolist() == [97]
    assert lengths.tolist() == [3]
    assert log[-1]["content"] == "a"
    assert metrics["_response_truncated"].tolist() == [True]
    assert generator.calls[0].prompt_ids == [104, 105, 33]
    assert generator.calls[0].sampling.stop == ("x",)


async def test_a_turn_without_room_is_an_error_and_no_empty_answer():
    log = [{"role": "user", "content": "hi", "token_ids": tokens("hi")}]
    with pytest.raises(ContextOverflowError, match="max_seq_len=2"):
        await async_generate_response_for_sample_turn(policy(), log, None, Characters(), 2)
    assert len(log) == 1


def answers(count, rewards, **changes):
    fields = {
        "observations": [{"role": "environment", "content": "?"}] * count,
        "metadata": [None] * count,
        "next_stop_strings": [None] * count,
        "rewards": rewards,
        "terminateds": [True] * count,
    }
    return EnvironmentReturn(**{**fields, **changes})


class LengthRewards:
    """A sample's reward is the length of its last message."""

    def step(self, message_logs, metadata):
        return answers(
            len(message_logs),
            [float(len(log[-1]["content"])) for log in message_logs],
            metadata=[{"seen": meta} for meta in metadata],
            observations=[
                {"role": "environment", "content": log[0]["content"]} for log in message_logs
            ],
        )


class AsyncHalves:
    async def step(self, message_logs, metadata):
        return answers(len(message_logs), torch.full((len(message_logs),), 0.5))


class Components:
    def __init__(self, *names):
        self.names = names

    def step(self, message_logs, metadata):
        count = len(message_logs)
        return answers(count, [{n: i + 1.0 for i, n in enumerate(self.names)}] * count)


def test_rewards_come_in_the_order_of_the_batch_from_all_environments():
    batch = batch_of(
        "a", "bb", "ccc", task_name=["long", "half", "long"], extra_env_info=[{"n": 1}, {}, None]
    )
    found = calculate_rewards(batch, {"long": LengthRewards(), "half": AsyncHalves()})
    assert found.rewards.tolist() == [1.0, 0.5, 3.0]
    assert found.rewards.dtype == torch.float32
    assert found.terminateds.tolist() == [True, True, True]
    assert found.metadata == [{"seen": {"n": 1}}, None, {"seen": None}]
    assert [o["content"] for o in found.observations] == ["a", "?", "ccc"]
    assert found.next_stop_strings == [None, None, None]


def test_named_components_are_columns():
    batch = batch_of("a", "b", task_name=["two", "two"])
    found = calculate_rewards(batch, {"two": Components("correct", "short")})
    assert found.rewards.tolist() == [[1.0, 2.0], [1.0, 2.0]]


def test_components_of_other_names_are_refused():
    batch = batch_of("a", "b", task_name=["one", "two"])
    with pytest.raises(EnvironmentContractError, match="differ in kind"):
        calculate_rewards(batch, {"one": Components("x"), "two": Components("x", "y")})


@pytest.mark.parametrize("reward", [None, float("nan"), "1"])
def test_a_sample_that_could_not_be_scored_is_an_error_with_its_row_and_no_zero(reward):
    class Odd:
        def step(self, message_logs, metadata):
            return answers(2, [1.0, reward])

    with pytest.raises(RewardContractError, match="row 1: reward"):
        calculate_rewards(batch_of("a", "b", task_name=["odd", "odd"]), {"odd": Odd()})


def test_a_task_without_an_environment_is_named_before_anything_is_scored():
    with pytest.raises(RowValueError, match="row 1: there is no environment for task 'chess'"):
        calculate_rewards(
            batch_of("a", "b", task_name=["long", "chess"]), {"long": LengthRewards()}
        )


async def test_scoring_is_refused_in_a_loop_and_works_in_a_thread():
    batch = batch_of("abc", task_name=["long"])
    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        calculate_rewards(batch, {"long": LengthRewards()})
    found = await asyncio.to_thread(calculate_rewards, batch, {"long": LengthRewards()})
    assert found.rewards.tolist() == [3.0]


class Countdown:
    """Ends after as many answers as the metadata says."""

    def step(self, message_logs, metadata):
        left = [meta["turns"] - 1 for meta in metadata]
        return answers(
            len(left),
            [float(n == 0) for n in left],
            metadata=[{"turns": n} for n in left],
            terminateds=[n == 0 for n in left],
        )


def episodes(*turns):
    return batch_of(
        *["hi"] * len(turns),
        task_name=["count"] * len(turns),
        extra_env_info=[{"turns": n} for n in turns],
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("run", [run_multi_turn_rollout, run_async_multi_turn_rollout])
def test_whole_rollouts_take_a_policy_with_the_batch_face_alone(run, is_async):
    foreign = ForeignPolicy(is_async=is_async)
    final, metrics = run(foreign, episodes(1, 2), Characters(), {"count": Countdown()}, 64)
    assert final["total_reward"].tolist() == [1.0, 1.0]
    ids = [[message["token_ids"].tolist() for message in log] for log in final["message_log"]]
    assert ids == [[[104, 105], [97, 98]], [[104, 105], [97, 98], [63], [97, 98]]]
    assert final["message_log"][1][3]["generation_logprobs"].tolist() == [-0.5, -0.5]
    assert metrics["avg_turns_per_sample"] == 1.5
    assert {tuple(stops) for data, _ in foreign.seen for stops in data["stop_strings"]} == {
        ("END",)
    }
    assert {greedy for _, greedy in foreign.seen} == {False}


def test_lock_step_asks_a_policy_for_whole_batches():
    foreign = ForeignPolicy()
    run_multi_turn_rollout(
        foreign, episodes(1, 2), Characters(), {"count": Countdown()}, 64, greedy=True
    )
    assert [len(data["input_lengths"]) for data, _ in foreign.seen] == [2, 1]
    assert {greedy for _, greedy in foreign.seen} == {True}


def test_a_policys_answer_beyond_the_samples_length_is_cut_and_counts_as_truncated():
    foreign = ForeignPolicy(answer="abcdef")
    final, metrics = run_multi_turn_rollout(
        foreign, episodes(1), Characters(), {"count": Countdown()}, max_seq_len=5
    )
    assert final["message_log"][0][1]["token_ids"].tolist() == [97, 98, 99]
    assert final["truncated"].tolist() == [True]
    assert metrics["truncation_rate"] == 1.0


async def test_an_answer_that_is_cut_keeps_its_routes_for_what_is_left():
    foreign = ForeignPolicy(
        answer="abcdef", routed_experts=torch.arange(8, dtype=torch.int16).reshape(1, 8, 1, 1)
    )
    generator = PolicyGenerator(foreign, pad_token_id=0)
    generated = await generator.generate([104, 105], SamplingParams(max_tokens=3))
    assert generated.token_ids == [97, 98, 99]
    assert generated.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output_ids": torch.tensor([[1, 2, 97, 98]])}, "does not begin with the prompt"),
        ({"unpadded_sequence_lengths": torch.tensor([4, 4])}, "2 answers to 1 samples"),
        ({"unpadded_sequence_lengths": torch.tensor([3])}, "column 3"),
    ],
)
def test_a_policys_answer_to_another_prompt_fails_the_sample(changes, words):
    with pytest.raises(RolloutFailure, match=words):
        run_multi_turn_rollout(
            ForeignPolicy(**changes), episodes(1), Characters(), {"count": Countdown()}, 64
        )


def test_a_policy_without_log_probabilities_fails_the_sample():
    with pytest.raises(BadLogprobsError, match="no logprobs"):
        run_multi_turn_rollout(
            ForeignPolicy(logprobs=None), episodes(1), Characters(), {"count": Countdown()}, 64
        )


def test_a_batch_generator_rolls_out_with_its_own_sampling():
    generator = ScriptedGenerator(says_ab)
    batcher = BatchGenerator(
        generator, pad_token_id=0, sampling=SamplingParams(temperature=0.3, max_tokens=7)
    )
    final, _ = run_multi_turn_rollout(
        batcher, episodes(1, 1), Characters(), {"count": Countdown()}, 64
    )
    assert final["total_reward"].tolist() == [1.0, 1.0]
    assert {(c.sampling.temperature, c.sampling.max_tokens) for c in generator.calls} == {(0.3, 7)}


async def test_one_sample_plays_with_a_batch_generator():
    state = {name: column[0] for name, column in episodes(2).items()}
    final, _ = await run_sample_multi_turn_rollout(
        0, state, policy(), Characters(), {"count": Countdown()}, 64
    )
    assert len(final["message_log"]) == 4
