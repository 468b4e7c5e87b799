"""New weights reach every generator, sharded or not, also one that was started again."""

import pytest

from gymrl.recipes.say_word import build_word_model

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("ranks", [0, pytest.param(2, id="fsdp2")])
def test_generators_sample_from_the_trainers_weights_also_after_a_death(launch, tmp_path, ranks):
    job = launch("word_model", build_word_model(tmp_path / "model", layers=1), ranks=ranks)
    assert job.code == 0, job.log
    assert {facts["killed"] for facts in job.said} == {False, True}
    assert {facts["version"] for facts in job.said if facts["killed"]} == {2}
    assert max(facts["gap"] for facts in job.said) < 1e-3


def test_a_generation_that_ran_across_an_update_has_tokens_of_two_ages(launch, tmp_path):
    job = launch("ages", build_word_model(tmp_path / "model", layers=1), ranks=0)
    assert job.code == 0, job.log
    steps = [facts for facts in job.said if "numbers" in facts]
    assert len(steps) >= 4
    assert max(number for step in steps for number in step["numbers"]) == 2
    assert max(step["gap"] for step in steps) < 1e-3
    metrics = [step["metrics"] for step in steps]
    assert all(step["versioned_tokens_rate"] == 1.0 for step in metrics)
    assert [step["metrics"]["staleness_max"] for step in steps] == [
        step["oldest"] for step in steps
    ]
    assert any(0 < step["stale_tokens_rate"] < 1 for step in metrics)
