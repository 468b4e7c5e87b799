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
