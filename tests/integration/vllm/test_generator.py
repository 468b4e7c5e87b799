"""The generator over a real engine: tokens, log-probabilities, stops, seeds, cancellation."""

import contextlib

import anyio
import anyio.to_thread
import pytest
import torch
from anyio.from_thread import BlockingPortal

from gymrl.concurrency import gather_bounded
from gymrl.config import SamplingParams
from gymrl.errors import (
    ContextOverflowError,
    GenerationError,
    GenerationRequestError,
    WeightUpdateError,
)
from gymrl.generation.base import Generator, WeightSpan
from gymrl.generation.batch import BatchGenerator, verify_right_padding
from gymrl.generation.fidelity import MAX_TOLERANCE, MEAN_TOLERANCE
from gymrl.generation.weights import DirectoryWeights, UpdatableGenerator
from tests.integration.vllm.engines import PROMPT, ask_for_ever, engine_config, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


async def test_it_is_a_generator_whose_weights_can_change(generator):
    assert isinstance(generator, Generator)
    assert isinstance(generator, UpdatableGenerator)
    assert generator.is_running
    assert generator.max_model_len == 512


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=64),
        SamplingParams(max_tokens=64, temperature=0.7),
        SamplingParams(max_tokens=64, temperature=1.3, top_p=0.9, top_k=40),
        SamplingParams(max_tokens=64, temperature=0),
    ],
    ids=["plain", "cooled", "filtered", "greedy"],
)
async def test_log_probabilities_are_those_of_the_sampling_distribution(generator, first, sampling):
    prompts = [[*PROMPT, *range(10, 10 + n)] for n in range(8)]
    results = await gather_bounded(lambda prompt: generator.generate(prompt, sampling), prompts)

    errors = [
        error
        for prompt, result in zip(prompts, results, strict=True)
        for error in first.errors(prompt, result, sampling)
    ]
    assert len(errors) > 100
    assert sum(errors) / len(errors) < MEAN_TOLERANCE
    assert max(errors) < MAX_TOLERANCE


async def test_greedy_takes_the_likeliest_token(generator, first):
    result = await generator.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0))

    ids = list(PROMPT)
    with torch.inference_mode():
        for token_id in result.token_ids:
            assert token_id == int(first.model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token_id)


async def test_a_seed_makes_a_call_repeatable_whatever_else_runs(generator):
    seeded = SamplingParams(max_tokens=24, seed=11, ignore_eos=True)
    alone = await generator.generate(PROMPT, seeded)

    results = await gather_bounded(
        lambda sampling: generator.generate(PROMPT, sampling),
        [seeded, *[SamplingParams(max_tokens=24, seed=s, ignore_eos=True) for s in range(5)]],
    )

    assert results[0].token_ids == alone.token_ids
    assert len({tuple(r.token_ids) for r in results}) == 6


async def test_the_seed_minus_one_is_a_seed(generator):
    sampling = SamplingParams(max_tokens=24, seed=-1, ignore_eos=True)
    once = await generator.generate(PROMPT, sampling)
    again = await generator.generate(PROMPT, sampling)
    assert once.token_ids == again.token_ids


async def test_calls_without_a_seed_differ(generator):
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    once = await generator.generate(PROMPT, sampling)
    again = await generator.generate(PROMPT, sampling)
    assert once.token_ids != again.token_ids


@pytest.mark.parametrize("room", [12, 1])
async def test_the_budget_ends_at_the_context(generator, room):
    prompt = [7] * (512 - room)
    result = await generator.generate(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
    assert len(result.token_ids) == room
    assert result.finish_reason == "length"


async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(generator):
    with pytest.raises(ContextOverflowError) as caught:
        await generator.generate([7] * 512, SamplingParams())
    assert (caught.value.prompt_tokens, caught.value.max_model_len) == (512, 512)


async def test_ids_outside_the_vocabulary_are_refused_with_their_position(generator):
    with pytest.raises(GenerationRequestError) as caught:
        await generator.generate([1, 2, 1_000_000], SamplingParams())
    assert caught.value.position == 2


async def test_a_temperature_that_vllm_would_raise_is_refused(generator):
    with pytest.raises(GenerationRequestError, match=r"0\.01 or more"):
        await generator.generate(PROMPT, SamplingParams(temperature=0.001))


async def test_what_vllm_refuses_to_sample_with_is_the_requests_mistake(generator):
    with pytest.raises(GenerationRequestError, match=r"temperature must be in \[0, 2\]"):
        await generator.generate(PROMPT, SamplingParams(temperature=100.0))


async def test_a_stop_token_ends_the_call_and_is_kept(generator):
    free = await generator.generate(PROMPT, SamplingParams(max_tokens=8, seed=3, ignore_eos=True))
    stop = free.token_ids[4]
    assert stop not in free.token_ids[:4]

    result = await generator.generate(
        PROMPT, SamplingParams(max_tokens=8, seed=3, stop_token_ids=(stop,), ignore_eos=True)
    )

    assert result.token_ids == free.token_ids[:5]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


async def test_the_end_of_turn_ends_the_call_without_naming_a_token(generator):
    end = next(iter(generator.end_ids))
    results = await gather_bounded(
        lambda seed: generator.generate(PROMPT, SamplingParams(max_tokens=400, seed=seed)),
        range(8),
    )
    ended = [result for result in results if result.finish_reason == "stop"]
    assert ended
    assert all(result.token_ids[-1] == end and result.stop_reason is None for result in ended)
    assert all(end not in result.token_ids[:-1] for result in results)


async def test_a_stop_text_ends_the_call(generator, models):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(models.first)
    sampling = {"max_tokens": 40, "seed": 5, "ignore_eos": True}
    free = await generator.generate(PROMPT, SamplingParams(**sampling))
    place, stop = next(
        (place, text)
        for place in range(3, 40)
        if (text := tokenizer.decode(free.token_ids[place])).isascii()
        and text.isalnum()
        and text not in tokenizer.decode(free.token_ids[:place])
    )

    result = await generator.generate(PROMPT, SamplingParams(**sampling, stop=(stop,)))

    assert result.token_ids == free.token_ids[: place + 1]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


async def test_tokens_are_told_as_they_are_sampled(generator):
    told = []
    result = await generator.generate(
        PROMPT,
        SamplingParams(max_tokens=16, seed=1, ignore_eos=True),
        on_token=lambda token_id, logprob: told.append((token_id, logprob)),
    )
    assert told == list(zip(result.token_ids, result.logprobs, strict=True))
    assert result.weight_versions == [WeightSpan("0", 0, 16)]


async def test_cancelling_a_call_frees_its_place(generator):
    started = anyio.Event()

    async def ask(_):
        long = SamplingParams(max_tokens=500, ignore_eos=True)
        await ask_for_ever(generator, long, lambda *_: started.set())

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for index in range(4):
                group.start_soon(ask, index)
            await started.wait()
            assert generator.num_running == 4
            group.cancel_scope.cancel()
        await until(lambda: not generator.num_running)
    # The engine has room again, and nothing of the four is left in it.
    result = await generator.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(result.token_ids) == 2


async def test_an_error_of_the_callback_reaches_the_caller_and_frees_the_place(generator):
    def refuse(token_id, logprob):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        await generator.generate(
            PROMPT, SamplingParams(max_tokens=400, ignore_eos=True), on_token=refuse
        )
    await until(lambda: not generator.num_running)


async def test_a_second_engine_beside_it_gives_raw_log_probabilities_and_closes_with_abort(
    generator, models, first
):
    from gymrl.generation.vllm import VllmGenerator

    other, _ = await anyio.to_thread.run_sync(
        VllmGenerator.load, engine_config(models.first, logprobs_mode="raw")
    )
    cooled = SamplingParams(max_tokens=48, temperature=0.5, top_p=0.8, ignore_eos=True)
    result = await other.generate(PROMPT, cooled)
    errors = first.errors(PROMPT, result, cooled, "raw")
    assert max(errors) < MAX_TOLERANCE
    assert max(first.errors(PROMPT, result, cooled, "processed")) > 0.1

    started = anyio.Event()
    results = []

    async def ask(max_tokens):
        # Again and again: the engine may be done with a call before its first token is here.
        with contextlib.suppress(GenerationError):
            while True:
                sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
                results.append(
                    await other.generate(PROMPT, sampling, on_token=lambda *_: started.set())
                )

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for max_tokens in (500, 430, 310):
                group.start_soon(ask, max_tokens)
            await started.wait()
            await other.close()
            await other.close()
    aborted = [result for result in results if result.finish_reason == "abort"]
    assert 0 < max(len(result.token_ids) for result in aborted) < 500
    assert not other.is_running
    with pytest.raises(WeightUpdateError, match="closed"):
        await other.update_weights(DirectoryWeights(path=models.second), "1")
    with pytest.raises(GenerationError, match="closed"):
        await other.generate(PROMPT, SamplingParams())
    # The first engine never noticed.
    again = await generator.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(again.token_ids) == 4


async def test_the_batch_face_equals_one_call_after_the_other(generator):
    prompts = [[*PROMPT, *range(10, 10 + n)] for n in range(4)]
    width = max(map(len, prompts))
    batch = {
        "input_ids": torch.tensor([p + [0] * (width - len(p)) for p in prompts]),
        "input_lengths": torch.tensor([len(p) for p in prompts]),
        "seeds": [3, 4, 5, 6],
        "max_new_tokens": [12, 3, 12, 600],
        "stop_strings": [None, None, ["e"], None],
    }
    sampling = SamplingParams(temperature=0.9, top_p=0.95)
    singles = [
        await generator.generate(
            prompt,
            SamplingParams(
                temperature=0.9,
                top_p=0.95,
                seed=batch["seeds"][i],
                max_tokens=batch["max_new_tokens"][i],
                stop=tuple(batch["stop_strings"][i] or ()),
            ),
        )
        for i, prompt in enumerate(prompts)
    ]
    async with BlockingPortal() as portal:
        policy = BatchGenerator(generator, pad_token_id=0, sampling=sampling, portal=portal)
        whole = await anyio.to_thread.run_sync(policy.generate, batch)
    policy = BatchGenerator(generator, pad_token_id=0, sampling=sampling)
    streamed = {sample: output async for sample, output in policy.generate_async(batch)}

    assert verify_right_padding(whole) == (True, None)
    for i, (prompt, single) in enumerate(zip(prompts, singles, strict=True)):
        total = len(prompt) + len(single.token_ids)
        expected = [0.0] * len(prompt) + single.logprobs
        assert whole["output_ids"][i, :total].tolist() == prompt + single.token_ids
        assert whole["logprobs"][i, :total].tolist() == pytest.approx(expected, abs=1e-4)
        assert whole["logprobs"][i, total:].count_nonzero() == 0
        assert whole["truncated"][i] == (single.finish_reason == "length")
        assert whole["weight_versions"][i] == single.weight_versions
        assert streamed[i]["output_ids"].tolist() == [prompt + single.token_ids]


async def test_leaving_a_streamed_batch_frees_the_engine(generator):
    batch = {
        "input_ids": torch.tensor([PROMPT] * 3),
        "input_lengths": torch.tensor([len(PROMPT)] * 3),
        "max_new_tokens": [1, 480, 480],
    }
    policy = BatchGenerator(
        generator, pad_token_id=0, sampling=SamplingParams(ignore_eos=True, seed=0)
    )
    stream = policy.generate_async(batch)
    sample, _ = await anext(stream)
    await stream.aclose()

    assert sample == 0
    await until(lambda: generator.num_running == 0)
