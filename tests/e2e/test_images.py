"""Rollouts that show images, in processes of their own, to a batch whose pixels fit its tokens."""

import pytest
import torch
import transformers

from gymrl.config import GenerationConfig, GymConfig, MediaConfig, RolloutConfig, SamplingParams
from gymrl.generation.fidelity import MAX_TOLERANCE, MEAN_TOLERANCE
from gymrl.media.processing import ImageProcessor
from gymrl.rollout.engine import RolloutEngine
from gymrl.tensors import to_batch
from gymrl.testing import build_image_uri, build_tiny_vision_model
from tests.integration.vllm.looking import ROUTE, SERVERS


@pytest.mark.timeout(120)
async def test_a_forward_pass_over_a_batch_gives_the_log_probabilities_of_its_tokens(tmp_path):
    torch.set_num_threads(1)
    directory = str(build_tiny_vision_model(tmp_path / "vision"))
    config = RolloutConfig(
        generation=GenerationConfig(model=directory, num_threads=1, defer_loading=True),
        gym=GymConfig(
            servers=SERVERS, media=MediaConfig(), processor=directory, tokenizer=directory
        ),
        sampling=SamplingParams(max_tokens=8),
        seed=5,
    )
    shown = {"type": "input_image", "image_url": build_image_uri(84, 56, 3)}
    content = [{"type": "input_text", "text": "what is "}, shown]
    rows = [
        {
            "responses_create_params": {"input": [{"role": "user", "content": content}]},
            "agent_ref": {"name": ROUTE},
        }
    ]
    async with RolloutEngine(config) as engine:
        groups = await engine.run(rows, num_generations=3)

    processor = ImageProcessor.load(directory)
    batch = to_batch(groups, pad_token_id=0, images=processor)
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
    is_image = (batch.token_ids == processor.image_token_id).int()
    columns = torch.arange(batch.token_ids.shape[1])
    with torch.inference_mode():
        logits = model(
            input_ids=batch.token_ids,
            attention_mask=(columns < batch.lengths[:, None]).long(),
            **{"mm_token_type_ids": is_image, **batch.media_inputs},
        ).logits
    logprobs = torch.log_softmax(logits[:, :-1], -1)
    chosen = logprobs.gather(2, batch.token_ids[:, 1:, None])[..., 0]
    mask = batch.token_mask[:, 1:].bool()
    errors = (chosen - batch.generation_logprobs[:, 1:])[mask].abs()
    assert batch.media_inputs["image_grid_thw"].shape == (3 * 3, 3)
    assert len(errors) >= 3 * 3
    assert errors.mean() < MEAN_TOLERANCE
    assert errors.max() < MAX_TOLERANCE
