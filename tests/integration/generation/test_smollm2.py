"""A real small model, fetched from the package registry and converted: slow, and few."""

import pytest

from gymrl.concurrency import gather_bounded
from gymrl.config import GenerationConfig, SamplingParams
from gymrl.generation.chat import ChatFormat
from gymrl.generation.fidelity import RecordedSequence, check_fidelity
from gymrl.generation.models import resolve_model
from gymrl.generation.transformers import TransformersGenerator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def directory() -> str:
    return resolve_model("smollm2")


async def test_it_answers_a_question_and_ends_its_turn(directory):
    config = GenerationConfig(model=directory, max_batch_size=4, num_threads=1)
    generator, tokenizer = TransformersGenerator.load(config)
    chat = ChatFormat(tokenizer, end_ids=tuple(generator.end_ids))
    prompt = chat.render([{"role": "user", "content": "What is the capital of France?"}])
    result = await generator.generate(prompt, SamplingParams(temperature=0, max_tokens=24))
    await generator.close()
    assert "Paris" in chat.decode(result.token_ids)
    assert result.finish_reason == "stop"
    assert tokenizer.decode(result.token_ids[-1:]) == "<|im_end|>"


async def test_what_it_samples_in_a_batch_agrees_with_a_plain_forward_pass(directory):
    config = GenerationConfig(model=directory, max_batch_size=4, num_threads=1)
    generator, tokenizer = TransformersGenerator.load(config)
    chat = ChatFormat(tokenizer, end_ids=tuple(generator.end_ids))
    questions = ["What is 3 + 4?", "Name a colour.", "Write a sentence about a cat.", "Hi"]
    sampling = SamplingParams(temperature=0.7, max_tokens=16)
    prompts = [chat.render([{"role": "user", "content": text}]) for text in questions]
    results = await gather_bounded(lambda ids: generator.generate(ids, sampling), prompts)
    sequences = [
        RecordedSequence.of_call(prompt, result.token_ids, result.logprobs, sampling)
        for prompt, result in zip(prompts, results, strict=True)
    ]
    report = check_fidelity(generator.model, sequences)
    await generator.close()
    assert report.agrees(), report


def test_its_tokenizer_gives_text_back_and_splits_digits(directory):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    text = "héllo 日本語 🤗 1234\n\tdef f(x):            3"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("1234")) == 4
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]
