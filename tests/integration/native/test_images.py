"""A tiny vision model plays environments that show images: what is trained on is what it saw."""

import pytest
import torch

from gymrl.config import GenerationConfig, MediaConfig, SamplingParams
from gymrl.environments import spawn_environment
from gymrl.errors import RolloutRedispatchExhausted
from gymrl.generation import TransformersGenerator
from gymrl.generation.batch import BatchGenerator
from gymrl.generation.image_inputs import load_image_format
from gymrl.media.processing import ImageProcessor
from gymrl.records import MediaFolder, RecordWriter, RunRecord, read_groups
from gymrl.rollout.native import NativeConfig, NativePrompt, run_native_rollout
from gymrl.rollout.native_text import ChatText, RawText
from gymrl.tensors import to_batch
from gymrl.testing import build_image, build_tiny_vision_model
from gymrl.viewer.detail import DecodedRow
from tests.integration.native.gallery import Gallery, check, parts, play
from tests.integration.vllm.vision import SMALL, TALL, VisionReference, pictures


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.set_num_threads(1)
    return build_tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def reference(directory):
    return VisionReference(directory)


@pytest.fixture
async def loaded(directory):
    generator, tokenizer = TransformersGenerator.load(
        GenerationConfig(model=str(directory), num_threads=1)
    )
    yield generator, tokenizer, load_image_format(str(directory), tokenizer)
    await generator.close()


@pytest.mark.parametrize(("codec", "scheduler"), [(ChatText, "async"), (RawText, "batched")])
async def test_log_probabilities_agree_with_those_of_a_forward_pass(
    loaded, reference, tmp_path, codec, scheduler
):
    generator, tokenizer, images = loaded
    make = ChatText.from_tokenizer if codec is ChatText else RawText
    rollout = await play(generator, make(tokenizer, images=images), Gallery(), scheduler)
    sizes = [[len(turn) for turn in group.trajectories[0].images] for group in rollout.groups]
    assert [shown[:2] for shown in sizes] == [[2, 0], [0, 1], [1, 2], []]

    with RecordWriter(tmp_path / "rollouts.jsonl", RunRecord()) as writer:
        for group in rollout.groups:
            writer.write(group)
    [*again] = read_groups(tmp_path / "rollouts.jsonl")
    for groups in (rollout.groups, again):
        batch = to_batch(groups, pad_token_id=0, images=ImageProcessor(reference.processor))
        assert batch.media_inputs["image_grid_thw"].shape == (12, 3)
        check(batch, reference)


def test_a_batch_is_shown_its_images(directory, reference):
    shown = [[SMALL, TALL], [], [TALL]]
    prompts = [
        reference.prompt_ids([{"role": "user", "content": parts(*sizes)}], sizes) for sizes in shown
    ]
    width = max(map(len, prompts))
    data = {
        "input_ids": torch.tensor([ids + [0] * (width - len(ids)) for ids in prompts]),
        "input_lengths": torch.tensor([len(ids) for ids in prompts]),
        "vllm_images": [pictures(sizes) for sizes in shown],
    }
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    config = GenerationConfig(model=str(directory), num_threads=1)
    with BatchGenerator.open(config, sampling=sampling, pad_token_id=0) as policy:
        output = policy.generate(data)
    for row, (ids, sizes) in enumerate(zip(prompts, shown, strict=True)):
        span = slice(len(ids), len(ids) + 6)
        expected = reference.logprobs(ids, output["output_ids"][row, span].tolist(), sizes)
        assert torch.allclose(output["logprobs"][row, span], torch.tensor(expected), atol=2e-4)


async def test_the_viewer_shows_the_images_of_prompts_and_observations(loaded, tmp_path):
    generator, tokenizer, images = loaded
    codec = ChatText.from_tokenizer(tokenizer, images=images)
    rollout = await play(generator, codec, Gallery())
    path = tmp_path / "rollouts.jsonl"
    with RecordWriter(path, RunRecord()) as writer:
        writer.write(rollout.groups[2])
    line = path.read_bytes().splitlines()[1]
    row = DecodedRow(2, line, MediaFolder(path))
    view = row.view()
    shown = [[image.width for image in turn.images] for turn in view.sequences[0].turns]
    assert shown[:2] == [[56], [56, 56]]
    assert view.images == 2
    kind, data = row.image(view.sequences[0].turns[1].images[1].number)
    assert (kind, data) == ("image/png", build_image(*TALL))


async def test_an_environment_in_a_worker_shows_images(loaded):
    generator, tokenizer, images = loaded
    codec = ChatText.from_tokenizer(tokenizer, images=images)
    async with spawn_environment("tests.integration.native.gallery:Gallery") as world:
        rollout = await play(generator, codec, world)
    assert [len(turn) for turn in rollout.groups[2].trajectories[1].images] == [1, 2]


async def test_a_host_that_is_away_is_asked_again_and_then_ends_the_run(loaded):
    generator, tokenizer, images = loaded
    part = {"type": "image", "image": "http://127.0.0.1:9/cat.png"}
    prompt = NativePrompt(task_name="gallery", messages=[{"role": "user", "content": [part]}])
    with pytest.raises(RolloutRedispatchExhausted, match="could not be downloaded 2 times"):
        await run_native_rollout(
            [prompt],
            generator,
            {"gallery": Gallery()},
            codec=ChatText.from_tokenizer(tokenizer, images=images),
            config=NativeConfig(
                retry_delay_s=0.0,
                max_infra_attempts=2,
                media=MediaConfig(
                    schemes=("http",), allowed_hosts=("127.0.0.1",), private_hosts=("127.0.0.1",)
                ),
            ),
        )
