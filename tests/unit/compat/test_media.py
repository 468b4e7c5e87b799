"""Images in message logs, under NeMo RL's names."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from PIL import Image

from gymrl.compat.nemo_rl.media import (
    attach_initial_nemo_gym_image_payloads,
    extract_input_images_from_message,
    get_pad_dynamic_image_shapes,
    image_sources_equal,
    index_per_turn_images,
    without_initial_image_sources,
)
from gymrl.compat.nemo_rl.message_media import (
    OMITTED_MARK,
    PackedTensor,
    add_multimodal_generation_payload,
    attach_static_multimodal_payload,
    media_of,
    reattach_original_multimodal_payloads,
    reattach_static_multimodal_payloads_to_result,
)
from gymrl.errors import ConfigError, MediaError, RowValueError, UnsupportedOptionError
from gymrl.media import to_data_url

PAD = 9


class Colours:
    """A processor whose model sees the mean colour of an image."""

    image_processor = object()
    image_token = "<image>"
    image_token_id = PAD
    tokenizer = None

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *, text, images, return_tensors):
        self.calls += 1
        ids = torch.tensor([[PAD] * len(images)])
        means = [np.asarray(each).mean(axis=(0, 1)) for each in images]
        return {
            "input_ids": ids,
            "attention_mask": ids,
            "pixel_values": torch.tensor(np.array(means)),
        }


def url(red: int) -> str:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (red, 0, 0)).save(file, "PNG")
    return to_data_url(file.getvalue(), "image/png")


def part(red: int) -> dict:
    return {"type": "input_image", "image_url": url(red)}


def user(*reds: int) -> dict:
    return {"role": "user", "content": [part(red) for red in reds]}


def row(*reds: int) -> dict:
    return {"responses_create_params": {"input": [user(*reds)]}}


def log(*turns: list[int]) -> list[dict]:
    """A message log, user and assistant in turn, of these tokens."""
    messages = []
    for tokens in turns:
        messages.append({"role": "user", "content": "", "token_ids": torch.tensor(tokens)})
        messages.append({"role": "assistant", "content": "", "token_ids": torch.tensor([1])})
    return messages


def packed(*values: float) -> PackedTensor:
    return PackedTensor(torch.tensor(values))


def reds(message: dict) -> list[int]:
    return message["pixel_values"].as_tensor()[:, 0].int().tolist()


ENV = {"nemo_gym": {}}


def test_prompts_get_the_inputs_of_their_images_once_before_they_are_repeated():
    processor = Colours()
    batch = {
        "extra_env_info": [row(10, 20), row(), row(30)],
        "message_log": [log([1]) for _ in "abc"],
    }
    attach_initial_nemo_gym_image_payloads(batch, processor, env_config=ENV)
    logs = batch["message_log"]
    assert reds(logs[0][0]) == [10, 20]
    assert media_of(logs[1][0]) == {}
    assert reds(logs[2][0]) == [30]
    calls = processor.calls
    before = logs[0][0]["pixel_values"]
    attach_initial_nemo_gym_image_payloads(batch, processor, env_config=ENV)
    assert logs[0][0]["pixel_values"] is before
    assert processor.calls == calls


def test_prompts_with_a_bad_image_or_no_message_or_no_processor_are_refused():
    bad = {"extra_env_info": [row(1), row(1)], "message_log": [log([1]), log([1])]}
    part = bad["extra_env_info"][1]["responses_create_params"]["input"][0]["content"][0]
    part["image_url"] = "data:image/png;base64,AAAA"
    with pytest.raises(MediaError, match="row 1: "):
        attach_initial_nemo_gym_image_payloads(bad, Colours(), env_config=ENV)
    with pytest.raises(RowValueError, match="row 0 has images and no user message"):
        attach_initial_nemo_gym_image_payloads(
            {"extra_env_info": [row(1)], "message_log": [[]]}, Colours(), env_config=ENV
        )
    with pytest.raises(UnsupportedOptionError, match="no image_processor"):
        attach_initial_nemo_gym_image_payloads(
            {"extra_env_info": [row(1)], "message_log": [log([1])]}, object(), env_config=ENV
        )


def test_a_batch_of_text_needs_no_processor():
    batch = {"extra_env_info": [row()], "message_log": [log([1])]}
    attach_initial_nemo_gym_image_payloads(batch, None, env_config=ENV)
    assert media_of(batch["message_log"][0][0]) == {}


@pytest.mark.parametrize(
    ("env", "value"),
    [
        ({}, False),
        ({"nemo_gym": None}, False),
        ({"nemo_gym": {"pad_dynamic_image_shapes": None}}, False),
        ({"nemo_gym": {"pad_dynamic_image_shapes": True}}, True),
    ],
)
def test_padding_is_off_where_the_environment_does_not_ask_for_it(env, value):
    assert get_pad_dynamic_image_shapes(env) is value


def test_padding_is_a_boolean():
    with pytest.raises(ConfigError, match="pad_dynamic_image_shapes='yes'"):
        get_pad_dynamic_image_shapes({"nemo_gym": {"pad_dynamic_image_shapes": "yes"}})


def test_images_are_opened_where_an_item_has_them():
    def colours(item):
        return [image.getpixel((0, 0))[0] for image in extract_input_images_from_message(item)]

    assert colours(user(10, 20)) == [10, 20]
    assert colours({"type": "function_call_output", "output": url(30)}) == [30]
    assert colours({"type": "function_call_output", "output": '{"x": 0.65, "y": 0.83}'}) == []
    assert colours({**user(10), "role": "assistant"}) == []
    with pytest.raises(MediaError):
        colours({"type": "function_call_output", "output": "data:image/png;base64,AAAA"})


def test_turns_are_indexed_by_items_with_sampled_tokens():
    sampled = {"role": "assistant", "generation_token_ids": [1]}
    output = [
        user(20),
        sampled,
        {**sampled, "generation_token_ids": []},
        user(30),
        sampled,
        sampled,
    ]
    turns = index_per_turn_images(output, [user(10)])
    assert [[image.getpixel((0, 0))[0] for image in turn] for turn in turns] == [[10, 20], [30], []]


def test_one_ordered_copy_of_a_prompts_images_is_taken_out():
    messages = [user(10, 20), {"role": "user", "content": "text"}, user(10), "odd"]
    before = copy.deepcopy(messages)
    left, is_whole = without_initial_image_sources(messages, [url(10), url(20)])
    assert is_whole
    assert [m["content"] if isinstance(m, dict) else m for m in left] == [
        [],
        "text",
        [part(10)],
        "odd",
    ]
    assert messages == before
    left, is_whole = without_initial_image_sources(messages, [url(20), url(10), url(30)])
    assert not is_whole
    assert [m["content"] for m in left[:3]] == [[part(10)], "text", []]
    assert without_initial_image_sources("hi", []) == ("hi", False)


def test_sources_are_equal_as_texts_or_as_one_object():
    one = object()
    assert image_sources_equal(url(1), url(1))
    assert image_sources_equal(one, one)
    assert not image_sources_equal(url(1), url(2))
    assert not image_sources_equal([1], [1])


def test_media_of_a_prompt_come_back_to_the_user_turn_of_the_same_number():
    """NVIDIA-NeMo/RL#2296: ordinals match when a turn has no images."""
    original = log([1], [2], [3])
    original[0]["pixel_values"] = packed(10.0)
    original[4]["pixel_values"] = packed(30.0)
    original[4]["notes"] = torch.tensor([1])
    messages = log([1], [2], [3], [4])
    messages[6]["pixel_values"] = packed(40.0)
    result = {OMITTED_MARK: True, "message_log": messages, "input_message_log": messages[:1]}
    reattach_original_multimodal_payloads([result], [original])
    assert OMITTED_MARK not in result
    found = [message.get("pixel_values") for message in messages[::2]]
    assert found[0] is original[0]["pixel_values"]
    assert found[1] is None
    assert found[2] is original[4]["pixel_values"]
    assert found[3].as_tensor().tolist() == [40.0]
    assert "notes" not in messages[4]


def test_a_result_that_left_nothing_out_is_not_touched():
    original = log([1])
    original[0]["pixel_values"] = packed(10.0)
    result = {"message_log": log([1]), "input_message_log": log([1])}
    before = copy.copy(result)
    reattach_original_multimodal_payloads([result], [original])
    assert result == before
    assert media_of(result["message_log"][0]) == {}


def test_media_without_a_user_turn_to_go_to_are_missed():
    original = log([1], [2])
    original[2]["pixel_values"] = packed(10.0)
    result = {OMITTED_MARK: True, "message_log": log([1])}
    with pytest.raises(MediaError, match="1 user messages"):
        reattach_original_multimodal_payloads([result], [original])


def test_static_media_are_copied_to_every_view_of_a_result_once():
    source = log([PAD, PAD, 1])
    source[0]["pixel_values"] = packed(10.0)
    messages = log([5, PAD, PAD])
    result = {"message_log": messages, "input_message_log": messages[:1]}
    done: set[int] = set()
    attach_static_multimodal_payload(messages[:1], source, done, Colours())
    repaired = messages[0]["pixel_values"] = packed(99.0)
    attach_static_multimodal_payload(messages, source, done, Colours())
    assert messages[0]["pixel_values"] is repaired
    reattach_static_multimodal_payloads_to_result(result, source, Colours())
    assert messages[0]["pixel_values"] is source[0]["pixel_values"]


@pytest.mark.parametrize("tokens", [[1], [PAD], [PAD, 1, PAD], [PAD, PAD, PAD]])
def test_static_media_are_not_copied_where_the_placeholders_do_not_fit(tokens):
    source = log([PAD, PAD, 1])
    source[0]["pixel_values"] = packed(10.0)
    target = log(tokens)
    with pytest.raises(MediaError, match="user message 0"):
        attach_static_multimodal_payload(target, source, tokenizer=Colours())
    assert media_of(target[0]) == {}
    attach_static_multimodal_payload(target, source)
    assert media_of(target[0]) != {}


class Policy:
    def __init__(self, backend: str) -> None:
        self.cfg = {"backend": backend}


def generation_input(backend: str, deduplicate: bool, images) -> dict:
    data: dict = {}
    flat = {"pixel_values": packed(1.0), "token_ids": torch.tensor([1]), "content": "x"}
    batch = {"vllm_content": ["a", "b"], "vllm_images": images, "task_name": ["t", "t"]}
    add_multimodal_generation_payload(
        data, flat, batch, Policy(backend), deduplicate_multimodal_data=deduplicate
    )
    return data


def test_a_generation_gets_one_representation_where_vllm_has_its_own_for_every_row():
    assert set(generation_input("vllm", True, [["i"], ["j"]])) == {"vllm_content", "vllm_images"}


@pytest.mark.parametrize(
    ("backend", "deduplicate", "images"),
    [
        ("vllm", False, [["i"], ["j"]]),
        ("megatron", True, [["i"], ["j"]]),
        ("vllm", True, [["i"], []]),
        ("vllm", True, [["i"], None]),
        ("vllm", True, [["i"]]),
    ],
)
def test_a_generation_gets_policy_ready_media_too_where_vllms_own_do_not_serve_every_row(
    backend, deduplicate, images
):
    data = generation_input(backend, deduplicate, images)
    assert set(data) == {"pixel_values", "vllm_content", "vllm_images"}


def test_tensors_of_messages_are_packed_along_their_dimension():
    tiles = [PackedTensor(torch.ones(1, n, 3), 1) for n in (2, 4)]
    assert PackedTensor.concat(tiles).as_tensor().shape == (1, 6, 3)
    with pytest.raises(MediaError):
        PackedTensor.concat([])
