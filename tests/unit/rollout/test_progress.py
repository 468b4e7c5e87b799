from gymrl.rollout.progress import Progress


def test_failures_are_counted_by_class_and_stragglers_by_agent():
    progress = Progress(redispatches=4, groups_dropped=1)
    progress.add_failure("GymRequestError", "math")
    progress.add_failure("RolloutTimeout", "math")
    progress.add_failure("RolloutTimeout", "code")
    progress.add_failure("RowRejected", "code")
    assert progress.metrics() == {
        "rollout_failures/GymRequestError": 1.0,
        "rollout_failures/RolloutTimeout": 2.0,
        "rollout_failures/RowRejected": 1.0,
        "rollout_stragglers/math": 1.0,
        "rollout_stragglers/code": 1.0,
        "rollout_redispatches": 4.0,
        "rollout_rejected_rows": 1.0,
        "rollout_dropped_groups": 1.0,
    }
    assert (progress.rows_failed, progress.rows_rejected) == (4, 1)


def test_a_run_without_incidents_says_so():
    assert Progress().metrics() == {
        "rollout_redispatches": 0.0,
        "rollout_rejected_rows": 0.0,
        "rollout_dropped_groups": 0.0,
    }
