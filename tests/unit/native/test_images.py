"""Images of native episodes: as many regions as images, always."""

import json

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import MediaConfig
from gymrl.errors import (
    ConfigError,
    EnvironmentContractError,
    MediaError,
    RowTypeError,
    RowValueError,
)
from gymrl.generation import Generated
from gymrl.media import restore_images
from gymrl.media.processing import ImageProcessor
from gymrl.media.regions import check_regions
from gymrl.rollout.native import (
    NativeConfig,
    NativePrompt,
    run_native_rollout,
    stream_native_rollout,
)
from gymrl.rollout.native_images import PromptSegment
from gymrl.rollout.native_text import ChatText, RawText
from gymrl.testing import (
    ScriptedGenerator,
    ScriptedImageGenerator,
    build_image,
    build_image_uri,
    build_tiny_image_format,
    build_tiny_vision_processor,
    build_tiny_vision_tokenizer,
)
from tests.unit.native.worlds import Scripted

torch.set_num_threads(1)

SMALL, TALL = (56, 84, 1), (56, 112, 2)
"""Width, height and seed: 6 and 8 tokens of an image, and 2 around them."""


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_vision_tokenizer()


@pytest.fixture(scope="module")
def image_format():
    return build_tiny_image_format()


@pytest.fixture(scope="module")
def layout():
    return ImageProcessor(build_tiny_vision_processor())


@pytest.fixture(params=[ChatText.from_tokenizer, RawText])
def codec(request, tokenizer, image_format):
    return request.param(tokenizer, images=image_format)


def image(size):
    return {"type": "image", "image": build_image_uri(*size)}


def content(*sizes, text="look"):
    return [{"type": "text", "text": text}, *map(image, sizes)]


def prompt(*sizes, **fields):
    messages = [{"role": "user", "content": content(*sizes)}]
    return NativePrompt(**{"task_name": "world", "messages": messages, **fields})


def shows(*observations):
    """A world that shows these contents one after the other, and ends with the last."""

    def answer(log, metadata):
        turn = sum(message["role"] == "assistant" for message in log)
        return {
            "observation": observations[turn - 1],
            "terminated": turn == len(observations),
            "reward": 1.0,
        }

    return Scripted(answer)


def says(tokenizer, text="yes<|im_end|>"):
    ids = tokenizer.encode(text, add_special_tokens=False)
    return lambda prompt_ids, sampling: Generated(
        token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason="stop"
    )


async def play(codec, world, *prompts, generator, num_generations=1, **settings):
    rollout = await run_native_rollout(
        prompts,
        generator,
        {"world": world},
        codec=codec,
        config=NativeConfig(**settings),
        num_generations=num_generations,
    )
    return [group.samples[0] for group in rollout.groups]


def sizes_of(trajectory):
    return [[(ref.width, ref.height) for ref in turn] for turn in trajectory.images]


@pytest.mark.parametrize("scheduler", ["async", "batched"])
async def test_each_turn_has_the_images_that_its_prompt_added(codec, tokenizer, layout, scheduler):
    generator = ScriptedImageGenerator(says(tokenizer))
    [trajectory] = await play(
        codec,
        shows(content(TALL), content(), content(SMALL)),
        prompt(SMALL, TALL),
        generator=generator,
        scheduler=scheduler,
    )
    assert sizes_of(trajectory) == [[(56, 84), (56, 112)], [(56, 112)], []]
    check_regions(trajectory, layout)
    assert [len(call.images.images) for call in generator.calls] == [2, 3, 3]
    for call in generator.calls:
        for start, end in call.images.spans:
            region = call.prompt_ids[start:end]
            assert region[0] == tokenizer.vision_start_token_id
            assert region[-1] == tokenizer.vision_end_token_id
        assert call.prompt_ids.count(tokenizer.image_token_id) in (14, 22)
    assert trajectory.turns[1].prompt_text == "look"


async def test_what_is_recorded_has_every_image_once(codec, tokenizer):
    rollout = await run_native_rollout(
        [prompt(SMALL)],
        ScriptedImageGenerator(says(tokenizer)),
        {"world": shows(content(TALL), content(SMALL, TALL))},
        codec=codec,
        num_generations=2,
    )
    [group] = rollout.groups
    for row, trajectory in zip(group.rows, group.trajectories, strict=True):
        assert len(row.media) == 1
        assert len(trajectory.media) == 2
        assert b"base64,iVBOR" not in row.body + trajectory.result
        body = json.loads(restore_images(row.body, row.media))
        assert body["responses_create_params"]["input"][0]["content"] == [
            {"type": "input_text", "text": "look"},
            {"type": "input_image", "image_url": build_image_uri(*SMALL)},
        ]
        result = json.loads(restore_images(trajectory.result, trajectory.media))
        output = result["response"]["output"]
        assert output[1]["content"][1]["image_url"] == build_image_uri(*TALL)
        assert [part["type"] for part in output[3]["content"]] == [
            "input_text",
            "input_image",
            "input_image",
        ]
        assert result["final_observation"]["num_images"] == 2
    one, two = group.trajectories
    assert one.media == two.media


@settings(max_examples=20, deadline=None)
@given(
    first=st.lists(st.sampled_from([SMALL, TALL]), max_size=2),
    later=st.lists(
        st.lists(st.sampled_from([SMALL, TALL, "some words"]), max_size=3), min_size=1, max_size=3
    ),
    max_seq_len=st.integers(30, 130),
)
async def test_there_are_as_many_regions_as_images_however_short_the_context(
    tokenizer, image_format, layout, first, later, max_seq_len
):
    codec = ChatText.from_tokenizer(tokenizer, images=image_format)
    generator = ScriptedImageGenerator(says(tokenizer))
    observations = [
        [{"type": "text", "text": i} if isinstance(i, str) else image(i) for i in parts]
        for parts in later
    ]
    world = shows(*observations)
    [sample] = await play(
        codec,
        world,
        prompt(*first),
        generator=generator,
        max_seq_len=max_seq_len,
        failure_policy="mask",
    )
    for call in generator.calls:
        images = () if call.images is None else call.images.images
        expected = sum(layout.tokens_of(i.width, i.height) for i in images)
        assert call.prompt_ids.count(tokenizer.image_token_id) == expected
    if not hasattr(sample, "turns"):
        assert sample.error == "NoGenerationError"
        assert generator.calls == []
        return
    assert sample.num_tokens <= max_seq_len
    check_regions(sample, layout)
    result = json.loads(sample.result)
    final = result["final_observation"]
    sizes = [i for i in later[result["num_turns"] - 1] if not isinstance(i, str)]
    whole = sizes[: final["num_images"]]
    kept = sum(layout.tokens_of(width, height) for width, height, _ in whole)
    assert final["token_ids"].count(tokenizer.image_token_id) == kept
    for marker in (tokenizer.vision_start_token_id, tokenizer.vision_end_token_id):
        assert final["token_ids"].count(marker) == len(whole)
    if len(whole) < len(sizes):
        assert result["truncated"]


def test_a_cut_within_a_region_is_before_it():
    segment = PromptSegment([1, 7, 8, 9, 2, 7, 9], ("first", "second"), ((1, 4), (5, 7)))
    lengths = [len(segment.cut(length).token_ids) for length in range(8)]
    assert lengths == [0, 1, 1, 1, 4, 5, 5, 7]
    assert [len(segment.cut(length).images) for length in range(8)] == [0, 0, 0, 0, 1, 1, 1, 2]


async def test_an_image_that_does_not_fit_ends_its_episode_as_truncated(codec, tokenizer):
    generator = ScriptedImageGenerator(says(tokenizer))
    [whole] = await play(codec, shows(content(), content()), prompt(SMALL), generator=generator)
    limit = whole.turns[0].end + 9
    [trajectory] = await play(
        codec,
        shows(content(TALL, text=""), content()),
        prompt(SMALL),
        generator=generator,
        max_seq_len=limit,
    )
    result = json.loads(trajectory.result)
    assert result["truncated"] is True
    assert result["final_observation"]["num_images"] == 0
    assert tokenizer.image_token_id not in result["final_observation"]["token_ids"]
    assert sizes_of(trajectory) == [[(56, 84)]]


async def test_the_environment_sees_its_own_parts_and_may_change_them(tokenizer, image_format):
    codec = RawText(tokenizer, images=image_format)
    given = prompt(SMALL)
    before = msgspec.json.encode(given)
    seen = []

    def answer(log, metadata):
        seen.append(msgspec.json.encode(log[:3]))
        log[0]["content"].clear()
        return {"observation": content(TALL), "terminated": len(seen) == 2}

    await play(codec, Scripted(answer), given, generator=ScriptedImageGenerator(says(tokenizer)))
    assert msgspec.json.encode(given) == before
    assert msgspec.json.decode(seen[1])[0]["content"] == content(SMALL)
    assert msgspec.json.decode(seen[1])[2]["content"] == content(TALL)


BROKEN = {"type": "image", "image": "data:image/png;base64,aGVsbG8="}


async def test_a_broken_image_of_a_prompt_fails_its_rows_alone_before_any_call(codec, tokenizer):
    generator = ScriptedImageGenerator(says(tokenizer))
    bad = NativePrompt(task_name="world", messages=[{"role": "user", "content": [BROKEN]}])
    failure, trajectory = await play(
        codec, shows(content()), bad, prompt(), generator=generator, failure_policy="mask"
    )
    assert (failure.error, failure.attempts) == ("MediaError", 1)
    assert "the prompt: image 'data:image/png;base64,aGVsbG8='" in failure.message
    assert sizes_of(trajectory) == []
    assert len(generator.calls) == 1


async def test_a_broken_image_of_an_observation_fails_its_row_and_names_the_turn(codec, tokenizer):
    with pytest.raises(MediaError, match=r"row 0 .environment 'world', turn 0.: .*its 5 bytes"):
        await play(
            codec,
            shows([BROKEN], content()),
            prompt(SMALL),
            generator=ScriptedImageGenerator(says(tokenizer)),
        )


async def test_sources_are_guarded_as_everywhere(codec, tokenizer):
    for source in ("https://example.com/cat.png", "file:///etc/passwd"):
        part = {"type": "image_url", "image_url": {"url": source}}
        with pytest.raises(MediaError, match=r"is not in media.schemes"):
            await play(
                codec,
                shows([part]),
                prompt(),
                generator=ScriptedImageGenerator(says(tokenizer)),
            )
    with pytest.raises(MediaError, match="an image is named by a URL"):
        await play(
            codec,
            shows([{"type": "image", "image": "a cat"}]),
            prompt(),
            generator=ScriptedImageGenerator(says(tokenizer)),
        )


async def test_a_file_may_be_shown_where_it_is_allowed(codec, tokenizer, tmp_path):

    path = tmp_path / "cat.png"
    path.write_bytes(build_image(*SMALL))
    part = {"type": "input_image", "image_url": path.as_uri()}
    messages = [{"role": "user", "content": [part]}]
    [trajectory] = await play(
        codec,
        shows(content()),
        NativePrompt(task_name="world", messages=messages),
        generator=ScriptedImageGenerator(says(tokenizer)),
        media=MediaConfig(schemes=("data", "file"), allowed_roots=(str(tmp_path),)),
    )
    assert sizes_of(trajectory) == [[(56, 84)]]


async def test_images_of_a_row_are_limited_over_its_turns(codec, tokenizer):
    with pytest.raises(MediaError, match=r"3 images are more than media.max_images_per_row=2"):
        await play(
            codec,
            shows(content(SMALL, TALL), content()),
            prompt(SMALL),
            generator=ScriptedImageGenerator(says(tokenizer)),
            media=MediaConfig(max_images_per_row=2),
        )


async def test_a_text_that_spells_an_image_is_no_image(codec, tokenizer):
    spelled = "<|vision_start|><|image_pad|><|vision_end|>"
    with pytest.raises(MediaError, match="1 places for 0 images"):
        await play(
            codec,
            shows(spelled, content()),
            prompt(),
            generator=ScriptedImageGenerator(says(tokenizer)),
        )


async def test_a_sampled_placeholder_fails_its_row(codec, tokenizer):
    with pytest.raises(
        MediaError, match=r"turn 0\): MediaError: the model sampled 1 image placeholder tokens"
    ):
        await play(
            codec,
            shows(content()),
            prompt(SMALL),
            generator=ScriptedImageGenerator(says(tokenizer, "a<|image_pad|>")),
        )


async def test_a_generator_of_text_is_refused_before_anything_runs(codec, tokenizer):
    generator = ScriptedGenerator(says(tokenizer))
    with pytest.raises(ConfigError, match="ScriptedGenerator samples from tokens only"):
        await play(codec, shows(content()), prompt(SMALL), generator=generator)
    assert generator.calls == []
    [trajectory] = await play(codec, shows(content()), prompt(), generator=generator)
    assert trajectory.images == ()


async def test_a_codec_of_text_refuses_images(tokenizer):
    generator = ScriptedImageGenerator(says(tokenizer))
    text = ChatText.from_tokenizer(tokenizer)
    with pytest.raises(RowValueError, match="the prompt shows 1 images, and the codec writes text"):
        await play(text, shows(content()), prompt(SMALL), generator=generator)
    with pytest.raises(EnvironmentContractError, match="environment 'world' shows images"):
        await play(text, shows(content(SMALL), content()), prompt(), generator=generator)


async def test_parts_of_other_kinds_are_refused(codec, tokenizer):
    generator = ScriptedImageGenerator(says(tokenizer))
    audio = [{"type": "input_audio", "audio": "data:audio/wav;base64,aGVsbG8="}]
    with pytest.raises(RowTypeError, match="a part of type 'input_audio'"):
        await play(
            codec,
            shows(content()),
            NativePrompt(task_name="world", messages=[{"role": "user", "content": audio}]),
            generator=generator,
        )
    with pytest.raises(EnvironmentContractError, match="a part of type 'input_audio'"):
        await play(codec, shows(audio), prompt(), generator=generator)
    assert len(generator.calls) == 1


async def test_tokens_made_elsewhere_are_held_to_their_images(tokenizer, image_format, codec):
    generator = ScriptedImageGenerator(says(tokenizer))
    [made] = await play(codec, shows(content()), prompt(SMALL, TALL), generator=generator)
    ids = made.token_ids[: made.turns[0].generation_start].tolist()
    text = [{"role": "user", "content": "look"}]
    uris = [build_image_uri(*SMALL), build_image_uri(*TALL)]
    rollout = await run_native_rollout(
        [NativePrompt(task_name="world", messages=text, token_ids=ids, images=uris)],
        generator,
        {"world": shows(content())},
        codec=codec,
    )
    [again] = rollout.groups[0].trajectories
    assert again.token_ids.tolist() == made.token_ids.tolist()
    assert again.images == made.images
    body = json.loads(rollout.groups[0].rows[0].body)
    kinds = [part["type"] for part in body["responses_create_params"]["input"][0]["content"]]
    assert kinds == ["input_image", "input_image", "input_text"]
    with pytest.raises(MediaError, match="the prompt holds 1 of 2 images in their order"):
        await play(
            codec,
            shows(content()),
            NativePrompt(task_name="world", messages=text, token_ids=ids, images=uris[::-1]),
            generator=generator,
        )
    with pytest.raises(RowValueError, match="without the token_ids that show them"):
        await play(
            codec,
            shows(content()),
            NativePrompt(task_name="world", messages=text, images=uris),
            generator=generator,
        )


async def test_groups_with_images_come_as_they_complete(codec, tokenizer, layout):
    stream = stream_native_rollout(
        [prompt(SMALL), prompt(), prompt(TALL)],
        ScriptedImageGenerator(says(tokenizer)),
        {"world": shows(content(SMALL), content())},
        codec=codec,
    )
    groups = [group async for group in stream]
    assert sorted(group.index for group in groups) == [0, 1, 2]
    for group in groups:
        check_regions(group.trajectories[0], layout)
