"""Every benchmark runs in a tiny size and gives well-formed JSON. Nothing is said about speed."""

from __future__ import annotations

import math

import msgspec
import pytest
from tokenizers import Tokenizer, models

from benchmarks.actors import arrays, calls, streams
from benchmarks.comparison import Clock, Comparison, Report
from benchmarks.generation import next_prompt
from benchmarks.media import images, routes
from benchmarks.rollout import admission, driver, lag, scaling, start
from benchmarks.viewer import opening


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>")).save(str(path))
    return path


def check(comparisons: list[Comparison]) -> None:
    report = Clock().report("smoke", comparisons, {}, quick=True)
    read = msgspec.json.decode(msgspec.json.encode(report), type=Report)
    assert read == report
    assert comparisons
    for one in comparisons:
        assert one.sides
        assert all(math.isfinite(value) for value in one.sides.values())
        assert one.value is None or (math.isfinite(one.value) and one.value >= 0)


async def test_calls():
    check(await calls.measure(calls.TINY, None, None))


async def test_next_prompts():
    check(await next_prompt.measure(calls=1, rounds=1, sizes=(100,)))


async def test_streams():
    check(await streams.measure(streams.TINY, None, None))


async def test_arrays():
    check(await arrays.measure(arrays.TINY, None, None))


async def test_admission(tokenizer):
    check(await admission.measure(admission.TINY, tokenizer, None))


async def test_what_a_call_sends_beyond_its_row_stays_small(tokenizer):
    found = await admission.measure(admission.TINY, tokenizer, None)
    sent = [one for one in found if one.name.startswith("bytes")]
    assert [one.reached for one in sent] == [True, True]


async def test_driver():
    check(await driver.measure(driver.TINY))


async def test_lag(tokenizer):
    check(await lag.measure(lag.TINY, str(tokenizer)))


async def test_scaling():
    check(await scaling.measure(scaling.TINY))


async def test_start(tokenizer):
    check(await start.measure(start.TINY, tokenizer, with_ray=False))


def test_opening_a_file_of_rollouts():
    check(opening.measure(opening.TINY))


async def test_images():
    check(await images.measure(images.TINY))


async def test_routes():
    check(await routes.measure(routes.TINY))
