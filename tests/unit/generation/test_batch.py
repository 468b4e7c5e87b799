"""The batch face: what goes in, what comes out, and that it is the one-by-one face in tensors."""

import asyncio

import anyio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import GenerationConfig, SamplingParams
from gymrl.errors import (
    BadLogprobsError,
    ContextOverflowError,
    GenerationError,
    GenerationRequestError,
)
from gymrl.generation.base import Generated, WeightSpan
from gymrl.generation.batch import BatchGenerator, verify_right_padding
from gymrl.generation.transformers import TransformersGenerator
from gymrl.testing import ScriptedGenerator

PAD = 0


def padded(prompts, pad=PAD):
    width = max(map(len, prompts), default=0)
    return {
        "input_ids": torch.tensor([p + [pad] * (width - len(p)) for p in prompts]),
        "input_lengths": torch.tensor([len(p) for p in prompts]),
    }


def counting(prompt_ids, sampling):
    """One token more than the first one of the prompt says, all alike."""
    count = prompt_ids[0]
    return Generated(token_ids=[7] * count, logprobs=[-0.5] * count, finish_reason="stop")


def test_a_batch_comes_back_padded_with_lengths_log_probabilities_and_flags():
    policy = BatchGenerator(
        ScriptedGenerator(counting), pad_token_id=PAD, sampling=SamplingParams(max_tokens=2)
    )
    output = policy.generate(padded([[1, 5, 6], [3]]))
    assert output["output_ids"].tolist() == [[1, 5, 6, 7], [3, 7, 7, 0]]
    assert output["generation_lengths"].tolist() == [1, 2]
    assert output["unpadded_sequence_lengths"].tolist() == [4, 3]
    assert output["logprobs"].tolist() == [[0.0, 0.0, 0.0, -0.5], [0.0, -0.5, -0.5, 0.0]]
    assert output["truncated"].tolist() == [False, True]
    assert (output["output_ids"].dtype, output["logprobs"].dtype) == (torch.int64, torch.float32)
    assert verify_right_padding(output, PAD) == (True, None)


@pytest.mark.parametrize(
    ("column", "remedy"),
    [("temperature", "sampling="), ("stop_token_ids", "sampling="), ("stop", "stop_strings")],
)
def test_a_column_that_asks_for_another_distribution_is_refused(column, remedy):
    """It was ignored, as columns of a trainer's own are."""
    policy = BatchGenerator(ScriptedGenerator(counting), pad_token_id=PAD)
    batch = padded([[5, 6], [7]])
    with pytest.raises(GenerationRequestError, match=f"{column} is no column.*{remedy}") as caught:
        policy.generate({**batch, column: [0.5, 0.5]})
    assert caught.value.param == column
    policy.generate({**batch, column: None, "loss_multiplier": [1, 1]})


def test_the_callers_batch_is_left_as_it_was():
    batch = {**padded([[1, 5], [1]]), "stop_strings": [["x"], None]}
    before = dict(batch)
    BatchGenerator(ScriptedGenerator(counting), pad_token_id=PAD).generate(batch)
    assert batch["input_ids"].tolist() == [[1, 5], [1, 0]]
    assert batch.keys() == before.keys()
    assert batch["stop_strings"] == [["x"], None]


def test_stop_texts_seeds_and_limits_are_each_samples_own():
    generator = ScriptedGenerator(counting)
    policy = BatchGenerator(
        generator, pad_token_id=PAD, sampling=SamplingParams(max_tokens=8, stop=("all",), seed=9)
    )
    batch = {
        **padded([[1], [1], [1]]),
        "stop_strings": [["a", "b"], None, []],
        "seeds": [4, None, 5],
        "max_new_tokens": torch.tensor([3, 99, 8]),
    }
    policy.generate(batch)
    assert [call.sampling.stop for call in generator.calls] == [
        ("all", "a", "b"),
        ("all",),
        ("all",),
    ]
    assert [call.sampling.seed for call in generator.calls] == [4, 9, 5]
    assert [call.sampling.max_tokens for call in generator.calls] == [3, 8, 8]


def test_greedy_switches_every_filter_off():
    generator = ScriptedGenerator(counting)
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5)
    BatchGenerator(generator, pad_token_id=PAD, sampling=sampling).generate(
        padded([[1]]), greedy=True
    )
    [call] = generator.calls
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.top_k) == (0.0, 1.0, None)


def test_an_empty_generation_is_no_truncation():
    output = BatchGenerator(ScriptedGenerator(counting), pad_token_id=PAD).generate(
        padded([[0, 4], [1]], pad=0)
    )
    assert output["generation_lengths"].tolist() == [0, 1]
    assert output["truncated"].tolist() == [False, False]
    assert output["output_ids"].tolist() == [[0, 4], [1, 7]]


def test_a_prompt_that_fills_the_context_comes_back_truncated_and_is_not_asked():
    generator = ScriptedGenerator(counting, max_model_len=3)
    output = BatchGenerator(generator, pad_token_id=PAD).generate(padded([[1, 2, 3], [1]]))
    assert output["truncated"].tolist() == [True, False]
    assert output["generation_lengths"].tolist() == [0, 1]
    assert len(generator.calls) == 1


def test_a_prompt_beyond_the_context_is_refused_by_its_number_before_anything_runs():
    generator = ScriptedGenerator(counting, max_model_len=3)
    with pytest.raises(ContextOverflowError, match="sample 1 of the batch") as caught:
        BatchGenerator(generator, pad_token_id=PAD).generate(padded([[1], [1, 2, 3, 4]]))
    assert (caught.value.prompt_tokens, caught.value.max_model_len) == (4, 3)
    assert generator.calls == []


def test_an_empty_batch_is_an_empty_answer():
    batch = {"input_ids": torch.zeros(0, 5, dtype=torch.int64), "input_lengths": torch.zeros(0)}
    output = BatchGenerator(ScriptedGenerator(counting), pad_token_id=PAD).generate(batch)
    assert output["output_ids"].shape == (0, 0)
    assert output["truncated"].tolist() == []


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": [[1, 0, 2]], "input_lengths": [1]}, "sample 0 .* token 2 in column 2"),
        ({"input_ids": [[1, 2], [9, 9]], "input_lengths": [2, 1]}, "sample 1 .* column 1"),
        ({"input_ids": [[0, 0, 5, 6]], "input_lengths": [2]}, "column 2"),
        ({"input_ids": [[1, 2]], "input_lengths": [3]}, "says 3 tokens"),
        ({"input_ids": [[1, 2]], "input_lengths": [0]}, "says 0 tokens"),
        ({"input_ids": [[1, 2]], "input_lengths": [2, 2]}, "2 entries for 1 samples"),
        ({"input_ids": [1, 2], "input_lengths": [2]}, "2 dimension"),
        ({"input_ids": [[1.0]], "input_lengths": [1]}, "whole numbers"),
        ({"input_ids": [[1]]}, "needs input_ids and input_lengths"),
        ({"input_ids": [[1]], "input_lengths": [1], "stop_strings": ["ab"]}, "list of texts"),
        ({"input_ids": [[1]], "input_lengths": [1], "stop_strings": []}, "0 entries for 1"),
        ({"input_ids": [[1]], "input_lengths": [1], "seeds": [True]}, "whole number"),
        (
            {"input_ids": [[1]], "input_lengths": [1], "max_new_tokens": [0]},
            "sample 0 .*max_tokens",
        ),
    ],
)
def test_a_malformed_batch_is_refused_with_its_place(batch, words):
    generator = ScriptedGenerator(counting)
    tensors = {
        name: torch.tensor(value) if name.startswith("input") else value
        for name, value in batch.items()
    }
    with pytest.raises(ValueError, match=words) as caught:
        BatchGenerator(generator, pad_token_id=PAD).generate(tensors)
    assert isinstance(caught.value, GenerationRequestError)
    assert generator.calls == []


def test_padding_can_be_asked_about_without_an_error():
    is_sound, why = verify_right_padding(
        {"input_ids": torch.tensor([[4, 3]]), "input_lengths": torch.tensor([1])},
        pad_value=9,
        raise_error=False,
    )
    assert not is_sound
    assert "sample 0 of the batch: input_ids has token 3 in column 1" in why


def test_a_sample_that_fails_is_named_and_keeps_its_type():
    def answer(prompt_ids, sampling):
        if prompt_ids == [2]:
            return Generated(token_ids=[7], logprobs=[float("nan")], finish_reason="stop")
        return counting(prompt_ids, sampling)

    with pytest.raises(BadLogprobsError, match=r"sample 1 of the batch: .* nan") as caught:
        BatchGenerator(ScriptedGenerator(answer), pad_token_id=PAD).generate(padded([[1], [2]]))
    assert caught.value.position == 0


def test_an_aborted_call_is_an_error_and_no_short_answer():
    aborted = Generated(token_ids=[7], logprobs=[-0.5], finish_reason="abort")
    with pytest.raises(GenerationError, match=r"sample 0 .* aborted after 1 tokens"):
        BatchGenerator(ScriptedGenerator([aborted]), pad_token_id=PAD).generate(padded([[1]]))


def test_the_weights_of_each_token_are_told():
    told = Generated(
        token_ids=[7, 7],
        logprobs=[-0.5, -0.5],
        finish_reason="stop",
        weight_versions=[WeightSpan("a", 0, 1), WeightSpan("b", 1, 2)],
    )
    output = BatchGenerator(ScriptedGenerator([told]), pad_token_id=PAD).generate(padded([[1]]))
    assert output["weight_versions"] == [[("a", 0, 1), ("b", 1, 2)]]


async def test_a_blocking_call_is_refused_where_a_loop_runs():
    policy = BatchGenerator(ScriptedGenerator(counting), pad_token_id=PAD)
    with pytest.raises(RuntimeError, match="use generate_async there"):
        policy.generate(padded([[1]]))


async def test_samples_come_in_the_order_of_their_completion():
    first_may_end = anyio.Event()

    async def answer(prompt_ids, sampling):
        if prompt_ids == [1]:
            await first_may_end.wait()
        return counting(prompt_ids, sampling)

    policy = BatchGenerator(ScriptedGenerator(answer), pad_token_id=PAD)
    found = {}
    order = []
    async for sample, output in policy.generate_async(padded([[1], [2, 2], [3]])):
        order.append(sample)
        found[sample] = output
        if len(order) == 2:
            first_may_end.set()
    assert order[-1] == 0
    assert sorted(order) == [0, 1, 2]
    assert found[1]["output_ids"].tolist() == [[2, 2, 7, 7]]
    assert found[1]["unpadded_sequence_lengths"].tolist() == [4]


async def test_leaving_early_aborts_what_runs():
    async def answer(prompt_ids, sampling):
        if prompt_ids == [1]:
            return counting(prompt_ids, sampling)
        return await anyio.sleep_forever()

    generator = ScriptedGenerator(answer)
    stream = BatchGenerator(generator, pad_token_id=PAD).generate_async(padded([[1], [2], [3]]))
    sample, _ = await anext(stream)
    await stream.aclose()
    assert sample == 0
    assert generator.cancelled == 2


async def test_cancelling_the_consumer_aborts_what_runs():
    asked = []

    async def answer(prompt_ids, sampling):
        asked.append(prompt_ids)
        if len(asked) == 2:
            scope.cancel()
        await anyio.sleep_forever()

    generator = ScriptedGenerator(answer)
    policy = BatchGenerator(generator, pad_token_id=PAD)
    with anyio.CancelScope() as scope:
        async for _ in policy.generate_async(padded([[1], [2]])):
            pass
    assert generator.cancelled == 2


async def test_one_sample_that_fails_ends_the_stream_and_aborts_the_others():
    async def answer(prompt_ids, sampling):
        if prompt_ids == [2]:
            raise GenerationError("the engine is on fire")
        await anyio.sleep_forever()

    generator = ScriptedGenerator(answer)
    policy = BatchGenerator(generator, pad_token_id=PAD)
    with pytest.raises(GenerationError, match="sample 1 of the batch: the engine is on fire"):
        async for _ in policy.generate_async(padded([[1], [2], [3]])):
            pass
    assert generator.cancelled == 2


PROMPTS = st.lists(st.lists(st.integers(1, 380), min_size=1, max_size=12), min_size=1, max_size=6)


@settings(max_examples=6, deadline=None)
@given(prompts=PROMPTS, seed=st.integers(0, 1 << 20), greedy=st.booleans())
def test_the_batch_face_equals_one_call_after_the_other(tiny_model, prompts, seed, greedy):
    """On a real model, one place in its batch, so that a call's arithmetic is always the same."""
    generator = TransformersGenerator(tiny_model, max_batch_size=1, end_ids=[2], max_model_len=16)
    sampling = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.95)
    policy = BatchGenerator(generator, pad_token_id=PAD, sampling=sampling)
    seeds = [seed + i for i in range(len(prompts))]
    batch = {**padded(prompts), "seeds": seeds}

    def alone(prompt, own):
        filters = {"temperature": 0.0} if greedy else {"temperature": 0.8, "top_p": 0.95}
        return generator.generate(prompt, SamplingParams(max_tokens=6, seed=own, **filters))

    async def one_by_one():
        try:
            singles = [await alone(p, s) for p, s in zip(prompts, seeds, strict=True)]
            streamed = {i: o async for i, o in policy.generate_async(batch, greedy=greedy)}
            return singles, streamed
        finally:
            await generator.close()

    whole = policy.generate(batch, greedy=greedy)
    singles, streamed = asyncio.run(one_by_one())
    assert verify_right_padding(whole, PAD)[0]
    for i, (prompt, single) in enumerate(zip(prompts, singles, strict=True)):
        total = len(prompt) + len(single.token_ids)
        expected = [0.0] * len(prompt) + torch.tensor(single.logprobs).tolist()
        assert whole["output_ids"][i, :total].tolist() == prompt + single.token_ids
        assert whole["logprobs"][i, :total].tolist() == expected
        assert whole["logprobs"][i, total:].tolist() == [0.0] * (whole["logprobs"].shape[1] - total)
        assert whole["unpadded_sequence_lengths"][i] == total
        assert whole["generation_lengths"][i] == len(single.token_ids)
        assert whole["truncated"][i] == (single.finish_reason == "length")
        assert streamed[i]["output_ids"].tolist() == [prompt + single.token_ids]
        assert streamed[i]["logprobs"].tolist() == [expected]


def test_a_generator_that_is_opened_serves_plain_code_and_any_event_loop(tiny_directory):
    config = GenerationConfig(model=str(tiny_directory), num_threads=1)
    batch = {**padded([[5, 6, 7], [8]]), "seeds": [1, 2]}
    sampling = SamplingParams(max_tokens=4)

    async def streamed(policy):
        return {sample: output async for sample, output in policy.generate_async(batch)}

    async def single(policy):
        seen = []
        generated = await policy.generator.generate(
            [5, 6, 7],
            SamplingParams(max_tokens=4, seed=1),
            on_token=lambda token_id, _: seen.append(token_id),
        )
        return generated, seen

    with BatchGenerator.open(config, sampling=sampling, pad_token_id=PAD) as policy:
        whole = policy.generate(batch)
        again = asyncio.run(streamed(policy))
        (generated, seen), (_, seen_again) = (asyncio.run(single(policy)) for _ in range(2))
    for sample in (0, 1):
        total = int(whole["unpadded_sequence_lengths"][sample])
        assert again[sample]["output_ids"].tolist() == [
            whole["output_ids"][sample, :total].tolist()
        ]
    assert generated.token_ids == whole["output_ids"][0, 3:7].tolist()
    assert seen == seen_again == generated.token_ids


async def test_all_samples_are_asked_at_once():
    waiting = 0
    all_wait = anyio.Event()

    async def answer(prompt_ids, sampling):
        nonlocal waiting
        waiting += 1
        if waiting == 4:
            all_wait.set()
        await all_wait.wait()
        return counting(prompt_ids, sampling)

    policy = BatchGenerator(ScriptedGenerator(answer), pad_token_id=PAD)
    with anyio.fail_after(10):
        found = [s async for s, _ in policy.generate_async(padded([[1], [2], [3], [4]]))]
    assert sorted(found) == [0, 1, 2, 3]
