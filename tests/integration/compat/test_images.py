"""Rollouts with images under NeMo RL's names, with a real processor."""

from __future__ import annotations

import contextlib

import anyio.to_thread
import pytest
import torch
import transformers
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)

from gymrl.compat.nemo_rl import NemoGym, run_async_nemo_gym_rollout
from gymrl.compat.nemo_rl.media import (
    attach_initial_nemo_gym_image_payloads,
)
from gymrl.compat.nemo_rl.message_media import (
    OMITTED_MARK,
    PackedTensor,
    media_of,
    reattach_original_multimodal_payloads,
)
from gymrl.errors import MediaError, RolloutStreamError, UnsupportedOptionError
from gymrl.testing import FakeGymServer, build_image_uri
from gymrl.testing.gym_server import gym_answer
from gymrl.testing.vision import VISION_TEMPLATE, build_tiny_vision_tokenizer

torch.set_num_threads(1)

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8}
PROMPT, SEEN = build_image_uri(56, 84, 1), build_image_uri(56, 56, 2)
"""6 and 4 tokens."""


class Policy:
    max_model_len = 64


@pytest.fixture(scope="module")
def processor():
    return transformers.PaddleOCRVLProcessor(
        image_processor=PaddleOCRVLImageProcessorPil(min_pixels=28 * 28, max_pixels=64 * 28 * 28),
        tokenizer=build_tiny_vision_tokenizer(),
        chat_template=VISION_TEMPLATE,
    )


def row(*urls: str) -> dict:
    parts = [{"type": "input_image", "image_url": url} for url in urls]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": parts}]},
        "agent_ref": {"name": "fake_agent"},
    }


def looking_agent(pad: int):
    """An agent whose model is shown the prompt's image, and then one that a tool answers with."""
    first = [1, *[pad] * 6, 2]
    second = [*first, 3, *[pad] * 4, 4]

    def answer(body: dict) -> dict:
        made = gym_answer([(first, [3]), (second, [5])])
        made["response"]["output"][1]["output"] = SEEN
        return made | {"responses_create_params": body["responses_create_params"]}

    return answer


@contextlib.asynccontextmanager
async def spun_up(processor, script=None):
    async with FakeGymServer(script or looking_agent(processor.image_token_id)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        environment = NemoGym(
            {
                "model_name": "policy",
                "base_urls": [],
                "initial_global_config_dict": {"head_server": {"host": host, "port": int(port)}},
                "in_process": True,
            }
        )
        environment.set_tokenizer(processor)
        await anyio.to_thread.run_sync(environment._spinup)
        try:
            yield environment
        finally:
            await anyio.to_thread.run_sync(environment.shutdown)


def grids(message) -> list[list[int]]:
    return message["image_grid_thw"].as_tensor().tolist()


def log() -> list[dict]:
    return [{"role": "user", "content": "", "token_ids": torch.tensor([1])}]


async def test_every_user_turn_of_a_result_has_the_media_of_its_images(processor):
    batch = {"extra_env_info": [row(PROMPT)] * 4, "message_log": [log() for _ in range(4)]}
    async with spun_up(processor) as environment:
        results = run_async_nemo_gym_rollout(
            Policy(),
            batch,
            processor,
            {"nemo_gym": environment},
            SAMPLING,
            4,
            False,
            debug_payload_metrics=True,
        )
        (result,) = [result async for result in results]
    for messages in result.final_batch["message_log"]:
        assert [m["role"] for m in messages] == ["user", "assistant"] * 2
        assert isinstance(messages[0]["pixel_values"], PackedTensor)
        assert grids(messages[0]) == [[1, 6, 4]]
        assert grids(messages[2]) == [[1, 4, 4]]
        assert media_of(messages[1]) == media_of(messages[3]) == {}
    assert result.batch.media_inputs["image_grid_thw"].tolist() == [[1, 6, 4], [1, 4, 4]] * 4
    assert result.rollout_metrics["media_payload/images"] == 4 + 8
    assert result.rollout_metrics["media_payload/sent"] == 2
    physical = result.rollout_metrics["media_payload/physical_bytes"]
    assert physical < result.rollout_metrics["media_payload/serialized_bytes"]
    assert 4 * physical < result.rollout_metrics["media_payload/logical_bytes"] * 2


async def test_a_prompts_media_that_are_there_already_are_kept_as_the_objects_they_are(processor):
    batch = {"extra_env_info": [row(PROMPT)], "message_log": [log()]}
    attach_initial_nemo_gym_image_payloads(batch, processor, env_config={})
    repeated = {name: column * 2 for name, column in batch.items()}
    original = batch["message_log"][0][0]["pixel_values"]
    async with spun_up(processor) as environment:
        results = run_async_nemo_gym_rollout(
            Policy(),
            repeated,
            processor,
            {"nemo_gym": environment},
            SAMPLING,
            2,
            False,
            deduplicate_multimodal_data=True,
        )
        (result,) = [result async for result in results]
    for messages in result.final_batch["message_log"]:
        assert messages[0]["pixel_values"] is original
        assert grids(messages[2]) == [[1, 4, 4]]


async def test_a_row_may_leave_its_prompts_media_out_and_get_them_back(processor):
    batch = {"extra_env_info": [row(PROMPT)], "message_log": [log()]}
    attach_initial_nemo_gym_image_payloads(batch, processor, env_config={})
    async with spun_up(processor) as environment:
        found = [
            result
            async for _, result, _ in environment.run_rollouts(
                batch["extra_env_info"], "timing", deduplicate_multimodal_data=True
            )
        ]
        whole = [
            result
            async for _, result, _ in environment.run_rollouts(batch["extra_env_info"], "timing")
        ]
    (thin,), (full,) = found, whole
    assert thin[OMITTED_MARK] is True
    assert OMITTED_MARK not in full
    assert media_of(thin["message_log"][0]) == {}
    assert thin["full_result"]["response"]["output"][1]["output"] == SEEN
    reattach_original_multimodal_payloads([thin], batch["message_log"])
    for left, right in zip(thin["message_log"], full["message_log"], strict=True):
        assert set(media_of(left)) == set(media_of(right))
        for name, value in media_of(left).items():
            assert torch.equal(value.as_tensor(), right[name].as_tensor())


async def test_an_agent_that_loses_an_image_fails_its_row(processor):
    pad = processor.image_token_id
    lost = gym_answer([([1, *[pad] * 6, 2], [3])])
    batch = {"extra_env_info": [row(PROMPT, SEEN)]}
    async with spun_up(processor, lambda body: lost) as environment:
        results = run_async_nemo_gym_rollout(
            Policy(), batch, processor, {"nemo_gym": environment}, SAMPLING, 1, False
        )
        with pytest.raises(RolloutStreamError, match="row 0, turn 0") as caught:
            _ = [result async for result in results]
    assert isinstance(caught.value.__cause__, MediaError)
    assert (caught.value.__cause__.expected, caught.value.__cause__.received) == (2, 1)


def test_a_processor_that_can_not_be_used_is_refused_before_any_process(processor):
    class Broken(type(processor)):
        def __call__(self, **options):
            raise RuntimeError("not today")

    environment = NemoGym(
        {
            "model_name": "policy",
            "base_urls": ["http://127.0.0.1:1/v1"],
            "initial_global_config_dict": {},
        }
    )
    broken = Broken(processor.image_processor, processor.tokenizer)
    with environment, pytest.raises(UnsupportedOptionError, match="not today"):
        environment.set_tokenizer(broken)
