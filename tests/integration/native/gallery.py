"""An environment that shows images, tasks for it, and what their tokens must be in a batch."""

import torch

from gymrl.config import SamplingParams
from gymrl.environments import EnvironmentReturn
from gymrl.rollout.native import NativeConfig, NativePrompt, run_native_rollout
from gymrl.testing import build_image_uri
from tests.integration.vllm.vision import SMALL, TALL


def parts(*images, text="what is "):
    shown = [{"type": "image", "image": build_image_uri(*size)} for size in images]
    return [{"type": "text", "text": text}, *shown]


class Gallery:
    """Shows the images that the metadata names after each answer, and ends behind the last."""

    def step(self, message_logs, metadata):
        shown = [left[0] if left else [] for left in metadata]
        return EnvironmentReturn(
            observations=[
                {"role": "environment", "content": parts(*sizes, text="and ")} for sizes in shown
            ],
            metadata=[left[1:] for left in metadata],
            next_stop_strings=[None] * len(metadata),
            rewards=[1.0] * len(metadata),
            terminateds=[not left for left in metadata],
        )


def tasks():
    """Two images of several sizes in one turn, one in an observation, none at all."""
    seen = [([SMALL, TALL], [[]]), ([], [[TALL], []]), ([SMALL], [[SMALL, TALL]]), ([], [[]])]
    return [
        NativePrompt(
            task_name="gallery",
            messages=[{"role": "user", "content": parts(*first)}],
            metadata=[[list(size) for size in sizes] for sizes in later],
        )
        for first, later in seen
    ]


async def play(generator, codec, world, scheduler="async", **settings):
    return await run_native_rollout(
        tasks(),
        generator,
        {"gallery": world},
        codec=codec,
        config=NativeConfig(
            scheduler=scheduler,
            seed=3,
            # A random model seldom ends a turn: every other token does it here.
            sampling=SamplingParams(max_tokens=40, stop_token_ids=tuple(range(0, 380, 2))),
            max_turns=3,
            **settings,
        ),
        num_generations=2,
    )


def check(batch, reference, tolerance=2e-4):
    """Recompute the whole batch sample by sample, from its own media, and compare."""
    for row, messages in enumerate(batch.final_batch["message_log"]):
        shown = [m for m in messages if "pixel_values" in m]
        media = {}
        if shown:
            media = {
                name: torch.cat([m[name] for m in shown])
                for name in ("pixel_values", "image_grid_thw")
            }
        ids = torch.cat([message["token_ids"] for message in messages])
        recomputed = reference.all_logprobs(ids, media)
        mask = batch.token_mask[row, 1 : len(ids)]
        sampled = batch.generation_logprobs[row, 1 : len(ids)]
        assert torch.allclose(sampled[mask], recomputed[mask], atol=tolerance)
