import anyio
import pytest

from gymrl.config import SamplingParams
from gymrl.errors import ContextOverflowError, GenerationError
from gymrl.generation.base import Generated, Generator
from gymrl.testing import ScriptedGenerator, build_tiny_model

ANSWER = Generated(token_ids=[5, 6, 7], logprobs=[-0.1, -0.2, -0.3], finish_reason="stop")


def test_it_is_a_generator():
    assert isinstance(ScriptedGenerator([]), Generator)


async def test_answers_come_in_order_and_calls_are_recorded():
    generator = ScriptedGenerator([ANSWER, [9]])
    assert await generator.generate([1], SamplingParams(seed=3)) == ANSWER
    second = await generator.generate([1, 5, 6, 7, 2], SamplingParams())
    assert (second.token_ids, second.logprobs) == ([9], [-0.5])
    assert [call.prompt_ids for call in generator.calls] == [[1], [1, 5, 6, 7, 2]]
    assert generator.calls[0].sampling.seed == 3


async def test_a_script_that_is_used_up_is_an_error():
    with pytest.raises(GenerationError, match="no answer for call 1"):
        await ScriptedGenerator([]).generate([1], SamplingParams())


async def test_a_function_answers_by_the_prompt():
    async def answer(prompt_ids, sampling):
        return Generated(token_ids=prompt_ids[-1:], logprobs=[-1.0], finish_reason="stop")

    assert (await ScriptedGenerator(answer).generate([4, 8], SamplingParams())).token_ids == [8]


async def test_an_answer_is_cut_to_the_budget():
    generator = ScriptedGenerator([ANSWER, ANSWER], max_model_len=10)
    cut = await generator.generate([1], SamplingParams(max_tokens=2))
    assert (cut.token_ids, cut.finish_reason) == ([5, 6], "length")
    with pytest.raises(ContextOverflowError):
        await generator.generate([1] * 10, SamplingParams())


async def test_tokens_are_delivered():
    seen = []
    await ScriptedGenerator([ANSWER]).generate(
        [1], SamplingParams(), on_token=lambda token_id, logprob: seen.append((token_id, logprob))
    )
    assert seen == [(5, -0.1), (6, -0.2), (7, -0.3)]


async def test_a_cancelled_call_is_counted():
    async def never(prompt_ids, sampling):
        await anyio.sleep_forever()

    generator = ScriptedGenerator(never)
    with anyio.move_on_after(0.01):
        await generator.generate([1], SamplingParams())
    assert generator.cancelled == 1


async def test_a_closed_generator_refuses_calls():
    generator = ScriptedGenerator([ANSWER])
    await generator.close()
    with pytest.raises(GenerationError, match="closed"):
        await generator.generate([1], SamplingParams())


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_tiny_models_are_the_same_for_the_same_seed(tmp_path, architecture):
    import torch
    from safetensors.torch import load_file

    before = torch.random.get_rng_state()
    first, again, other = [
        load_file(
            build_tiny_model(tmp_path / str(i), architecture=architecture, seed=seed)
            / "model.safetensors"
        )
        for i, seed in enumerate([5, 5, 6])
    ]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(torch.random.get_rng_state(), before)
