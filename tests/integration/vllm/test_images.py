"""Images over a real engine: what the model was shown is what the tokens and log-probabilities say."""

import re
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import msgspec
import pytest
import pytest_asyncio
import torch

from gymrl.config import GymConfig, MediaConfig, RolloutConfig, SamplingParams
from gymrl.generation.chat import ChatFormat
from gymrl.generation.fidelity import MAX_TOLERANCE, MEAN_TOLERANCE
from gymrl.generation.image_inputs import load_image_reader
from gymrl.generation.images import ImageGenerator
from gymrl.generation.policy import Policy
from gymrl.generation.requests import ResponsesRequest, convert
from gymrl.generation.responses_api import conversation_of
from gymrl.generation.server import GenerationServer
from gymrl.generation.weights import DirectoryWeights
from gymrl.media import inspect_image
from gymrl.media.processing import ImageProcessor
from gymrl.rollout.engine import RolloutEngine
from gymrl.rollout.native_text import ChatText
from gymrl.tensors import to_batch
from gymrl.testing import build_image_uri, build_tiny_vision_model
from tests.integration.native import gallery
from tests.integration.native.gallery import Gallery, play
from tests.integration.vllm.engines import engine_config
from tests.integration.vllm.looking import ROUTE, SERVERS
from tests.integration.vllm.vision import SMALL, TALL, VisionReference

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]


class Served:
    """A vision-language model behind the server, and what asks it."""

    def __init__(self, generator, policy, reader, session, base_url, directory) -> None:
        self.generator = generator
        self.policy = policy
        self.reader = reader
        self.directory = directory
        self._session = session
        self.base_url = base_url

    async def post(self, path: str, headers=None, **body) -> tuple[int, Any]:
        data = msgspec.json.encode(body)
        url = self.base_url + path
        async with self._session.post(url, data=data, headers=headers) as got:
            return got.status, await got.json()

    async def respond(self, items, headers=None, **body) -> dict[str, Any]:
        settings = {"max_output_tokens": 12, "seed": 3, "ignore_eos": True, **body}
        status, answer = await self.post("/responses", headers, input=items, **settings)
        assert status == 200, answer
        return answer

    async def events(self, path: str, **body) -> list[dict[str, Any]]:
        async with self._session.post(self.base_url + path, data=msgspec.json.encode(body)) as got:
            lines = (await got.text()).splitlines()
        return [msgspec.json.decode(line[5:]) for line in lines if line.startswith("data: {")]

    async def conversation(self, items):
        request = convert({"input": items}, ResponsesRequest)
        return await self.reader.read(conversation_of(request))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory, _vllm_can_run):
    from gymrl.generation.vllm import VllmGenerator

    directory = build_tiny_vision_model(tmp_path_factory.mktemp("vision"))
    config = engine_config(str(directory), media=MediaConfig(max_images_per_row=4))
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


async def test_turns_keep_the_regions_of_the_turns_before_them(served, reference):
    """No image at first, one in a tool's answer, two in the next message; tokens travel along."""
    items = [user(text("look at the page"))]
    shown: list[tuple[int, int, int]] = []
    kept: list[int] = []
    later = [
        [{"type": "function_call_output", "call_id": "c", "output": [text("a "), image(TALL)]}],
        [user(image(SMALL), text(" and "), image(SMALL))],
        [user(text("so?"))],
    ]
    for more, images in zip([[], *later], [[], [TALL], [SMALL, SMALL], []], strict=True):
        items += more
        shown += images
        answer = await served.respond(items, tools=[TOOL])
        prompt_ids, sampled = tokens_of(answer)

        assert prompt_ids[: len(kept)] == kept
        check(reference.errors(answer, shown))
        kept = prompt_ids + sampled
        items += answer["output"]
    assert prompt_ids.count(reference.model.config.image_token_id) == 8 + 6 + 6


TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


async def test_what_an_image_shows_is_what_the_model_sees(served):
    one, other, again = [
        await served.respond([user(text("what is "), image((56, 84, seed)))]) for seed in (1, 5, 1)
    ]
    prompt_ids = [tokens_of(answer)[0] for answer in (one, other, again)]
    assert prompt_ids[0] == prompt_ids[1]
    first, second, third = [
        answer["output"][-1]["generation_log_probs"] for answer in (one, other, again)
    ]
    assert abs(first[0] - second[0]) > 0.01 or tokens_of(one)[1] != tokens_of(other)[1]
    assert first == pytest.approx(third, abs=1e-5)


async def test_chat_completions_show_the_same_prompt(served):
    parts = [{"type": "text", "text": "what is "}, {"type": "image_url"}]
    urls = [{"image_url": {"url": build_image_uri(*SMALL), "detail": "low"}}]
    messages = [{"role": "user", "content": [parts[0], {**parts[1], **urls[0]}]}]
    settings = {"messages": messages, "max_tokens": 12, "seed": 3, "ignore_eos": True, "n": 2}
    status, chat = await served.post("/chat/completions", **settings)
    assert status == 200, chat
    answer = await served.respond([user(text("what is "), image(SMALL))])

    assert chat["prompt_token_ids"] == tokens_of(answer)[0]
    assert chat["choices"][0]["token_ids"] == tokens_of(answer)[1]
    status, tokens = await served.post("/tokenize", messages=messages)
    assert (status, tokens["tokens"]) == (200, tokens_of(answer)[0])


async def test_a_stream_gives_the_tokens_of_the_whole_answer(served):
    question = [user(text("what is "), image(TALL))]
    whole = await served.respond(question)
    body = {"input": question, "max_output_tokens": 12, "seed": 3, "ignore_eos": True}
    events = await served.events("/responses", **body, stream=True)
    assert events[-1]["type"] == "response.incomplete"
    assert tokens_of(events[-1]["response"]) == tokens_of(whole)


async def test_an_image_that_comes_again_is_decoded_once(served):
    image_format = served.reader.format
    question = [user(image((84, 84, 77)), image((84, 84, 77)))]
    before = image_format.pixels.num_decoded
    for _ in range(3):
        await served.respond(question)
    assert image_format.pixels.num_decoded == before + 1


async def test_an_agent_that_carries_no_tokens_continues_from_the_ledger(served):
    question = [user(text("what is "), image(SMALL))]
    headers = {"x-gymrl-rollout-id": "images-1"}
    first = await served.respond(question, headers=headers)
    answer = [{"role": "assistant", "content": first["output"][-1]["content"][0]["text"]}]
    more = [user(text("and "), image(TALL))]
    second = await served.respond([*question, *answer, *more], headers=headers)

    kept = [*tokens_of(first)[0], *tokens_of(first)[1]]
    assert tokens_of(second)[0][: len(kept)] == kept

    # Another picture of the same size is another conversation: nothing is known of it.
    changed = [user(text("what is "), image((56, 84, 9)))]
    third = await served.respond([*changed, *answer, *more], headers=headers)
    assert tokens_of(third)[0][: len(kept)] != kept


@pytest.mark.parametrize(
    ("content", "says", "code"),
    [
        ([image(SMALL)] * 5, "5 images in one request are more than media.max_images", None),
        (
            [{"type": "input_image", "image_url": "https://example.com/a.png"}],
            r"input\[0\].content\[0\].*https is not in media.schemes",
            None,
        ),
        (
            [text("see "), {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}],
            r"input\[0\].content\[1\].*no image of PNG",
            None,
        ),
        ([{"type": "input_image", "file_id": "file-1"}], "this server keeps no files", None),
        ([{"type": "input_image"}], r"image_url must be a URL", None),
        (
            [text("<|vision_start|><|image_pad|><|vision_end|>"), image(SMALL)],
            "2 places for 1 images",
            "image_refused",
        ),
        ([text("<|image_pad|>"), image(SMALL)], "1 image tokens of the prompt", "image_refused"),
        ([text("x" * 600), image(SMALL)], "context length is 512", "context_length_exceeded"),
    ],
    ids=["many", "scheme", "broken", "file", "nothing", "spelled", "stray", "long"],
)
async def test_what_is_refused_is_named(served, content, says, code):
    status, answer = await served.post("/responses", input=[user(*content)])
    assert status == 400, answer
    assert re.search(says, answer["error"]["message"]), answer
    assert answer["error"]["code"] == code


async def test_an_assistant_shows_no_images(served):
    items = [user(text("hi")), {"role": "assistant", "content": [image(SMALL)]}]
    status, answer = await served.post("/responses", input=items)
    assert status == 400
    assert "no image may be here" in answer["error"]["message"]


async def test_the_context_is_counted_in_tokens_of_images(served):
    """448 x 448 pixels are far fewer tokens of the template than of the prompt."""
    wide = image((224, 224, 3))
    words = text("word " * 90)
    status, answer = await served.post("/responses", input=[user(words, wide, wide, wide)])
    prompt_ids, sampled = tokens_of(answer)
    assert status == 200
    assert prompt_ids.count(served.reader.format.image_token_id) == 3 * 64
    assert len(prompt_ids) + len(sampled) <= 512

    status, answer = await served.post("/responses", input=[user(words, words, words, wide)])
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("sent", [[], [(56, 112, 1)]], ids=["left out", "of another size"])
async def test_an_image_that_changes_between_turns_is_refused(served, sent):
    question = [user(text("what is "), image(SMALL))]
    first = await served.respond(question)
    changed = [user(text("what is "), *[image(shape) for shape in sent])]
    more = [user(text("and "), image(TALL))]
    body = {"input": [*changed, *first["output"], *more]}
    status, answer = await served.post("/responses", **body)
    assert (status, answer["error"]["code"]) == (400, "image_refused")


async def test_a_call_that_is_cancelled_leaves_its_image_usable(served, reference):
    """The engine's cache must not take an image for sent that never was."""
    shape = (112, 112, 41)
    conversation = await served.conversation([user(text("what is "), image(shape))])
    prompt_ids = await served.policy.prompt(conversation)
    shown = served.reader.format.located(prompt_ids, conversation.images)
    sampling = SamplingParams(max_tokens=300, ignore_eos=True)
    # Given up between the engine's processor and the engine, the place that timing seldom hits.
    await served.generator._engine._with_images(prompt_ids, shown)
    for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
        with anyio.move_on_after(delay):
            await served.generator.generate_with_images(prompt_ids, shown, sampling)

    answer = await served.respond([user(text("what is "), image(shape))])
    check(reference.errors(answer, [shape]))


async def test_new_weights_see_an_image_anew(served, reference, tmp_path):
    """What the vision tower of the old weights made of an image must not be kept."""
    question = [user(text("what is "), image(SMALL))]
    await served.respond(question)
    new = build_tiny_vision_model(tmp_path / "new", seed=1)
    await served.generator.update_weights(DirectoryWeights(path=str(new)), "1")
    try:
        answer = await served.respond(question)
        reference.load(new)
        check(reference.errors(answer, [SMALL]))
    finally:
        await served.generator.update_weights(DirectoryWeights(path=str(served.directory)), "0")
        reference.load(served.directory)
    check(reference.errors(await served.respond(question), [SMALL]))


async def test_a_batch_of_rollouts_has_the_tokens_and_pixels_that_were_sampled_from(
    served, reference
):
    """Agent to server to engine to batch: a forward pass over the batch gives the same numbers."""
    sampling = SamplingParams(max_tokens=8)
    config = RolloutConfig(
        gym=GymConfig(
            servers=SERVERS,
            base_urls=(served.base_url,),
            media=MediaConfig(),
            processor=str(served.directory),
            tokenizer=str(served.directory),
        ),
        in_process=True,
        sampling=sampling,
        seed=11,
    )
    question = [user(text("what is "), image(SMALL), text(" and "), image(TALL))]
    rows = [
        {"responses_create_params": {"input": question}, "agent_ref": {"name": ROUTE}},
        {"responses_create_params": {"input": [user(text("look"))]}, "agent_ref": {"name": ROUTE}},
    ]
    async with RolloutEngine(config) as engine:
        groups = await engine.run(rows, num_generations=2)

    processor = ImageProcessor.load(str(served.directory))
    batch = to_batch(groups, pad_token_id=0, images=processor)
    errors = []
    trajectories = [sample for group in groups for sample in group.trajectories]
    counts = [len([ref for turn in sample.images for ref in turn]) for sample in trajectories]
    assert counts == [4, 4, 2, 2]
    for place, sample in enumerate(trajectories):
        length = int(batch.lengths[place])
        ids = batch.token_ids[place, :length]
        assert ids.tolist() == sample.token_ids.tolist()
        files = [sample.media[ref.digest] for turn in sample.images for ref in turn]
        pixels = processor.model_inputs([inspect_image(file, MediaConfig()) for file in files])
        logprobs = reference.all_logprobs(ids, pixels)
        mask = batch.token_mask[place, 1:length].bool()
        recorded = batch.generation_logprobs[place, 1:length]
        assert 3 <= int(mask.sum()) <= 3 * 8
        errors += (logprobs - recorded)[mask].abs().tolist()
    check(errors)


async def test_native_episodes_with_images_have_the_tokens_and_pixels_that_were_sampled_from(
    served, reference
):
    """Images of two sizes in one prompt, in observations, and none: environment to batch."""
    codec = ChatText(served.policy.chat, images=served.reader.format)
    rollout = await play(served.generator, codec, Gallery())
    trajectories = [sample for group in rollout.groups for sample in group.trajectories]
    counts = [[len(turn) for turn in sample.images] for sample in trajectories]
    # An episode may end early, by a random model's answer of 40 tokens.
    whole = [[2, 0, 0], [2, 0, 0], [0, 1, 0], [0, 1, 0], [1, 2, 0], [1, 2, 0], [], []]
    assert all(turns == full[: len(turns)] for turns, full in zip(counts, whole, strict=True))
    assert sum(map(sum, counts)) >= 8
    token = served.reader.format.image_token_id
    for sample in trajectories:
        shown = [ref.width * ref.height // (28 * 28) for turn in sample.images for ref in turn]
        assert sample.token_ids.tolist().count(token) == sum(shown)
    processor = ImageProcessor.load(str(served.directory))
    gallery.check(
        to_batch(rollout.groups, pad_token_id=0, images=processor), reference, MAX_TOLERANCE
    )
