"""Images for a vLLM server by URL: it is sent the placeholders and the files, and says what it made."""

import anyio.to_thread
import pytest
import pytest_asyncio
import torch

from gymrl.config import MediaConfig, SamplingParams, VllmConfig
from gymrl.generation.chat import ChatFormat
from gymrl.generation.checkpoints import load_tokenizer
from gymrl.generation.fidelity import MAX_TOLERANCE, MEAN_TOLERANCE
from gymrl.generation.image_inputs import load_image_reader
from gymrl.generation.policy import Policy
from gymrl.generation.requests import ResponsesRequest, convert
from gymrl.generation.responses_api import conversation_of
from gymrl.generation.vllm_http import RemoteVllmGenerator
from gymrl.testing import build_image_uri, build_tiny_vision_model
from tests.integration.vllm.engines import engine_config
from tests.integration.vllm.servers import Servers, ready
from tests.integration.vllm.vision import SMALL, TALL, VisionReference

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SAMPLING = SamplingParams(max_tokens=16, ignore_eos=True, seed=4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.set_num_threads(1)
    return build_tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(directory, _vllm_can_run):
    servers = Servers(str(directory), ["--enable-scale-out"])
    try:
        servers.start(0)
        await ready(servers.ports[0])
        yield servers
    finally:
        await anyio.to_thread.run_sync(servers.end)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def policy(directory, servers):
    tokenizer, end_ids = load_tokenizer(str(directory))
    config = engine_config(
        str(directory), vllm=VllmConfig(base_urls=servers.urls), media=MediaConfig()
    )
    generator = await RemoteVllmGenerator.connect(config.vllm, end_ids)
    chat = ChatFormat(tokenizer, end_ids=end_ids)
    try:
        yield Policy(generator, chat, images=load_image_reader(config, chat))
    finally:
        await generator.close()


async def asked(policy, items, on_token=None):
    request = convert({"input": items}, ResponsesRequest)
    conversation = await policy.images.read(conversation_of(request))
    prompt_ids = await policy.prompt(conversation)
    return await policy.sample(prompt_ids, conversation, SAMPLING, on_token)


class Hearer:
    """Remembers the tokens of a stream."""

    def __init__(self, told: list[int]) -> None:
        self.told = told

    def __call__(self, token_id: int, logprob: float) -> None:
        self.told.append(token_id)


def question(*images):
    content = [{"type": "input_image", "image_url": build_image_uri(*image)} for image in images]
    return {"role": "user", "content": [{"type": "input_text", "text": "what is "}, *content]}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_turns_with_images_are_token_exact(policy, directory, is_streamed):
    reference = VisionReference(directory)
    items, shown, kept = [], [], []
    errors = []
    for images in ([SMALL], [], [TALL, SMALL]):
        told: list[int] = []
        items.append(question(*images))
        shown += images
        hear = Hearer(told) if is_streamed else None
        completion = await asked(policy, items, hear)
        prompt_ids, generated = completion.prompt_ids, completion.generated
        assert prompt_ids[: len(kept)] == kept
        assert told == (generated.token_ids if is_streamed else [])
        expected = reference.logprobs(prompt_ids, generated.token_ids, shown)
        errors += [abs(a - b) for a, b in zip(generated.logprobs, expected, strict=True)]
        kept = [*prompt_ids, *generated.token_ids]
        items.append(
            {
                "role": "assistant",
                "content": completion.parsed.content,
                "prompt_token_ids": prompt_ids,
                "generation_token_ids": generated.token_ids,
            }
        )
    assert sum(errors) / len(errors) < MEAN_TOLERANCE
    assert max(errors) < MAX_TOLERANCE
