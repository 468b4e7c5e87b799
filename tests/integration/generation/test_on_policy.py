"""The tokens that come back are the tokens that were sampled, and their log-probabilities agree."""

import anyio
import pytest

from gymrl.config import SamplingParams
from gymrl.generation.fidelity import RecordedSequence, check_fidelity

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


async def conversation(client, opening: str, sampling: SamplingParams, turns: int):
    """Several turns over HTTP, as an agent has them; every call's token fields."""
    items = [{"role": "user", "content": opening}]
    calls = []
    for turn in range(turns):
        answer = await client.ok(
            "/responses",
            input=items,
            tools=[TOOL],
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_output_tokens=sampling.max_tokens,
            seed=None if sampling.seed is None else sampling.seed + turn,
        )
        last = answer["output"][-1]
        calls.append(
            (
                last["prompt_token_ids"],
                last["generation_token_ids"],
                last["generation_log_probs"],
            )
        )
        items = [*items, *answer["output"], {"role": "user", "content": f"and {turn}?"}]
    return calls


def assert_contiguous(calls) -> None:
    seen: list[int] = []
    for prompt, sampled, _ in calls:
        assert prompt[: len(seen)] == seen
        seen = prompt + sampled


def recorded(calls, sampling: SamplingParams) -> RecordedSequence:
    """The whole conversation as one sequence: each token once."""
    sequence: list[int] = []
    logprobs: list[float] = []
    mask: list[bool] = []
    for prompt, sampled, values in calls:
        added = prompt[len(sequence) :]
        sequence += [*added, *sampled]
        logprobs += [*[0.0] * len(added), *values]
        mask += [*[False] * len(added), *[True] * len(sampled)]
    whole = RecordedSequence.of_call([], sequence, logprobs, sampling)
    whole.mask[:] = mask
    return whole


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("batch_size", "conversations"), [(1, 3), (8, 12)])
@pytest.mark.parametrize("turns", [1, 4])
async def test_recomputed_log_probabilities_agree(
    serve_tiny, temperature, batch_size, conversations, turns
):
    sampling = SamplingParams(temperature=temperature, max_tokens=24)
    finished = []
    async with serve_tiny(max_batch_size=batch_size) as (client, generator):

        async def one(number: int) -> None:
            finished.append(await conversation(client, "hello " * (number + 1), sampling, turns))

        async with anyio.create_task_group() as group:
            for number in range(conversations):
                group.start_soon(one, number)
        for calls in finished:
            assert_contiguous(calls)
        sequences = [recorded(calls, sampling) for calls in finished]
        report = check_fidelity(generator.model, sequences)
    assert report.num_tokens == sum(len(call[1]) for calls in finished for call in calls)
    assert report.num_tokens > 0
    assert report.mean_gap <= 1e-4
    assert report.max_gap <= 1e-3


async def test_filters_and_raw_mode_agree_as_well(serve_tiny):
    sampling = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, max_tokens=24)
    for mode in ("processed", "raw"):
        async with serve_tiny(logprobs_mode=mode) as (client, generator):
            calls = await conversation(client, "hello", sampling, 2)
            assert_contiguous(calls)
            sequence = recorded(calls, sampling)
            assert check_fidelity(generator.model, [sequence], mode=mode).agrees()


async def test_turns_that_end_by_the_models_own_token_are_contiguous_too(serve_tiny):
    async with serve_tiny(max_batch_size=8) as (client, generator):
        endings = set()

        async def one(number: int) -> None:
            sampling = SamplingParams(temperature=2.5, max_tokens=200, seed=10 * number)
            calls = await conversation(client, f"hi {number}", sampling, 2)
            assert_contiguous(calls)
            endings.update(sampled[-1] in generator.end_ids for _, sampled, _ in calls)

        async with anyio.create_task_group() as group:
            for number in range(5):
                group.start_soon(one, number)
    assert endings == {True, False}


async def test_the_same_seed_gives_the_same_conversation_whatever_else_runs(serve_tiny):
    sampling = SamplingParams(max_tokens=16, seed=5)
    async with serve_tiny(max_batch_size=8) as (client, _):
        alone = await conversation(client, "hello", sampling, 3)
        crowd = []

        async def one(opening: str, seed: int) -> None:
            own = SamplingParams(max_tokens=16, seed=seed)
            crowd.append((opening, await conversation(client, opening, own, 3)))

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(one, f"other {number} " * number, 100 + number)
            group.start_soon(one, "hello", 5)
    same = dict(crowd)["hello"]
    assert [call[:2] for call in same] == [call[:2] for call in alone]


async def test_the_chat_api_is_on_policy_as_well(serve_tiny):
    async with serve_tiny() as (client, generator):
        messages = [{"role": "user", "content": "hello"}]
        calls = []
        for turn in range(3):
            answer = await client.ok(
                "/chat/completions", messages=messages, max_tokens=12, seed=turn, logprobs=True
            )
            (choice,) = answer["choices"]
            values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            calls.append((answer["prompt_token_ids"], choice["token_ids"], values))
            messages = [*messages, choice["message"], {"role": "user", "content": "more"}]
        assert_contiguous(calls)
        sequence = recorded(calls, SamplingParams())
        assert check_fidelity(generator.model, [sequence]).agrees()
