import asyncio
import threading

import anyio
import anyio.lowlevel
import pytest
import torch

from gymrl.concurrency import gather_bounded
from gymrl.config import GenerationConfig, SamplingParams
from gymrl.errors import (
    BadLogprobsError,
    ConfigError,
    ContextOverflowError,
    GenerationError,
    GenerationRequestError,
)
from gymrl.generation.base import Generator
from gymrl.generation.model_loading import load_model
from gymrl.generation.transformers import TransformersGenerator

PROMPT = [1, 40, 50, 60, 2, 70]


@pytest.fixture
async def make_generator(tiny_model):
    made = []

    def make(model=tiny_model, **settings) -> TransformersGenerator:
        generator = TransformersGenerator(model, **{"end_ids": [], **settings})
        made.append(generator)
        return generator

    yield make
    for generator in made:
        await generator.close()


def plain_logprobs(model, prompt: list[int], token_ids: list[int]) -> list[float]:
    ids = torch.tensor([prompt + token_ids])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(ids).logits, -1)
    columns = torch.arange(len(prompt) - 1, ids.shape[1] - 1)
    return logprobs[0, columns, ids[0, len(prompt) :]].tolist()


async def until(condition) -> None:
    for _ in range(10_000):
        if condition():
            return
        await anyio.sleep(0.001)
    raise AssertionError("the generator did not get there within 10 s")


class Gate(torch.nn.Module):
    """A model that waits for permission before every forward pass."""

    def __init__(self, model) -> None:
        super().__init__()
        self.inner = model
        self.config = model.config
        self.device = model.device
        self.entered = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)
        self.batch_sizes: list[int] = []
        self.error: Exception | None = None

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, input_ids, **arguments):
        self.batch_sizes.append(input_ids.shape[0])
        self.entered.release()
        self.permits.acquire()
        if self.error is not None:
            raise self.error
        return self.inner(input_ids, **arguments)

    def open(self) -> None:
        for _ in range(10_000):
            self.permits.release()


@pytest.fixture
def gate(tiny_model):
    gate = Gate(tiny_model)
    yield gate
    gate.open()


async def test_it_is_a_generator(make_generator):
    assert isinstance(make_generator(), Generator)


async def test_log_probabilities_are_those_of_a_plain_forward_pass(make_generator, tiny_model):
    result = await make_generator().generate(PROMPT, SamplingParams(max_tokens=30, seed=1))
    assert len(result.token_ids) == 30
    assert result.finish_reason == "length"
    expected = plain_logprobs(tiny_model, PROMPT, result.token_ids)
    assert result.logprobs == pytest.approx(expected, abs=1e-4)


async def test_requests_that_come_and_go_get_what_they_would_get_alone(make_generator, tiny_model):
    alone, together = make_generator(max_batch_size=1), make_generator(max_batch_size=5)
    prompts = [PROMPT[: 1 + i % 6] * (1 + i % 4) for i in range(24)]
    samplings = [
        SamplingParams(max_tokens=3 + 5 * (i % 7), seed=i, temperature=[1.0, 0.7, 0.0][i % 3])
        for i in range(24)
    ]
    calls = list(zip(prompts, samplings, strict=True))
    crowded = await gather_bounded(lambda call: together.generate(*call), calls)
    single = [await alone.generate(*call) for call in calls]
    for one, other in zip(crowded, single, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_batch_size_one_is_exactly_repeatable_under_load(make_generator):
    generator = make_generator(max_batch_size=1)
    sampling = SamplingParams(max_tokens=12, seed=9)
    first = await generator.generate(PROMPT, sampling)
    crowd = await gather_bounded(lambda _: generator.generate(PROMPT, sampling), range(8))
    assert all(result == first for result in crowd)


async def test_different_seeds_give_different_tokens(make_generator):
    generator = make_generator()
    first, second = [
        await generator.generate(PROMPT, SamplingParams(max_tokens=12, seed=seed))
        for seed in (1, 2)
    ]
    assert first.token_ids != second.token_ids


async def test_negative_and_huge_seeds_are_accepted(make_generator):
    generator = make_generator()
    for seed in (-1, 2**70):
        sampling = SamplingParams(max_tokens=5, seed=seed)
        once, again = [await generator.generate(PROMPT, sampling) for _ in range(2)]
        assert once == again


async def test_equal_prompts_that_arrive_together_are_prefilled_once(make_generator, gate):
    generator = make_generator(gate, max_batch_size=8)
    async with anyio.create_task_group() as group:
        group.start_soon(generator.generate, PROMPT, SamplingParams(max_tokens=1, seed=0))
        await anyio.to_thread.run_sync(gate.entered.acquire)
        for seed in range(4):
            group.start_soon(generator.generate, PROMPT, SamplingParams(max_tokens=2, seed=seed))
        await until(lambda: generator.num_waiting >= 4)
        gate.open()
    assert gate.batch_sizes == [1, 1, 4]


async def test_requests_that_all_end_with_their_first_token_leave_nothing_to_merge(make_generator):
    results = await gather_bounded(
        lambda seed: make_generator().generate(PROMPT, SamplingParams(max_tokens=1, seed=seed)),
        range(3),
    )
    assert [len(result.token_ids) for result in results] == [1, 1, 1]


async def test_an_end_of_turn_token_stops_and_is_part_of_the_sample(make_generator):
    sampling = SamplingParams(max_tokens=20, temperature=0)
    free = await make_generator().generate(PROMPT, sampling)
    end = free.token_ids[4]
    place = free.token_ids.index(end)
    stopped = await make_generator(end_ids=[9999, end]).generate(PROMPT, sampling)
    assert stopped.token_ids == free.token_ids[: place + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)


async def test_ignore_eos_samples_on(make_generator):
    sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    free = await make_generator().generate(PROMPT, sampling)
    result = await make_generator(end_ids=[free.token_ids[4]]).generate(PROMPT, sampling)
    assert result.token_ids == free.token_ids


async def test_a_stop_token_is_named_as_the_reason(make_generator):
    free = await make_generator().generate(PROMPT, SamplingParams(max_tokens=8, temperature=0))
    stop = free.token_ids[3]
    sampling = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(stop,))
    result = await make_generator().generate(PROMPT, sampling)
    assert result.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)


async def test_a_stop_text_that_spans_tokens_is_found(make_generator, tiny_tokenizer):
    generator = make_generator(detokenize=tiny_tokenizer.decode)
    sampling = SamplingParams(max_tokens=60, temperature=0)
    free = await generator.generate(PROMPT, sampling)
    pieces = [tiny_tokenizer.decode([token_id]) for token_id in free.token_ids]
    first = next(
        i
        for i in range(2, 58)
        if pieces[i].isascii() and pieces[i + 1].isascii() and pieces[i] and pieces[i + 1]
    )
    stop = pieces[first] + pieces[first + 1]
    sampling = SamplingParams(max_tokens=60, temperature=0, stop=("never", stop))
    result = await generator.generate(PROMPT, sampling)
    assert result.stop_reason == stop
    assert stop in tiny_tokenizer.decode(result.token_ids)
    assert stop not in tiny_tokenizer.decode(result.token_ids[:-1])


async def test_the_budget_is_clamped_to_what_the_context_leaves(make_generator):
    generator = make_generator(max_model_len=10)
    result = await generator.generate(PROMPT, SamplingParams(max_tokens=100))
    assert len(result.token_ids) == 4
    assert result.finish_reason == "length"


async def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(make_generator):
    with pytest.raises(ContextOverflowError, match=r"6 tokens.*6 tokens") as caught:
        await make_generator(max_model_len=6).generate(PROMPT, SamplingParams())
    assert (caught.value.prompt_tokens, caught.value.max_model_len) == (6, 6)


@pytest.mark.parametrize("bad", [-1, 484, 10**9])
async def test_ids_outside_the_vocabulary_are_refused_with_their_position(make_generator, bad):
    with pytest.raises(GenerationRequestError, match=f"token {bad} at position 2") as caught:
        await make_generator().generate([1, 2, bad], SamplingParams())
    assert caught.value.position == 2


async def test_an_empty_prompt_is_refused(make_generator):
    with pytest.raises(GenerationRequestError, match="no token"):
        await make_generator().generate([], SamplingParams())


async def test_cancelling_frees_the_place_before_the_next_step(make_generator, gate):
    generator = make_generator(gate, max_batch_size=1)
    async with anyio.create_task_group() as group:
        group.start_soon(generator.generate, PROMPT, SamplingParams(max_tokens=1000))
        await anyio.to_thread.run_sync(gate.entered.acquire)
        group.cancel_scope.cancel()
    gate.open()
    result = await generator.generate(PROMPT, SamplingParams(max_tokens=2))
    assert len(result.token_ids) == 2
    # One pass of the cancelled request, then prefill and one step of the next.
    assert len(gate.batch_sizes) == 3


async def test_cancelling_a_waiting_request_never_runs_it(make_generator, gate):
    generator = make_generator(gate, max_batch_size=1)
    async with anyio.create_task_group() as group:
        group.start_soon(generator.generate, PROMPT, SamplingParams(max_tokens=1))
        await anyio.to_thread.run_sync(gate.entered.acquire)
        with anyio.move_on_after(0.05):
            await generator.generate(PROMPT, SamplingParams(max_tokens=1))
        gate.open()
    assert len(gate.batch_sizes) == 1


async def test_the_event_loop_runs_on_while_the_model_works(make_generator, gate):
    generator = make_generator(gate)
    async with anyio.create_task_group() as group:
        group.start_soon(generator.generate, PROMPT, SamplingParams(max_tokens=1))
        await anyio.to_thread.run_sync(gate.entered.acquire)
        ticks = 0
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
            ticks += 1
        gate.open()
    assert ticks == 100


async def test_closing_aborts_what_runs_and_what_waits(make_generator, gate):
    generator = make_generator(gate, max_batch_size=1)
    results = {}

    async def call(name: str) -> None:
        results[name] = await generator.generate(PROMPT, SamplingParams(max_tokens=500))

    async with anyio.create_task_group() as group:
        group.start_soon(call, "running")
        await anyio.to_thread.run_sync(gate.entered.acquire)
        group.start_soon(call, "waiting")
        await until(lambda: generator.num_waiting >= 1)
        gate.permits.release()
        await anyio.to_thread.run_sync(gate.entered.acquire)
        group.start_soon(generator.close)
        await anyio.sleep(0.01)
        gate.permits.release()
    assert results["running"].finish_reason == "abort"
    assert 1 <= len(results["running"].token_ids) < 500
    assert results["waiting"].finish_reason == "abort"
    assert results["waiting"].token_ids == []


async def test_a_closed_generator_refuses_calls_and_closes_again(make_generator):
    generator = make_generator()
    await generator.close()
    await generator.close()
    assert not generator.is_running
    with pytest.raises(GenerationError, match="closed"):
        await generator.generate(PROMPT, SamplingParams())


async def test_an_error_in_the_thread_reaches_every_request_and_the_next_one_works(
    make_generator, gate, caplog
):
    generator = make_generator(gate, max_batch_size=2)
    gate.error = MemoryError("out of memory")
    errors = []

    async def call() -> None:
        with pytest.raises(GenerationError, match="MemoryError: out of memory") as caught:
            await generator.generate(PROMPT, SamplingParams(max_tokens=3))
        errors.append(caught.value)

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(call)
        await anyio.to_thread.run_sync(gate.entered.acquire)
        await until(lambda: generator.num_waiting + generator.num_running >= 4)
        gate.open()
    assert len(errors) == 4
    assert all(isinstance(error.__cause__, MemoryError) for error in errors)
    gate.error = None
    result = await generator.generate(PROMPT, SamplingParams(max_tokens=3))
    assert len(result.token_ids) == 3


async def test_weights_that_are_not_numbers_fail_the_request_with_a_typed_error(
    make_generator, tiny_model
):
    class Broken(Gate):
        def forward(self, input_ids, **arguments):
            outputs = self.inner(input_ids, **arguments)
            if input_ids.shape[0] == 1 and input_ids[0, 0] == 77:
                outputs.logits.fill_(float("nan"))
            return outputs

    generator = make_generator(Broken(tiny_model))
    with pytest.raises(BadLogprobsError, match="check the weights"):
        await generator.generate([77], SamplingParams())
    assert (await generator.generate([78], SamplingParams(max_tokens=1))).token_ids


async def test_tokens_are_delivered_in_order_before_the_result(make_generator):
    seen: list[tuple[int, float]] = []
    result = await make_generator().generate(
        PROMPT,
        SamplingParams(max_tokens=7),
        on_token=lambda token_id, logprob: seen.append((token_id, logprob)),
    )
    assert seen == list(zip(result.token_ids, result.logprobs, strict=True))


async def test_raw_mode_reports_the_models_own_log_probabilities(make_generator, tiny_model):
    sampling = SamplingParams(max_tokens=10, temperature=0.5, top_k=20, seed=3)
    raw = await make_generator(logprobs_mode="raw").generate(PROMPT, sampling)
    expected = plain_logprobs(tiny_model, PROMPT, raw.token_ids)
    assert raw.logprobs == pytest.approx(expected, abs=1e-4)
    processed = await make_generator().generate(PROMPT, sampling)
    assert processed.token_ids == raw.token_ids
    assert processed.logprobs != pytest.approx(expected, abs=1e-2)


def test_two_event_loops_may_share_a_generator(tiny_model):
    generator = TransformersGenerator(tiny_model, end_ids=[])
    sampling = SamplingParams(max_tokens=3, seed=1)
    first = asyncio.run(generator.generate(PROMPT, sampling))
    assert asyncio.run(generator.generate(PROMPT, sampling)) == first
    asyncio.run(generator.close())


def test_a_context_longer_than_the_models_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="max_model_len=4096: the model's own context is 2048"):
        TransformersGenerator(tiny_model, max_model_len=4096)


async def test_every_end_of_turn_token_of_the_generation_config_ends_a_turn(tiny_directory):
    generator, tokenizer = TransformersGenerator.load(GenerationConfig(model=str(tiny_directory)))
    try:
        assert generator.end_ids == {tokenizer.eos_token_id}
        generator.model.generation_config.eos_token_id = [2, 17]
        several = TransformersGenerator(generator.model)
        assert several.end_ids == {2, 17}
        await several.close()
    finally:
        await generator.close()


def test_asking_for_a_gpu_gives_one_or_names_the_setting(tiny_directory):
    config = GenerationConfig(model=str(tiny_directory), device="cuda")
    if torch.cuda.is_available():
        assert load_model(str(tiny_directory), config).device.type == "cuda"
    else:
        with pytest.raises(ConfigError, match="device='cuda'"):
            load_model(str(tiny_directory), config)


def test_a_directory_without_weights_is_a_configuration_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="can't be loaded"):
        load_model(str(tmp_path), GenerationConfig(model=str(tmp_path)))


@pytest.mark.parametrize("token_id", [-1, 100_000])
async def test_a_stop_token_that_can_never_come_is_refused(make_generator, token_id):
    """A mistyped id let every answer run to its limit."""
    sampling = SamplingParams(max_tokens=3, stop_token_ids=(5, token_id))
    with pytest.raises(GenerationRequestError, match=f"token {token_id} is ") as caught:
        await make_generator().generate([5, 6], sampling)
    assert caught.value.param == "stop_token_ids"
