"""Native rollouts with images under NeMo RL's names, over a tiny real vision model."""

import pytest
import torch
import transformers

from gymrl.compat.nemo_rl import (
    PackedTensor,
    async_generate_response_for_sample_turn,
    generate_responses,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
    run_sample_multi_turn_rollout,
)
from gymrl.config import GenerationConfig, SamplingParams
from gymrl.environments import EnvironmentReturn
from gymrl.errors import (
    GenerationRequestError,
    MediaError,
    RowValueError,
    UnsupportedOptionError,
)
from gymrl.generation.batch import BatchGenerator
from gymrl.testing import build_image_uri, build_tiny_vision_model
from tests.integration.vllm.vision import SMALL, TALL, VisionReference, pictures

SAMPLING = SamplingParams(max_tokens=40, stop_token_ids=tuple(range(0, 380, 2)), seed=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.set_num_threads(1)
    return build_tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def reference(directory):
    return VisionReference(directory)


@pytest.fixture(scope="module")
def processor(directory):
    return transformers.AutoProcessor.from_pretrained(directory)


@pytest.fixture(scope="module")
def policy(directory):
    config = GenerationConfig(model=str(directory), num_threads=1)
    with BatchGenerator.open(config, sampling=SAMPLING) as generating:
        yield generating


class Gallery:
    """Shows an image after the first answer, and ends after the second."""

    def step(self, message_logs, metadata):
        image = {"type": "image", "image": build_image_uri(*TALL)}
        turns = [sum(m["role"] == "assistant" for m in log) for log in message_logs]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": [image] if turn == 1 else "."} for turn in turns
            ],
            metadata=[None] * len(turns),
            next_stop_strings=[None] * len(turns),
            rewards=[1.0] * len(turns),
            terminateds=[turn == 2 for turn in turns],
        )


def message(processor, sizes):
    """A user's message as NeMo RL's data processors make it."""
    parts = [{"type": "image"} for _ in sizes]
    text = processor.apply_chat_template(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    inputs = processor(text=[text], images=pictures(sizes) or None, return_tensors="pt")
    made = {"role": "user", "content": text, "token_ids": inputs["input_ids"][0]}
    for name in ("pixel_values", "image_grid_thw"):
        if sizes:
            made[name] = PackedTensor(inputs[name], 0)
    return made


def batch(processor, *shown):
    messages = [message(processor, sizes) for sizes in shown]
    return {
        "message_log": [[made] for made in messages],
        "task_name": ["gallery"] * len(shown),
        "extra_env_info": [None] * len(shown),
        "loss_multiplier": torch.ones(len(shown)),
        "vllm_content": [
            made["content"] if s else None for made, s in zip(messages, shown, strict=True)
        ],
        "vllm_images": [pictures(sizes) for sizes in shown],
    }


SHOWN = ([SMALL, TALL], [], [TALL])


def check(log, reference):
    ids = torch.cat([each["token_ids"] for each in log])
    media = {
        name: PackedTensor.concat([m[name] for m in log if name in m]).as_tensor()
        for name in ("pixel_values", "image_grid_thw")
    }
    expected = reference.all_logprobs(ids, media)
    place = 0
    for each in log:
        end = place + len(each["token_ids"])
        if each["role"] == "assistant":
            assert torch.allclose(
                each["generation_logprobs"], expected[place - 1 : end - 1], atol=2e-4
            )
        place = end


@pytest.mark.parametrize("run", [run_multi_turn_rollout, run_async_multi_turn_rollout])
def test_a_batch_with_images_is_played_and_its_media_come_back(policy, processor, reference, run):
    given = batch(processor, *SHOWN)
    final, metrics = run(policy, given, processor, {"gallery": Gallery()}, max_seq_len=400)
    assert metrics["avg_turns_per_sample"] == 2.0
    for row, sizes in enumerate(SHOWN):
        log = final["message_log"][row]
        users = [each for each in log if each["role"] == "user"]
        assert len(users[0].get("image_grid_thw", PackedTensor(torch.ones(0))).tensor) == len(sizes)
        assert len(users[1]["image_grid_thw"].tensor) == 1
        if sizes:
            assert users[0]["pixel_values"] is given["message_log"][row][0]["pixel_values"]
        check(log, reference)
    assert [len(log) for log in given["message_log"]] == [1, 1, 1]


class Foreign:
    """A policy of somebody else's: its batch face alone, and a note of what it was given."""

    def __init__(self, policy, backend):
        self.cfg = {"backend": backend}
        self.seen = []
        self._policy = policy

    def generate(self, data, greedy=False):
        self.seen.append(data)
        return self._policy.generate(data, greedy=greedy)


@pytest.mark.parametrize(("backend", "packs"), [("vllm", False), ("megatron", True)])
def test_another_policy_gets_the_media_of_a_batch_under_their_names(
    policy, processor, reference, backend, packs
):
    foreign = Foreign(policy, backend)
    final, _ = run_multi_turn_rollout(
        foreign,
        batch(processor, [SMALL, TALL], [TALL]),
        processor,
        {"gallery": Gallery()},
        max_seq_len=400,
        deduplicate_multimodal_data=True,
    )
    assert len(foreign.seen) == 2
    assert foreign.seen[0]["vllm_content"][1].count("<|image_pad|>") == 1
    assert [[p.size for p in images] for images in foreign.seen[1]["vllm_images"]] == [
        [(56, 84), (56, 112), (56, 112)],
        [(56, 112), (56, 112)],
    ]
    assert ("pixel_values" in foreign.seen[1]) is packs
    if packs:
        assert len(foreign.seen[1]["image_grid_thw"].tensor) == 5
    for log in final["message_log"]:
        check(log, reference)


async def test_one_sample_with_pictures_in_its_parts(policy, processor, reference):
    made = message(processor, [SMALL])
    image = {"type": "image", "image": pictures([SMALL])[0]}
    made["content"] = [image, {"type": "text", "text": "what is it"}]
    state = {"message_log": [made], "task_name": "gallery", "extra_env_info": None}
    final, _ = await run_sample_multi_turn_rollout(
        0, state, policy, processor, {"gallery": Gallery()}, max_seq_len=400
    )
    check(final["message_log"], reference)


async def test_a_single_turn_is_shown_its_images(policy, processor, reference):
    for sizes in SHOWN:
        log = [message(processor, sizes)]
        media = {"vllm_content": "what is it", "vllm_images": pictures(sizes)} if sizes else None
        log, ids, lengths, _ = await async_generate_response_for_sample_turn(
            policy, log, None, processor, 400, sample_multimodal_data=media
        )
        prompt = log[0]["token_ids"].tolist()
        assert lengths.tolist() == [len(prompt)]
        expected = reference.logprobs(prompt, ids.tolist(), sizes)
        assert torch.allclose(log[1]["generation_logprobs"], torch.tensor(expected), atol=2e-4)
    with pytest.raises(MediaError, match="vllm_images has none for it"):
        await async_generate_response_for_sample_turn(
            policy, [message(processor, [SMALL])], None, processor, 400
        )
    with pytest.raises(UnsupportedOptionError, match="sample_multimodal_data has pixel_values"):
        await async_generate_response_for_sample_turn(
            policy, log, None, processor, 400, sample_multimodal_data={"pixel_values": 1}
        )


def test_a_batch_of_single_turns_is_shown_its_images(policy, processor, reference):
    given = batch(processor, [SMALL, TALL])
    ids = given["message_log"][0][0]["token_ids"]
    lengths = torch.tensor([len(ids)])
    data = {"input_ids": ids[None], "input_lengths": lengths, "vllm_images": given["vllm_images"]}
    _, [sampled], _ = generate_responses(policy, data, given, processor, lengths)
    expected = reference.logprobs(ids.tolist(), sampled.tolist(), [SMALL, TALL])
    answer = given["message_log"][0][1]
    assert torch.allclose(answer["generation_logprobs"], torch.tensor(expected), atol=2e-4)


def test_what_cannot_be_shown_is_refused_before_anything_runs(policy, processor):
    def play(given, tokenizer=processor):
        run_multi_turn_rollout(policy, given, tokenizer, {"gallery": Gallery()}, max_seq_len=400)

    given = batch(processor, [], [SMALL])
    with pytest.raises(UnsupportedOptionError, match="give the model's processor as tokenizer"):
        play(given, processor.tokenizer)
    with pytest.raises(
        UnsupportedOptionError, match="row 1 has image_grid_thw, pixel_values and no"
    ):
        play({**given, "vllm_images": None})
    with pytest.raises(GenerationRequestError, match="sample 0 of the batch has vllm_videos"):
        play({**given, "vllm_videos": [["clip"], None]})
    part = {"type": "image", "image": pictures([SMALL])[0]}
    given["message_log"][1][0]["content"] = [part, part]
    with pytest.raises(RowValueError, match="row 1: its messages have 2 image parts, and vllm_im"):
        play(given)
