"""Every rank enters; each gets whole groups; when one fails, all fail with the same cause."""

import pytest

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def shared(launch):
    return launch("collect", GYM_WORKERS="2")


@pytest.fixture(scope="module")
def alone(launch):
    return launch("collect", ranks=0)


def test_each_rank_gets_whole_groups_and_together_they_have_all(shared):
    assert shared.code == 0, shared.log
    for call in range(2):
        shares = [shared.of(rank)[call] for rank in (0, 1)]
        assert sorted(shares[0]["groups"] + shares[1]["groups"]) == [0, 1, 2, 3, 4]
        assert {n for share in shares for n in share["samples"]} == {2}
        assert {share["reward_mean"] for share in shares} == {0.25}
    states = [facts["state"] for facts in shared.said if "state" in facts]
    assert states == [{"calls": 2, "version": 0, "position": 10, "pending": []}] * 2


def test_several_gym_workers_share_a_nodes_groups(shared):
    assert len({pid for facts in shared.said for pid in facts.get("pids", [])}) == 2


def test_plain_python_is_a_world_of_one(alone):
    assert alone.code == 0, alone.log
    assert alone.said[0]["groups"] == [0, 1, 2, 3, 4]
    assert alone.said[0]["size"] == 1


def test_the_same_rollouts_come_out_whatever_the_number_of_ranks(alone, shared):
    together = sorted(t for rank in (0, 1) for t in shared.of(rank)[0]["tokens"])
    assert together == sorted(alone.said[0]["tokens"])


def test_a_group_that_exists_is_used_and_left(launch):
    job = launch("existing_group")
    assert job.code == 0, job.log
    assert [facts["rank"] for facts in job.said if "group" in facts] in ([0, 1], [1, 0])


def test_groups_of_a_stream_are_never_older_than_asked(launch):
    job = launch("stream")
    assert job.code == 0, job.log
    for rank in (0, 1):
        steps = [facts for facts in job.of(rank) if "staleness" in facts]
        assert len(steps) == 4
        assert max(age for step in steps for age in step["staleness"]) <= 1
    states = [facts["state"] for facts in job.said if "state" in facts]
    assert states[0] == states[1]
    assert states[0]["position"] == 16 + len(states[0]["pending"])


def test_a_second_stream_goes_on_with_the_firsts_groups_and_hands_none_out_twice(launch):
    job = launch("two_streams", ranks=0)
    assert job.code == 0, job.log
    assert "another stream was begun" in job.said[0]["refused"]
    assert job.said[1]["rewards"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_a_stream_whose_groups_are_all_dropped_does_not_try_for_ever(launch):
    job = launch("all_dropped", ranks=0)
    assert job.said[-1]["error"] == "RolloutStreamError"
    assert "13 groups in a row were dropped" in job.said[-1]["text"]


def test_a_rank_that_waits_does_not_burn_a_core(launch):
    job = launch("idle")
    assert job.code == 0, job.log
    assert job.of(1)[0]["busy"] < 0.3


@pytest.mark.parametrize("name", ["body_raises", "collective_waits"])
def test_an_exception_on_one_rank_is_raised_on_all(launch, name):
    job = launch(name, all_speak=True)
    assert job.code != 0
    errors = job.errors()
    assert errors[1]["error"] == "KeyError"
    assert errors[0]["error"] == "RankFailedError", errors
    assert "rank 1" in errors[0]["text"]
    assert "the trainer's own" in errors[0]["text"]
    assert errors[0]["cause"] == "KeyError"


def test_a_rank_that_was_given_other_settings_names_them_and_ends_the_job(launch):
    errors = launch("other_settings", all_speak=True).errors()
    assert errors[1]["error"] == "ConfigError", errors
    assert "rank 1 was given another per_node.gym_workers than rank 0" in errors[1]["text"]
    assert (errors[0]["error"], errors[0]["cause"]) == ("RankFailedError", "ConfigError")


def test_a_failing_engine_ends_every_rank_with_its_error(launch):
    job = launch("engine_fails", all_speak=True)
    errors = job.errors()
    assert errors[0]["error"] == "RowValueError"
    assert "'nowhere'" in errors[0]["text"]
    assert errors[1]["error"] == "RankFailedError"
    assert errors[1]["cause"] == "RowValueError"


def test_a_killed_worker_without_restarts_ends_every_rank(launch):
    job = launch("worker_dies", all_speak=True)
    errors = job.errors()
    assert errors[0]["error"] == "RolloutStreamError"
    assert "exit code 3" in errors[0]["text"]
    assert errors[1]["error"] == "RankFailedError"
    assert "exit code 3" in errors[1]["text"]


def test_a_rank_that_is_stopped_is_found_and_named_also_while_weights_are_gathered(launch):
    job = launch("rank_stuck", HEARTBEAT_S="6")
    errors = job.errors()
    assert errors[0]["error"] == "RankFailedError"
    assert "rank 1" in errors[0]["text"]
    assert "heartbeat_timeout_s" in errors[0]["text"]


def test_ranks_whose_launcher_was_killed_end(launch):
    job = launch("launcher_killed")
    assert job.code == -9
    errors = job.errors()
    assert {errors[0]["error"], errors[1]["error"]} == {"RankFailedError"}
    assert all("torchrun, which had started it, was killed" in e["text"] for e in errors.values())


def test_leaving_a_stream_by_an_error_ends_what_runs_ahead(launch):
    job = launch("stream_body_raises", ranks=0)
    assert job.said[-1]["error"] == "KeyError"
    assert "never" not in job.log
    assert "Task was destroyed" not in job.log


def test_a_step_that_takes_too_long_is_given_up(launch):
    job = launch("late", ranks=0)
    assert job.said[-1]["error"] == "DeadlineExceeded"
    assert "collect_timeout_s" in job.said[-1]["text"]


@pytest.fixture(scope="module")
def step(launch, tmp_path_factory):
    return launch("step", tmp_path_factory.mktemp("runs"))


def test_a_step_of_the_recipe_learns_the_same_on_any_number_of_ranks(step):
    assert step.code == 0, step.log
    learned = [facts for facts in step.said if "gap" in facts]
    assert [facts["parallel"] for facts in learned if facts["rank"] == 1] == [
        "ddp",
        "ddp",
        "fsdp2",
        "fsdp2",
    ]
    assert max(facts["gap"] for facts in learned) < 1e-6
    for facts in learned:
        assert facts["numbers"] == pytest.approx(dict.fromkeys(facts["numbers"], 0.0), abs=1e-5)


def test_ranks_that_find_different_checkpoints_do_not_go_on_from_them(step):
    refused = [facts["refused"] for facts in step.said if "refused" in facts]
    assert len(refused) == 2
    assert all("after step 2" in text and "after step 1" in text for text in refused)
