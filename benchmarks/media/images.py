"""Images of a group's prompt on the link between driver and worker, beside one copy of each.

The bytes are those of the link itself, headers and everything else of the call included. The worker
is a real one in a process of its own; its agent is a server that answers at once.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from PIL import Image

from benchmarks.comparison import Comparison
from gymrl.actors import spawn
from gymrl.config import GymConfig, MediaConfig, SamplingParams
from gymrl.gym.service import GymService
from gymrl.media import MediaExchange, MediaPayload, restore_images, to_data_url
from gymrl.rollout.prepare import GroupSizes, prepare_rows
from gymrl.testing.gym_server import FakeGymServer, gym_answer
from gymrl.types import RowResult, Trajectory

if TYPE_CHECKING:
    from gymrl.actors import ActorHandle
    from gymrl.types import Row


class Size(msgspec.Struct, frozen=True):
    """How much is measured.

    Attributes:
        attempts: Rows of the group.
        images: Of the prompt.
        side: Pixels of an image's side; it is noise, so that it takes its size as a file.
    """

    attempts: int = 16
    images: int = 8
    side: int = 384


TINY = Size(attempts=3, images=2, side=32)


async def measure(size: Size) -> list[Comparison]:
    """There and back."""
    pictures = [_noise(size.side, seed) for seed in range(size.images)]
    one_copy = sum(map(len, pictures))
    rows = _group(pictures, size.attempts)
    async with FakeGymServer(_echoing_agent) as server:
        config = GymConfig(
            registry_url=server.url, media=MediaConfig(max_images_per_row=size.images)
        )
        async with spawn(GymService, config=config) as worker:
            await worker.call("spin_up", [], "policy")
            counted = MediaPayload()
            before = worker.bytes_sent
            results = await _run(worker, rows, counted)
            sent = worker.bytes_sent - before
    for result in results:
        _check(result, pictures)
    note = (
        f"{size.attempts} attempts at a prompt with {size.images} images of "
        f"{one_copy / size.images / 1e3:.0f} kB; without sharing it were "
        f"{size.attempts} copies"
    )
    return [
        Comparison(
            name="a group's images to the worker",
            unit="MB",
            sides={"one copy of each": one_copy / 1e6, "on the link": sent / 1e6},
            ratio="all bytes of the call / one copy",
            value=sent / one_copy,
            target=1.05,
            at_least=False,
            note=note,
        ),
        Comparison(
            name="the same to the worker and in every result back",
            unit="MB",
            sides={
                "with repeats": counted.logical_bytes / 1e6,
                "crossed": counted.serialized_bytes / 1e6,
            },
            ratio="images as messages hold them, both ways / one copy",
            value=counted.serialized_bytes / one_copy,
            target=1.05,
            at_least=False,
            note="every result shows the prompt's images again, and none is sent back",
        ),
    ]


async def _run(worker: ActorHandle, rows: list[Row], counted: MediaPayload) -> list[RowResult]:
    exchange = MediaExchange(rows, (counted,))
    stream = worker.stream("run_rollouts", exchange.thin_rows(rows))
    return [exchange.full_result(result) async for result in stream]


def _check(result: RowResult, pictures: list[bytes]) -> None:
    outcome = result.outcome
    if not isinstance(outcome, Trajectory):
        raise TypeError(f"row {result.index}: {outcome.message}")
    shown = [outcome.media[reference.digest] for reference in outcome.images[0]]
    answer = msgspec.json.decode(restore_images(outcome.result, outcome.media))
    content = answer["responses_create_params"]["input"][0]["content"]
    if shown != pictures or content != [_part(picture) for picture in pictures]:
        raise RuntimeError(f"row {result.index}: images came back changed")


def _group(pictures: list[bytes], attempts: int) -> list[Row]:
    content = [_part(picture) for picture in pictures]
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        "agent_ref": {"type": "responses_api_agents", "name": "fake_agent"},
    }
    return prepare_rows([row] * attempts, SamplingParams(max_tokens=8), GroupSizes(group=attempts))


def _part(picture: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": to_data_url(picture, "image/png")}


def _echoing_agent(body: dict[str, Any]) -> dict[str, Any]:
    answer = gym_answer([([1, 2], [3])])
    return answer | {"responses_create_params": body["responses_create_params"]}


def _noise(side: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
