"""A worker's rows with images: read before the agent runs, and attached to the turns after."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json

import anyio
import numpy as np
import pytest
from PIL import Image

from gymrl.config import GymConfig, MediaConfig
from gymrl.errors import ConfigError, MediaError
from gymrl.gym.episode import EpisodeOptions
from gymrl.gym.registry import AGENTS, RouteTable
from gymrl.gym.rollouts import RowServer
from gymrl.gym.row_images import ImageReader
from gymrl.media import lift_images, restore_images
from gymrl.telemetry import Timer
from gymrl.token_ledger import (
    VERSION,
    LedgerCall,
    LedgerFrame,
    LedgerImage,
    joined_ids,
    joined_logprobs,
)
from gymrl.types import Failure, Row, Trajectory

TABLE = RouteTable(
    {"eye": {AGENTS: {"simple": {"entrypoint": "a.py", "host": "127.0.0.1", "port": 1}}}}
)
PAD = 99


def png(width: int, height: int, colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


RED, BLUE = png(2, 1), png(3, 1, "blue")
NOISE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def cut_png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, "PNG")
    return file.getvalue()[:900]


CUT = cut_png()


def part(source: str) -> dict:
    return {"type": "input_image", "image_url": source}


def row(*sources: str) -> Row:
    content = [{"type": "input_text", "text": "look"}, *map(part, sources)]
    params = {"input": [{"role": "user", "content": content}]}
    body, media = lift_images(json.dumps({"responses_create_params": params}).encode())
    return Row(
        index=5,
        task_index=0,
        rollout_index=0,
        route="eye",
        rollout_id="r5",
        body=body,
        media=media,
    )


def turn(prompt: list[int], sampled: list[int]) -> dict:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "yes"}],
        "prompt_token_ids": prompt,
        "generation_token_ids": sampled,
        "generation_log_probs": [-0.5] * len(sampled),
    }


class Agent:
    """Answers with the items it was made with, and its request in the answer."""

    def __init__(self, *output: dict) -> None:
        self._output = output
        self.bodies: list[bytes] = []

    async def run(self, url: str, row: Row, agent: str) -> bytes:
        self.bodies.append(row.body)
        request = json.loads(row.body)
        return json.dumps({**request, "response": {"output": self._output}, "reward": 1.0}).encode()


class OneTokenAPixelOfWidth:
    image_token_id = PAD

    def tokens_of(self, width: int, height: int) -> int:
        return width


async def serve(agent: Agent, row: Row, *, checked: bool = False, **settings):
    layout = OneTokenAPixelOfWidth() if checked else None
    reader = ImageReader(MediaConfig(**settings), layout)
    server = RowServer(agent, TABLE, EpisodeOptions(), None, images=reader)
    return (await server.serve(row, Timer())).outcome


async def test_each_turn_has_the_images_that_its_prompt_added():
    output = [
        turn([PAD, PAD, 1], [2]),
        {"type": "function_call_output", "call_id": "c", "output": url(BLUE)},
        turn([PAD, PAD, 1, 2, PAD, PAD, PAD], [3]),
        {"type": "function_call_output", "call_id": "c", "output": '{"x": 1}'},
        turn([PAD, PAD, 1, 2, PAD, PAD, PAD, 3, 4], [5]),
    ]
    agent = Agent(*output)
    outcome = await serve(agent, row(url(RED)), checked=True)
    assert isinstance(outcome, Trajectory), outcome
    assert [[(i.width, i.height) for i in images] for images in outcome.images] == [
        [(2, 1)],
        [(3, 1)],
        [],
    ]
    held = {ref.digest: outcome.media[ref.digest] for turn in outcome.images for ref in turn}
    assert list(held.values()) == [RED, BLUE]


async def test_the_result_holds_references_and_comes_back_as_it_was():
    agent = Agent(
        turn([1], [2]), {"type": "function_call_output", "call_id": "c", "output": url(BLUE)}
    )
    outcome = await serve(agent, row(url(RED), url(RED)))
    assert json.loads(agent.bodies[0])["responses_create_params"]["input"][0]["content"][1] == part(
        url(RED)
    )
    assert b"base64,i" not in outcome.result
    assert sorted(outcome.media.values()) == sorted([RED, BLUE])
    restored = json.loads(restore_images(outcome.result, outcome.media))
    assert (
        restored["responses_create_params"]
        == json.loads(agent.bodies[0])["responses_create_params"]
    )
    assert restored["response"]["output"][1]["output"] == url(BLUE)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (url(b"not an image"), "no image of PNG"),
        (url(RED[:40]), "row 5, turn 0"),
        (url(CUT), "can't be decoded"),
        ("data:image/png;base64,", "nothing in it"),
        ('{"x":1}', "a part of type 'input_image'"),
        ("/etc/passwd", "a part of type 'input_image'"),
        ("http://127.0.0.1:1/x.png", "not in media.schemes"),
        ("file:///etc/passwd", "not in media.schemes"),
    ],
)
async def test_a_prompt_with_a_bad_image_fails_its_row_before_the_agent_is_asked(source, said):
    agent = Agent(turn([1], [2]))
    outcome = await serve(agent, row(url(RED), source))
    assert isinstance(outcome, Failure)
    assert (outcome.error, outcome.kind, outcome.row, outcome.turn) == ("MediaError", "data", 5, 0)
    assert said in outcome.message
    assert agent.bodies == []


async def test_a_tool_that_answers_with_a_broken_image_fails_its_row_and_names_the_turn():
    broken = {
        "type": "function_call_output",
        "call_id": "c",
        "output": "data:image/png;base64,AAAA",
    }
    outcome = await serve(Agent(turn([1], [2]), broken, turn([1, 2, 3], [4])), row(url(RED)))
    assert isinstance(outcome, Failure)
    assert (outcome.error, outcome.turn) == ("MediaError", 1)
    assert "row 5, turn 1" in outcome.message


async def test_tokens_that_do_not_show_the_images_fail_the_row_with_both_numbers():
    outcome = await serve(Agent(turn([PAD, PAD, 1], [2])), row(url(RED), url(BLUE)), checked=True)
    assert isinstance(outcome, Failure)
    assert (outcome.error, outcome.turn) == ("MediaError", 0)
    assert (outcome.fields["expected"], outcome.fields["received"]) == (2, 1)
    assert (
        "row 5, turn 0: its prompt has 1 image regions (of [2 tokens]) for 2 images".replace(
            "[2 tokens]", "[2] tokens"
        )
        in outcome.message
    )


async def test_more_images_than_a_row_may_have_fail_it():
    shown = {"role": "user", "content": [part(url(BLUE))]}
    agent = Agent(turn([1], [2]), shown, turn([1, 2, 3], [4]))
    assert isinstance(await serve(agent, row(url(RED)), max_images_per_row=2), Trajectory)
    for rows, limit in ((row(url(RED)), 1), (row(url(RED), url(BLUE), url(RED)), 2)):
        outcome = await serve(agent, rows, max_images_per_row=limit)
        assert isinstance(outcome, Failure)
        assert f"max_images_per_row={limit}" in outcome.message


async def test_a_run_of_text_reads_no_image_and_says_that_there_were_some():
    """NVIDIA-NeMo/RL#3414: text-only runs opened what tools answered."""
    broken = {
        "type": "function_call_output",
        "call_id": "c",
        "output": "data:image/png;base64,AAAA",
    }
    agent = Agent(turn([1], [2]), broken, turn([1, 2, 3], [4]))
    server = RowServer(agent, TABLE, EpisodeOptions(), None)
    outcome = (await server.serve(row(url(RED)), Timer())).outcome
    assert isinstance(outcome, Trajectory)
    assert (outcome.images, outcome.media) == ((), {})
    assert outcome.notes == {"images_not_read": 1}
    assert json.loads(agent.bodies[0])["responses_create_params"]["input"][0]["content"][1] == part(
        url(RED)
    )


async def test_an_image_named_by_a_file_is_put_into_the_request(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    agent = Agent(turn([1], [2]))
    source = f"file://{tmp_path}/red.png"
    outcome = await serve(
        agent, row(source, url(BLUE)), schemes=("data", "file"), allowed_roots=(str(tmp_path),)
    )
    assert isinstance(outcome, Trajectory), outcome
    content = json.loads(agent.bodies[0])["responses_create_params"]["input"][0]["content"]
    assert content[1:] == [part(url(RED)), part(url(BLUE))]
    assert [len(images) for images in outcome.images] == [2]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"processor": "/models/eye"}, "processor"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, named):
    with pytest.raises(ConfigError, match=named):
        GymConfig(**settings)


class Ledgers:
    """The policy server served one call: the prompt [1, PAD, PAD] and an image at 1."""

    def __init__(self, shown: bytes, media: dict[str, bytes]) -> None:
        image = LedgerImage(1, hashlib.sha256(shown).hexdigest())
        call = LedgerCall(0, -1, 0, 3, 1, "stop", images=(image,))
        ids = joined_ids([np.array([1, PAD, PAD, 2], dtype=np.int32)])
        logprobs = joined_logprobs([np.array([-0.5], dtype=np.float32)])
        self.frame = LedgerFrame(VERSION, "r5", "s", 0, (call,), ids, logprobs, media=media)

    @contextlib.asynccontextmanager
    async def rollout(self, _: str):
        yield self

    async def take(self) -> LedgerFrame:
        return self.frame


async def serve_with(ledgers: Ledgers, source: str, *shown: bytes):
    options = EpisodeOptions(token_source=source)
    reader = ImageReader(MediaConfig(), OneTokenAPixelOfWidth())
    agent = Agent(turn([1, PAD, PAD], [2]))
    server = RowServer(agent, TABLE, options, None, ledgers=ledgers, images=reader)
    return (await server.serve(row(*map(url, shown)), Timer())).outcome


def digests(*files: bytes) -> dict[str, bytes]:
    return {hashlib.sha256(data).hexdigest(): data for data in files}


async def test_images_of_a_black_box_come_from_the_ledger():
    outcome = await serve_with(Ledgers(RED, digests(RED)), "ledger")
    assert isinstance(outcome, Trajectory), outcome
    ((image,),) = outcome.images
    assert (image.media_type, image.width, image.height) == ("image/png", 2, 1)
    assert outcome.media == digests(RED)


@pytest.mark.parametrize(
    ("media", "error", "kind"),
    [
        ({}, "LedgerLostError", "infra"),
        ({next(iter(digests(RED))): BLUE}, "MediaError", "data"),
    ],
)
async def test_an_image_whose_file_did_not_come_with_the_ledger_fails_its_row(media, error, kind):
    """The file is missing after a restart of the server; the row is tried again."""
    outcome = await serve_with(Ledgers(RED, media), "ledger")
    assert isinstance(outcome, Failure)
    assert (outcome.error, outcome.kind, outcome.row) == (error, kind, 5)


async def test_an_answer_with_another_image_than_the_server_showed_fails_its_row():
    """Of the same size, so that its tokens are the same."""
    outcome = await serve_with(Ledgers(RED, {}), "both", RED)
    assert isinstance(outcome, Trajectory), outcome
    outcome = await serve_with(Ledgers(png(2, 1, "green"), {}), "both", RED)
    assert isinstance(outcome, Failure)
    assert (outcome.error, outcome.kind, outcome.turn) == ("LedgerMismatchError", "data", 0)
    assert "row 5, turn 0: the policy server showed 1 images" in outcome.message


async def test_an_image_that_many_rows_show_at_once_is_decoded_once():
    reader = ImageReader(MediaConfig())
    images = []

    async def load() -> None:
        images.append(await reader.load(url(RED)))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(load)
    assert len({image.digest for image in images}) == 1
    assert reader.num_decoded == 1
    with pytest.raises(MediaError):
        await reader.load(url(CUT))
    with pytest.raises(MediaError):
        await reader.load(url(CUT))
    assert reader.num_decoded == 1
