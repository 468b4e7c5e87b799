"""Images in prompts: placeholders become regions, and regions are found again."""

import base64
import threading

import anyio
import anyio.to_thread
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import MediaConfig
from gymrl.errors import ConfigError, GenerationRequestError, MediaError
from gymrl.generation.chat import ChatFormat
from gymrl.generation.image_inputs import RequestImageReader
from gymrl.generation.images import (
    ConversationImage,
    ImageFormat,
    PixelCache,
    RegionReader,
    check_regions,
)
from gymrl.generation.policy import Policy
from gymrl.generation.prefix import TruePrefix
from gymrl.generation.requests import ChatRequest, ResponsesRequest, convert
from gymrl.generation.responses_api import conversation_of
from gymrl.media import inspect_image
from gymrl.testing import (
    ScriptedGenerator,
    build_image,
    build_image_uri,
    build_tiny_tokenizer,
    build_tiny_vision_processor,
    build_tiny_vision_tokenizer,
)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def processor():
    return build_tiny_vision_processor()


@pytest.fixture(scope="module")
def chat():
    return ChatFormat(build_tiny_vision_tokenizer())


@pytest.fixture
def image_format(processor, chat):
    return ImageFormat(processor, chat, chat.tokenizer.image_token_id)


def encoded(width=56, height=84, seed=0):
    return inspect_image(build_image(width, height, seed), MediaConfig())


def shown(image_format, *sizes, place=0):
    images = [encoded(*size) for size in sizes]
    return [ConversationImage(place, image, image_format.region(image)) for image in images]


def request(items):
    return convert({"input": items}, ResponsesRequest)


def policy_of(image_format, chat, **media):
    reader = RequestImageReader(image_format, MediaConfig(**media))
    return Policy(ScriptedGenerator([]), chat, images=reader)


def image_part(*size):
    return {"type": "input_image", "image_url": build_image_uri(*size)}


def test_a_placeholder_is_what_the_template_writes_between_the_texts(image_format, chat):
    assert chat.tokenizer.convert_ids_to_tokens(image_format.placeholder) == [
        "<|vision_start|>",
        "<|image_pad|>",
        "<|vision_end|>",
    ]


def test_a_region_is_what_the_processor_makes_of_the_placeholder(image_format):
    start, pad, end = image_format.placeholder
    assert image_format.region(encoded(56, 84)) == (start, *[pad] * 6, end)
    assert image_format.region(encoded(28, 28)) == (start, pad, end)


def test_an_image_is_decoded_and_processed_once(image_format):
    first = image_format.region(encoded(56, 84))
    assert image_format.known_region(encoded(56, 84)) is first
    assert image_format.region(encoded(56, 84)) is first
    assert image_format.pixels.num_decoded == 1


def test_broken_pixels_are_an_error_of_the_image(image_format):
    whole = build_image(56, 84)
    cut = inspect_image(whole[: len(whole) // 2], MediaConfig())
    with pytest.raises(MediaError, match="can't be decoded"):
        image_format.region(cut)


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.lists(st.integers(300, 310), max_size=4), min_size=1, max_size=5),
    sizes=st.lists(st.sampled_from([(28, 28), (56, 84), (56, 56)]), max_size=4),
)
def test_what_is_expanded_is_located_and_shortened_to_what_it_was(texts, sizes):
    sizes = sizes[: len(texts) - 1]
    placeholder = _FORMAT.placeholder
    ids = list(texts[0])
    for text, _ in zip(texts[1:], sizes, strict=False):
        ids += [*placeholder, *text]
    images = shown(_FORMAT, *sizes)

    prompt = _FORMAT.expanded(ids, images)
    assert len(prompt) == len(ids) + sum(len(i.region) - len(placeholder) for i in images)
    found = _FORMAT.located(prompt, images)
    assert [tuple(prompt[a:b]) for a, b in found.spans] == [image.region for image in images]
    assert found.shortened(prompt) == ids


class _Processor:
    """One token for each 28 x 28 pixels."""

    def __call__(self, text, images, add_special_tokens):
        num_tokens = (images[0].width // 28) * (images[0].height // 28)
        start, pad, end = _FORMAT.placeholder
        return {"input_ids": [[start, *[pad] * num_tokens, end]]}


_CHAT = ChatFormat(build_tiny_vision_tokenizer())
_FORMAT = ImageFormat(_Processor(), _CHAT, _CHAT.tokenizer.image_token_id)


async def test_images_that_wait_for_the_processor_leave_threads_to_others():
    """A processor takes one image at a time; 64 that wait for it in threads were all there are."""
    gate = threading.Event()

    def slowly(**asked):
        gate.wait(30)
        return _Processor()(**asked)

    regions = RegionReader(ImageFormat(slowly, _CHAT, _CHAT.tokenizer.image_token_id))
    found = []

    async def read(seed: int) -> None:
        found.append(await regions.region(encoded(28, 28, seed)))

    async with anyio.create_task_group() as group:
        for seed in range(64):
            group.start_soon(read, seed)
        try:
            await anyio.sleep(0.01)
            with anyio.fail_after(10):
                assert await anyio.to_thread.run_sync(lambda: "free") == "free"
        finally:
            gate.set()
    assert len(found) == 64


def test_regions_of_the_true_prefix_stay_as_they_are(image_format):
    first = shown(image_format, (56, 84))
    prefix = [1, *first[0].region, 300, 2]
    second = shown(image_format, (56, 56), place=2)
    ids = [*prefix, 301, *image_format.placeholder, 302]
    prompt = image_format.expanded(ids, second, start=len(prefix))
    assert prompt == [*prefix, 301, *second[0].region, 302]
    assert len(image_format.located(prompt, [*first, *second]).images) == 2


@pytest.mark.parametrize("num_places", [0, 2], ids=["none", "too many"])
def test_as_many_places_are_needed_as_there_are_images(image_format, num_places):
    with pytest.raises(MediaError, match=f"{num_places} places for 1 images") as caught:
        image_format.expanded(
            [1, *image_format.placeholder * num_places], shown(image_format, (56, 84))
        )
    assert (caught.value.expected, caught.value.received) == (1, num_places)


def test_an_image_of_another_size_is_not_where_it_should_be(image_format):
    prompt = [1, *shown(image_format, (56, 84))[0].region, 2]
    with pytest.raises(MediaError, match=r"0 of 1 images .* image 0 \(56x56 pixels, of message 0"):
        image_format.located(prompt, shown(image_format, (56, 56)))


def test_a_sampled_image_token_is_told_from_an_image(image_format):
    images = shown(image_format, (56, 84))
    prompt = [1, *images[0].region, 300, image_format.image_token_id, 2]
    with pytest.raises(MediaError, match="1 image tokens of the prompt belong to none"):
        image_format.located(prompt, images)


def test_an_engine_that_makes_other_tokens_is_named_with_the_first_that_differs(image_format):
    images = shown(image_format, (56, 84))
    prompt = [1, *images[0].region, 2]
    found = image_format.located(prompt, images)
    check_regions(prompt, list(prompt), found)
    with pytest.raises(MediaError, match=r"11 tokens in all instead of 10, .* differs at 8"):
        check_regions(prompt, [1, *images[0].region[:-1], image_format.image_token_id, 4, 2], found)


def test_a_template_without_images_has_no_format(processor):
    text_only = ChatFormat(build_tiny_tokenizer())
    with pytest.raises(ConfigError, match="writes nothing for an image"):
        ImageFormat(processor, text_only, 7)


def test_decoded_images_are_kept_within_bytes():
    cache = PixelCache(max_bytes=2 * 28 * 28 * 3)
    images = [encoded(28, 28, seed) for seed in range(3)]
    for image in images:
        cache.open(image)
    assert cache.open(images[2]) is cache.open(images[2])
    assert cache.num_decoded == 3
    cache.open(images[0])
    assert cache.num_decoded == 4


async def test_images_of_messages_and_of_tools_are_read_in_order(image_format, chat):
    call = {"type": "function_call", "name": "look", "call_id": "c", "arguments": "{}"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "see "}, image_part(56, 84)]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": [image_part(28, 28)]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": build_image_uri(56, 56)},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": ONE}}]},
    ]
    policy = policy_of(image_format, chat)
    conversation = await policy.images.read(conversation_of(request(items)))
    sizes = [(image.place, image.encoded.width) for image in conversation.images]
    assert sizes == [(0, 56), (2, 28), (4, 56), (5, 28)]
    prompt_ids = await policy.prompt(conversation)
    assert prompt_ids.count(image_format.image_token_id) == 6 + 1 + 4 + 1


ONE = build_image_uri(28, 28)


@pytest.mark.parametrize("text", ["", '{"a": 1}', "/tmp/a.png", "https://example.com/a.png"])
async def test_a_tools_text_that_names_no_image_to_be_read_stays_text(image_format, chat, text):
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call_output", "call_id": "c", "output": text},
    ]
    policy = policy_of(image_format, chat)
    conversation = await policy.images.read(conversation_of(request(items)))
    assert conversation.images == ()
    assert conversation.messages[1]["content"] == text


async def test_a_conversation_is_known_by_what_its_images_show(image_format, chat):
    policy = policy_of(image_format, chat)
    items = [{"role": "user", "content": [image_part(56, 84, 1)]}]
    conversation = await policy.images.read(conversation_of(request(items)))
    (part,) = conversation.messages[0]["content"]
    assert part == {"type": "image", "digest": encoded(56, 84, 1).digest}


async def test_a_model_of_text_refuses_images_and_says_so(chat):
    policy = Policy(ScriptedGenerator([]), chat)
    items = [{"role": "user", "content": [image_part(28, 28)]}]
    with pytest.raises(
        GenerationRequestError, match="this server's model reads text only"
    ) as caught:
        await policy.images.read(conversation_of(request(items)))
    assert caught.value.param == "input[0].content[0]"

    texts = [{"type": "function_call_output", "call_id": "c", "output": ONE}]
    conversation = conversation_of(request(texts))
    assert await policy.images.read(conversation) is conversation


async def test_more_images_than_allowed_are_refused_before_any_is_read(image_format, chat):
    policy = policy_of(image_format, chat, max_images_per_row=1)
    broken = {"type": "input_image", "image_url": "x"}
    items = [{"role": "user", "content": [image_part(28, 28), broken]}]
    with pytest.raises(GenerationRequestError, match=r"2 images .*max_images_per_row=1"):
        await policy.images.read(conversation_of(request(items)))


async def test_a_broken_image_is_refused_with_its_place(image_format, chat):
    garbage = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": garbage}]}]
    with pytest.raises(GenerationRequestError, match="its 8 bytes are no image") as caught:
        await policy_of(image_format, chat).images.read(conversation_of(request(items)))
    assert caught.value.param == "input[0].content[0]"


async def test_a_prefix_keeps_its_regions_and_the_tail_gets_new_ones(image_format, chat):
    policy = policy_of(image_format, chat)
    question = {"role": "user", "content": [image_part(56, 84)]}
    first = await policy.prompt(await policy.images.read(conversation_of(request([question]))))
    sampled = [300, 301, 2]
    items = [
        question,
        {
            "role": "assistant",
            "content": "whatever",
            "prompt_token_ids": first,
            "generation_token_ids": sampled,
        },
        {"role": "user", "content": [image_part(28, 28)]},
    ]
    conversation = await policy.images.read(conversation_of(request(items)))
    assert conversation.prefixes == {1: TruePrefix(first, sampled)}
    second = await policy.prompt(conversation)
    assert second[: len(first) + 3] == [*first, *sampled]
    assert second[len(first) + 3 :].count(image_format.image_token_id) == 1


def test_a_template_that_reads_parts_alone_gets_text_in_parts():
    """As those of LLaVA and others: they iterate over the content, whatever it is."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
        "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    chat = ChatFormat(build_tiny_vision_tokenizer(template))
    ids = chat.render([{"role": "user", "content": "hello"}], add_generation_prompt=False)
    assert chat.tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n"
    assert chat.image_text() == "<|vision_start|><|image_pad|><|vision_end|>"


def test_a_template_without_tools_shows_the_images_of_their_answers():
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    )
    chat = ChatFormat(build_tiny_vision_tokenizer(template))
    ids = chat.render(
        [{"role": "tool", "content": [{"type": "image", "digest": "d"}]}],
        add_generation_prompt=False,
    )
    text = chat.tokenizer.decode(ids)
    assert text == "user:<tool_response>\n<|image_pad|>\n</tool_response><|im_end|>"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image_url"}, "image_url must be a URL"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, "image_url must be a URL"),
        ({"type": "input_image", "file_id": "f"}, "this server keeps no files"),
        ({"type": "input_audio"}, "parts of type 'input_audio' are not supported"),
    ],
)
def test_a_part_that_names_no_image_is_refused(part, says):
    from gymrl.generation.chat_api import conversation_of as chat_conversation_of

    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
    with pytest.raises(GenerationRequestError, match=says) as caught:
        chat_conversation_of(convert(body, ChatRequest))
    assert caught.value.param.startswith("messages[0].content[1]")


@pytest.mark.parametrize("field", ["image", "image_url", "url"])
def test_an_image_is_named_in_any_of_the_fields_that_agents_use(field):
    part = {"type": "image", field: {"url": ONE}}
    conversation = conversation_of(request([{"role": "user", "content": [part]}]))
    assert conversation.messages[0]["content"][0]["source"] == ONE
