"""Rows with images through real worker processes: each image crosses once, and is whole."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

from gymrl.config import GymConfig, MediaConfig, RolloutConfig
from gymrl.media import restore_images, to_data_url
from gymrl.records import RecordWriter, RunRecord, read_groups
from gymrl.rollout.engine import RolloutEngine
from gymrl.testing.gym_server import FakeGymServer, gym_answer
from gymrl.types import Failure


def noise(side: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


PROMPTS = [noise(200, 0), noise(200, 1)]
SEEN = noise(100, 2)


def part(data: bytes) -> dict:
    return {"type": "input_image", "image_url": to_data_url(data, "image/png")}


def row(data: bytes | None, **fields) -> dict:
    shown = [] if data is None else [part(data)]
    content = [{"type": "input_text", "text": "look"}, *shown]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        "agent_ref": {"type": "responses_api_agents", "name": "fake_agent"},
        **fields,
    }


def looking_agent(body: dict) -> dict:
    """Two turns; a tool shows the second one an image. The answer echoes the request."""
    answer = gym_answer([([1, 2], [3]), ([1, 2, 3, 4], [5])])
    answer["response"]["output"][1]["output"] = to_data_url(SEEN, "image/png")
    return answer | {"responses_create_params": body["responses_create_params"]}


def config(server: FakeGymServer, **changes) -> RolloutConfig:
    gym = GymConfig(registry_url=server.url, media=changes.pop("media", MediaConfig()))
    return RolloutConfig(gym=gym, **changes)


async def test_an_image_crosses_once_for_a_group_and_comes_back_to_every_row():
    """aio-libs/aiohttp#4474 and the cost of sending a prompt's image for each of its attempts."""
    async with FakeGymServer(looking_agent) as server:
        async with RolloutEngine(config(server, num_workers=2)) as engine:
            stream = engine.stream([row(data) for data in PROMPTS], num_generations=8)
            groups = sorted([group async for group in stream], key=lambda group: group.index)
            payload = stream.progress.media
    asked = server.bodies[0]["responses_create_params"]["input"][0]["content"]
    assert asked[1] == part(PROMPTS[0])
    for group, prompt in zip(groups, PROMPTS, strict=True):
        assert len(group.trajectories) == 8
        for sample in group.trajectories:
            shown = [[sample.media[ref.digest] for ref in refs] for refs in sample.images]
            assert shown == [[prompt], [SEEN]]
            answer = json.loads(restore_images(sample.result, sample.media))
            assert answer["responses_create_params"]["input"][0]["content"][1] == part(prompt)
            assert answer["response"]["output"][1]["output"] == to_data_url(SEEN, "image/png")
        for data in (prompt, SEEN):
            held = [m for s in group.trajectories for m in s.media.values() if m == data]
            assert len(held) == 8
            assert len({id(each) for each in held}) == 1
    assert payload.images == 16 + 2 * 16
    assert payload.sent == 2 + 2
    assert payload.physical_bytes == sum(map(len, PROMPTS)) + 2 * len(SEEN)
    assert payload.logical_bytes == 16 * sum(map(len, PROMPTS)) + 16 * len(SEEN)
    assert payload.physical_bytes < payload.serialized_bytes < payload.physical_bytes + 48 * 72
    metrics = stream.progress.metrics()
    assert metrics["media_payload/sent"] == 4.0


async def test_a_row_with_a_broken_image_fails_alone_and_nothing_is_asked_for_it():
    rows = [row(PROMPTS[0]), row(b"\x89PNG broken"), row(None)]
    async with FakeGymServer(looking_agent) as server:
        settings = config(server, in_process=True, failure_policy="mask")
        async with RolloutEngine(settings) as engine:
            groups = await engine.run(rows, num_generations=2)
    assert [len(group.failures) for group in groups] == [0, 2, 0]
    for failure in groups[1].samples:
        assert isinstance(failure, Failure)
        assert (failure.error, failure.kind, failure.attempts) == ("MediaError", "data", 2)
    assert sorted(server.requests) == [0, 1, 4, 5]
    assert [len(refs) for refs in groups[2].trajectories[0].images] == [0, 1]


async def test_a_retried_row_has_its_images_too():
    def fails_first(body: dict) -> dict | bytes:
        if "." not in body["_ng_rollout_id"]:
            return b"no json"
        return looking_agent(body)

    async with FakeGymServer(fails_first) as server:
        async with RolloutEngine(config(server, in_process=True)) as engine:
            (group,) = await engine.run([row(PROMPTS[0])], num_generations=2)
    assert server.requests == {0: 2, 1: 2}
    for sample in group.trajectories:
        assert [sample.media[ref.digest] for ref in sample.images[0]] == [PROMPTS[0]]


async def test_images_go_to_a_file_once_and_come_back(tmp_path):
    path = tmp_path / "run.jsonl"
    async with FakeGymServer(looking_agent) as server:
        async with RolloutEngine(config(server, in_process=True)) as engine:
            groups = await engine.run([row(data) for data in PROMPTS], num_generations=3)
    with RecordWriter(path, RunRecord()) as writer:
        for group in groups:
            writer.write(group)
    assert len(list((tmp_path / "run.jsonl.media").iterdir())) == 3
    assert path.stat().st_size < len(PROMPTS[0])
    for before, after in zip(groups, read_groups(path), strict=True):
        assert [s.images for s in after.trajectories] == [s.images for s in before.trajectories]
        assert [s.media for s in after.trajectories] == [s.media for s in before.trajectories]


@pytest.mark.parametrize("in_process", [True, False])
async def test_a_run_without_media_shows_images_and_says_that_it_read_none(in_process):
    async with FakeGymServer(looking_agent) as server:
        settings = config(server, media=None, in_process=in_process)
        async with RolloutEngine(settings) as engine:
            (group,) = await engine.run([row(PROMPTS[0])], num_generations=1)
    (sample,) = group.trajectories
    assert (sample.images, sample.media) == ((), {})
    assert sample.notes["images_not_read"] == 1
    asked = server.bodies[0]["responses_create_params"]["input"][0]["content"]
    assert asked[1] == part(PROMPTS[0])


async def test_an_image_of_thirty_megabytes_goes_all_the_way_and_back():
    """aio-libs/aiohttp#4474, #5205: bodies above a mebibyte met HTTP 413."""
    file = io.BytesIO()
    Image.effect_mandelbrot((3200, 3200), (-2, -1.5, 1, 1.5), 8).convert("RGB").save(file, "BMP")
    large = file.getvalue()
    assert len(large) > 30_000_000
    media = MediaConfig(max_image_bytes=40_000_000)
    async with FakeGymServer(looking_agent) as server:
        async with RolloutEngine(config(server, media=media)) as engine:
            (group,) = await engine.run([row(large)], num_generations=1)
    (sample,) = group.trajectories
    assert [sample.media[ref.digest] for ref in sample.images[0]] == [large]
    asked = server.bodies[0]["responses_create_params"]["input"][0]["content"]
    assert asked[1] == part(large)


async def test_an_image_above_the_limit_fails_its_row():
    media = MediaConfig(max_image_bytes=100_000)
    async with FakeGymServer(looking_agent) as server:
        settings = config(server, media=media, in_process=True, failure_policy="mask")
        async with RolloutEngine(settings) as engine:
            (group,) = await engine.run([row(PROMPTS[0])], num_generations=1)
    (failure,) = group.failures
    assert "media.max_image_bytes=100000" in failure.message
    assert server.requests == {}
