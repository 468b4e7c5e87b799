"""A trainer on two ranks sends its weights to the vLLM engines of its node."""

import os

import pytest

from gymrl.errors import ConfigError
from gymrl.generation.vllm_process import is_cpu_build
from gymrl.recipes.say_word import build_word_model


def why_not():
    try:
        return None if is_cpu_build() else "this job runs vLLM on a CPU"
    except ConfigError as error:
        return str(error)


REASON = why_not()
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(REASON is not None and os.environ.get("CI") != "true", reason=str(REASON)),
]


def test_engines_sample_from_what_was_sent_and_one_that_dies_ends_the_job(launch, tmp_path):
    job = launch("transfer", build_word_model(tmp_path / "model", layers=1), all_speak=True)
    updates = {facts["rank"]: [] for facts in job.said}
    for facts in job.said:
        if "gap" in facts:
            updates[facts["rank"]].append(facts["version"])
            assert facts["gap"] < 1e-3
    assert updates == {0: [1, 2], 1: [1, 2]}, job.log

    shown = {facts["rank"]: facts["shown"] for facts in job.said if "shown" in facts}
    assert shown[1] is None
    assert {uuid: handle["storage_device"] for uuid, handle in shown[0][0].items()} == {
        "GPU-0": 0,
        "GPU-1": 1,
    }

    errors = job.errors()
    assert errors[0]["error"] == "RolloutStreamError"
    assert "can't be started again with weights '2'" in errors[0]["text"]
    assert errors[1]["error"] == "RankFailedError"
    assert "can't be started again with weights '2'" in errors[1]["text"]
