"""Images over a real engine: what the model was shown is what the tokens and log-probabilities say."""

import io
from typing import Any

import aiohttp
import anyio.to_thread
import msgspec
import pytest
import pytest_asyncio
import torch
import transformers
from PIL import Image

from gymrl.config import MediaConfig
from gymrl.generation.chat import ChatFormat
from gymrl.generation.fidelity import MAX_TOLERANCE, MEAN_TOLERANCE
from gymrl.generation.image_inputs import load_image_reader
from gymrl.generation.images import ImageGenerator
from gymrl.generation.policy import Policy
from gymrl.generation.server import GenerationServer
from gymrl.generation.weights import DirectoryWeights
from gymrl.testing import build_image, build_image_uri, build_tiny_vision_model
from tests.integration.vllm.engines import engine_config

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

SMALL = (56, 84, 1)
TALL = (56, 112, 2)
"""Width, height and seed of two images: 6 and 8 tokens."""


class VisionReference:
    """A vision-language model in transformers, and what it says about given tokens."""

    def __init__(self, directory) -> None:
        self.processor = transformers.AutoProcessor.from_pretrained(directory)
        self.load(directory)

    def load(self, directory) -> None:
        model = transformers.AutoModelForImageTextToText.from_pretrained(directory)
        self.model = model.float().eval()

    def prompt_ids(self, messages: list[dict[str, Any]], images) -> list[int]:
        text = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        inputs = self.processor(text=[text], images=pictures(images) or None)
        return inputs["input_ids"][0]

    @torch.inference_mode()
    def logprobs(self, prompt_ids, token_ids, images) -> list[float]:
        ids = torch.tensor([[*prompt_ids, *token_ids]])
        is_image = (ids == self.model.config.image_token_id).int()
        shown = {}
        if images:
            pixels = self.processor.image_processor(images=pictures(images), return_tensors="pt")
            shown = {**pixels, "mm_token_type_ids": is_image}
        logits = self.model(input_ids=ids, **shown).logits[0, len(prompt_ids) - 1 : -1]
        chosen = torch.log_softmax(logits, -1)[range(len(token_ids)), list(token_ids)]
        return chosen.tolist()

    def errors(self, answer: dict[str, Any], images) -> list[float]:
        """Of the log-probabilities of an answer's last item."""
        item = answer["output"][-1]
        expected = self.logprobs(item["prompt_token_ids"], item["generation_token_ids"], images)
        recorded = item["generation_log_probs"]
        return [abs(a - b) for a, b in zip(recorded, expected, strict=True)]


def pictures(images):
    return [Image.open(io.BytesIO(build_image(*image))) for image in images]


class Served:
    """A vision-language model behind the server, and what asks it."""

    def __init__(self, generator, policy, reader, session, base_url, directory) -> None:
        self.generator = generator
        self.policy = policy
        self.reader = reader
        self.directory = directory
        self._session = session
        self._base_url = base_url

    async def post(self, path: str, **body) -> tuple[int, Any]:
        async with self._session.post(self._base_url + path, data=msgspec.json.encode(body)) as got:
            return got.status, await got.json()

    async def respond(self, items, **body) -> dict[str, Any]:
        settings = {"max_output_tokens": 12, "seed": 3, "ignore_eos": True, **body}
        status, answer = await self.post("/responses", input=items, **settings)
        assert status == 200, answer
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory, _vllm_can_run):
    from gymrl.generation.vllm import VllmGenerator

    directory = build_tiny_vision_model(tmp_path_factory.mktemp("vision"))
    config = engine_config(str(directory), media=MediaConfig(max_images_per_row=3))
    generator, tokenizer = await anyio.to_thread.run_sync(VllmGenerator.load, config)
    chat = ChatFormat.from_config(tokenizer, config, tuple(generator.end_ids))
    reader = load_image_reader(config, chat)
    policy = Policy(generator, chat, images=reader)
    server = GenerationServer(policy)
    base_url = await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Served(generator, policy, reader, session, base_url, directory)
    finally:
        await server.close()
        await generator.close()


@pytest.fixture(scope="module")
def reference(served):
    torch.set_num_threads(1)
    return VisionReference(served.directory)


def text(words: str) -> dict[str, Any]:
    return {"type": "input_text", "text": words}


def image(shape) -> dict[str, Any]:
    return {"type": "input_image", "image_url": build_image_uri(*shape), "detail": "auto"}


def user(*content) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def tokens_of(answer: dict[str, Any]) -> tuple[list[int], list[int]]:
    item = answer["output"][-1]
    return item["prompt_token_ids"], item["generation_token_ids"]


def check(errors: list[float]) -> None:
    assert sum(errors) / len(errors) < MEAN_TOLERANCE
    assert max(errors) < MAX_TOLERANCE


async def test_a_prompt_holds_the_tokens_that_its_images_have_for_the_model(served, reference):
    assert isinstance(served.generator, ImageGenerator)
    answer = await served.respond([user(text("what is "), image(SMALL), text(" or "), image(TALL))])

    prompt_ids, _ = tokens_of(answer)
    content = [
        {"type": "text", "text": "what is "},
        {"type": "image"},
        {"type": "text", "text": " or "},
        {"type": "image"},
    ]
    messages = [{"role": "user", "content": content}]
    assert prompt_ids == reference.prompt_ids(messages, [SMALL, TALL])
    assert prompt_ids.count(reference.model.config.image_token_id) == 6 + 8
    assert answer["usage"]["input_tokens"] == len(prompt_ids)
    check(reference.errors(answer, [SMALL, TALL]))
