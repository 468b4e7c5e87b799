from gymrl.rollout.timing import merge_timings


def test_one_instance_reports_unchanged():
    report = {"timing/rollout/total": 3.0, "other/name": 1.0}
    assert merge_timings({"default": report}) == report


def test_no_reports_give_no_metrics():
    assert merge_timings({}) == {}


def test_several_instances_are_kept_apart_and_the_slowest_counts():
    merged = merge_timings(
        {
            "math/0": {"timing/rollout/total": 3.0, "timing/rollout/postprocess_results_pct": 10.0},
            "math/1": {"timing/rollout/total": 5.0, "timing/rollout/postprocess_results_pct": 2.0},
        }
    )
    assert merged == {
        "timing/rollout/shard/math/0/total": 3.0,
        "timing/rollout/shard/math/0/postprocess_results_pct": 10.0,
        "timing/rollout/shard/math/1/total": 5.0,
        "timing/rollout/shard/math/1/postprocess_results_pct": 2.0,
        "timing/rollout/total": 5.0,
        "timing/rollout/postprocess_results_pct": 10.0,
    }


def test_a_metric_that_one_instance_lacks_is_rolled_up_over_the_others():
    merged = merge_timings({"a": {"p/x": 1.0}, "b": {"p/x": -2.0, "p/y": 4.0}}, "p/")
    assert merged["p/x"] == 1.0
    assert merged["p/y"] == 4.0
    assert merged["p/shard/b/x"] == -2.0
