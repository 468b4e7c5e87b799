"""What the tests of this folder share: the models, what transformers says of them, a configuration."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import anyio
import torch
import transformers

from gymrl.config import GenerationConfig, LogprobsMode, SamplingParams, VllmConfig
from gymrl.generation.base import Generated, Generator
from gymrl.generation.sampling import sampled_logprob

PROMPT = [1, 80, 81, 2]


class Models(NamedTuple):
    """Directories of two models of one shape."""

    first: str
    second: str


class Reference:
    """A model in transformers, and what it says about given tokens."""

    def __init__(self, directory: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def logprobs(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        sampling: SamplingParams,
        mode: LogprobsMode = "processed",
    ) -> list[float]:
        ids = torch.tensor([[*prompt, *token_ids]])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1]
        tokens = torch.tensor(list(token_ids))
        return sampled_logprob(logits, tokens, [sampling] * len(tokens), mode).tolist()

    def errors(
        self,
        prompt: Sequence[int],
        generated: Generated,
        sampling: SamplingParams,
        mode: LogprobsMode = "processed",
    ) -> list[float]:
        expected = self.logprobs(prompt, generated.token_ids, sampling, mode)
        return [abs(a - b) for a, b in zip(generated.logprobs, expected, strict=True)]


def engine_config(model: str, **changes) -> GenerationConfig:
    settings = {
        "model": model,
        "backend": "vllm",
        "max_model_len": 512,
        "num_threads": 1,
        "vllm": VllmConfig(kv_cache_bytes=32 << 20),
    }
    return GenerationConfig(**{**settings, **changes})


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for is in another process
            await anyio.sleep(0.01)


async def ask_for_ever(generator: Generator, sampling: SamplingParams, on_token=None) -> NoReturn:
    """One call after the other, so that one is always in flight.

    An engine does not wait for us: it may be done with a call before its first token is here.
    """
    while True:
        await generator.generate(PROMPT, sampling, on_token=on_token)
