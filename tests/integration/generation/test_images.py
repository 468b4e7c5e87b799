"""Images for the embedded generator: alone, among requests of text, and under new weights."""

import json
import re
import shutil

import aiohttp
import pytest
import torch

from gymrl.actors import spawn
from gymrl.addresses import bound_socket
from gymrl.concurrency import gather_bounded
from gymrl.config import GenerationConfig, GymConfig, MediaConfig, SamplingParams
from gymrl.errors import GenerationError, GenerationRequestError
from gymrl.generation.chat import ChatFormat
from gymrl.generation.decode_request import Request
from gymrl.generation.decoding import DecodeBatch
from gymrl.generation.fidelity import MAX_TOLERANCE, MEAN_TOLERANCE
from gymrl.generation.image_inputs import RequestImageReader, load_image_reader
from gymrl.generation.image_tensors import ImageTensors
from gymrl.generation.images import ImageGenerator
from gymrl.generation.ledger import LedgerBook
from gymrl.generation.parsing import ParsedText
from gymrl.generation.policy import Completion, Policy
from gymrl.generation.requests import ResponsesRequest, convert
from gymrl.generation.responses_api import conversation_of
from gymrl.generation.server import GenerationServer
from gymrl.generation.transformers import TransformersGenerator
from gymrl.generation.weight_exchange import copy_weights, read_weights
from gymrl.generation.weights import DirectoryWeights
from gymrl.gym.service import GymService
from gymrl.media import inspect_image
from gymrl.media.processing import ImageProcessor
from gymrl.testing import build_image, build_image_uri, build_tiny_vision_model
from gymrl.types import Row, Trajectory
from tests.integration.ledger.conftest import CHAT_AGENT
from tests.integration.vllm.vision import SMALL, TALL, VisionReference

SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True, seed=6)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.set_num_threads(1)
    return build_tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def reference(directory):
    return VisionReference(directory)


@pytest.fixture
async def policy(directory):
    config = GenerationConfig(model=str(directory), num_threads=1)
    generator, tokenizer = TransformersGenerator.load(config)
    chat = ChatFormat.from_config(tokenizer, config, tuple(generator.end_ids))
    yield Policy(generator, chat, images=load_image_reader(config, chat))
    await generator.close()


def question(*images, words="what is "):
    content = [{"type": "input_image", "image_url": build_image_uri(*image)} for image in images]
    return {"role": "user", "content": [{"type": "input_text", "text": words}, *content]}


async def read(policy, *items):
    request = convert({"input": list(items)}, ResponsesRequest)
    return await policy.images.read(conversation_of(request))


async def asked(policy, *items, sampling=SAMPLING, on_token=None):
    conversation = await read(policy, *items)
    prompt_ids = await policy.prompt(conversation)
    return await policy.sample(prompt_ids, conversation, sampling, on_token)


def errors(reference, completion, images):
    generated = completion.generated
    expected = reference.logprobs(completion.prompt_ids, generated.token_ids, images)
    return [abs(a - b) for a, b in zip(generated.logprobs, expected, strict=True)]


def check(found):
    assert sum(found) / len(found) < MEAN_TOLERANCE
    assert max(found) < MAX_TOLERANCE


async def test_requests_with_and_without_images_are_decoded_together(policy, reference):
    """Positions run on differently behind images; rows of one batch must not mix them up."""
    assert isinstance(policy.generator, ImageGenerator)
    shown = [[SMALL, TALL], [], [TALL], [SMALL], [SMALL, SMALL, TALL], []]
    samplings = [
        SamplingParams(max_tokens=8 + 5 * i, ignore_eos=True, seed=i) for i in range(len(shown))
    ]
    completions = await gather_bounded(
        lambda i: asked(policy, question(*shown[i]), sampling=samplings[i]), range(len(shown))
    )
    found = [
        error
        for completion, images in zip(completions, shown, strict=True)
        for error in errors(reference, completion, images)
    ]
    assert len(found) == sum(sampling.max_tokens for sampling in samplings)
    check(found)


async def test_turns_with_images_are_token_exact(policy, reference):
    items, shown, kept, found = [], [], [], []
    for images in ([SMALL], [], [TALL, SMALL]):
        items.append(question(*images))
        shown += images
        completion = await asked(policy, *items)
        prompt_ids, generated = completion.prompt_ids, completion.generated
        assert prompt_ids[: len(kept)] == kept
        found += errors(reference, completion, shown)
        kept = [*prompt_ids, *generated.token_ids]
        items.append(
            {
                "role": "assistant",
                "content": completion.parsed.content,
                "prompt_token_ids": prompt_ids,
                "generation_token_ids": generated.token_ids,
            }
        )
    check(found)


async def test_images_that_a_black_box_was_shown_come_from_the_ledger(policy, directory):
    """The agent keeps texts alone, and its answer has neither tokens nor images."""
    url = build_image_uri(*SMALL)
    questions = [
        [{"type": "text", "text": "what is "}, {"type": "image_url", "image_url": {"url": url}}],
        "and now?",
        [{"type": "image_url", "image_url": {"url": build_image_uri(*TALL)}}] * 2,
    ]
    body = {"responses_create_params": {"input": "hi"}, "questions": questions}
    row = Row(
        index=0,
        task_index=0,
        rollout_index=0,
        route="agent",
        rollout_id="run-0",
        body=json.dumps({**body, "_ng_rollout_id": "run-0"}).encode(),
    )
    config = GymConfig(
        servers=CHAT_AGENT, token_source="ledger", media=MediaConfig(), processor=str(directory)
    )
    server = GenerationServer(policy, ledgers=LedgerBook())
    base_url = await server.start()
    async with spawn(GymService, in_process=True, config=config) as service:
        await service.call("spin_up", [base_url], "policy")
        (result,) = [result async for result in service.stream("run_rollouts", [row])]
        await service.call("shutdown")
    await server.close()
    trajectory = result.outcome
    assert isinstance(trajectory, Trajectory), trajectory
    small, tall = build_image(*SMALL), build_image(*TALL)
    shown = [[trajectory.media[image.digest] for image in turn] for turn in trajectory.images]
    assert shown == [[small], [], [tall, tall]]
    assert len(trajectory.media) == 2
    assert trajectory.notes == {}


async def test_one_prompt_with_other_pictures_is_another_prompt(policy):
    """Prompts of equal ids are prefilled once; the pictures of these differ."""
    one, other = await gather_bounded(lambda seed: asked(policy, question((56, 84, seed))), [1, 5])
    assert one.prompt_ids == other.prompt_ids
    assert one.generated.logprobs != other.generated.logprobs


async def test_new_weights_see_an_image_anew(policy, directory, reference, tmp_path):
    new = build_tiny_vision_model(tmp_path / "new", seed=1)
    await asked(policy, question(TALL))
    await policy.generator.update_weights(DirectoryWeights(path=str(new)), "1")
    completion = await asked(policy, question(TALL))
    reference.load(new)
    found = errors(reference, completion, [TALL])
    reference.load(directory)
    check(found)


async def test_weights_that_change_under_a_call_see_its_image_anew(
    policy, directory, reference, tmp_path
):
    conversation = await read(policy, question(TALL))
    prompt_ids = await policy.prompt(conversation)
    generator = policy.generator
    images = generator._images.of([image.encoded for image in conversation.images])
    token = policy.images.format.image_token_id
    batch = DecodeBatch(generator.model, "processed", "0", image_token_id=token)
    request = Request(prompt_ids, SAMPLING, budget=12, end_ids=frozenset(), images=images)
    batch.join([request])
    for _ in range(5):
        batch.step()
    new = DirectoryWeights(path=str(build_tiny_vision_model(tmp_path / "new", seed=1)))
    copy_weights(generator.model, read_weights(generator.model, new))
    batch.version = "1"
    batch.recompute()
    while batch.requests:
        batch.step()

    generated = request.future.result()
    assert generated.weight_versions == [("0", 0, 6), ("1", 6, 12)]
    completion = Completion(prompt_ids=prompt_ids, generated=generated, parsed=ParsedText(""))
    before = errors(reference, completion, [TALL])[:6]
    reference.load(new.path)
    after = errors(reference, completion, [TALL])[6:]
    reference.load(directory)
    check(before)
    check(after)


async def test_a_sampled_image_token_fails_its_own_call_under_new_weights(policy):
    """The forward pass over the whole sequence would take it for a place of the image."""
    conversation = await read(policy, question(SMALL))
    prompt_ids = await policy.prompt(conversation)
    generator = policy.generator
    images = generator._images.of([image.encoded for image in conversation.images])
    token = policy.images.format.image_token_id
    batch = DecodeBatch(generator.model, "processed", "0", image_token_id=token)
    requests = [
        Request(prompt_ids, SAMPLING, budget=12, end_ids=frozenset(), images=images)
        for _ in range(2)
    ]
    batch.join(requests)
    batch.step()
    requests[0].token_ids[0] = token
    batch.recompute()
    assert batch.requests == [requests[1]]
    assert isinstance(requests[0].future.exception(), GenerationError)
    batch.step()
    assert len(requests[1].token_ids) == 3


async def test_a_generator_of_text_says_that_it_shows_none(policy, tiny_directory):
    conversation = await read(policy, question(SMALL))
    prompt_ids = await policy.prompt(conversation)
    shown = policy.images.format.located(prompt_ids, conversation.images)
    generator, _ = TransformersGenerator.load(GenerationConfig(model=str(tiny_directory)))
    try:
        with pytest.raises(GenerationRequestError, match="the model reads text only"):
            await generator.generate_with_images(prompt_ids, shown, SAMPLING)
    finally:
        await generator.close()


@pytest.fixture
async def post(policy):
    """Asks a server over the policy; its status and error."""
    server = GenerationServer(policy)
    base_url = await server.start()
    async with aiohttp.ClientSession() as session:

        async def post(*items) -> tuple[int, dict]:
            body = {"input": list(items), "max_output_tokens": 2}
            async with session.post(f"{base_url}/responses", json=body) as answer:
                return answer.status, (await answer.json()).get("error")

        yield post
    await server.close()


async def test_a_model_of_text_answers_400_and_goes_on_with_text(policy, post, tiny_directory):
    config = GenerationConfig(model=str(tiny_directory))
    policy.images = load_image_reader(config, policy.chat)
    status, error = await post(question(SMALL))
    assert status == 400
    assert error["message"].endswith("reads text only; serve a vision-language model")
    assert error["param"] == "input[0].content[1]"
    assert (await post(question()))[0] == 200


async def test_a_processor_that_cannot_be_loaded_is_the_reason_that_requests_get(
    policy, post, directory, tmp_path
):
    broken = shutil.copytree(directory, tmp_path / "broken")
    (broken / "processor_config.json").unlink()
    policy.images = load_image_reader(GenerationConfig(model=str(broken)), policy.chat)
    status, error = await post(question(SMALL))
    assert status == 400
    assert re.search("processor of model=.* can't be loaded|no image processor", error["message"])
    assert (await post(question()))[0] == 200


async def test_a_host_that_cannot_be_reached_is_no_fault_of_the_request(policy, post):
    media = MediaConfig(
        schemes=("http",), allowed_hosts=("127.0.0.1",), private_hosts=("127.0.0.1",)
    )
    policy.images = RequestImageReader(policy.images.format, media)
    with bound_socket("127.0.0.1", 0) as silent:
        port = silent.getsockname()[1]
        part = {"type": "input_image", "image_url": f"http://127.0.0.1:{port}/a.png"}
        status, error = await post({"role": "user", "content": [part]})
    assert (status, error["type"]) == (503, "MediaFetchError")
    assert error["message"].startswith("input[0].content[0]: image 'http://127.0.0.1")


async def test_inputs_of_images_are_kept_within_bytes(policy, directory):
    model = policy.generator.model
    images = [inspect_image(build_image(28, 28, seed), MediaConfig()) for seed in range(3)]
    tensors = ImageTensors(ImageProcessor.load(str(directory)), model)
    packed = tensors.of(images)
    assert packed["image_grid_thw"].tolist() == [[1, 2, 2]] * 3
    one = sum(tensor.nbytes for tensor in tensors.of(images[:1]).values())

    bounded = ImageTensors(ImageProcessor.load(str(directory)), model, max_bytes=2 * one)
    again = bounded.of(images)
    assert torch.equal(again["pixel_values"], packed["pixel_values"])
    assert bounded.num_kept == 2
