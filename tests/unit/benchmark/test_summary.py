import msgspec
import numpy as np
import pytest

from gymrl.benchmark.summary import RunTally, summarise, timing_shares
from gymrl.types import Failure, FailureKind, Reward, RolloutGroup, Row, Trajectory, Turn


def trajectory(reward, *, turns=1, prompt=3, sampled=2, reason=None, total=None):
    length = turns * (prompt + sampled)
    spans = tuple(
        Turn(start=k, generation_start=k + prompt, end=k + prompt + sampled)
        for k in range(0, length, prompt + sampled)
    )
    ledger = Reward(reward)
    return Trajectory(
        agent="agent",
        token_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        turns=spans,
        reward=ledger if total is None else ledger.adjusted("penalty", total),
        incomplete_reason=reason,
    )


def failure(error="GymRequestError", message="HTTP 422", row=0):
    return Failure(kind=FailureKind.DATA, error=error, message=message, row=row)


def group(index, samples, *, source="sums", route="sums_agent", timings=None):
    body = msgspec.json.encode({"task_source": source} if source else {})
    rows = tuple(
        Row(
            index=index * len(samples) + k,
            task_index=index,
            rollout_index=k,
            route=route,
            rollout_id=f"r{index}-{k}",
            body=body,
        )
        for k in range(len(samples))
    )
    return RolloutGroup(
        index=index, task_index=index, rows=rows, samples=tuple(samples), timings=timings
    )


def test_a_source_counts_its_prompts_rows_tokens_and_turns():
    summary = summarise([group(0, [trajectory(1.0), trajectory(0.0, turns=2)])])
    (source,) = summary.sources
    assert source.source == "sums"
    assert (source.prompts, source.rows, source.failed) == (1, 2, 0)
    assert (source.passed, source.pass_rate, source.mean_reward) == (1, 0.5, 0.5)
    assert (source.prompt_tokens, source.generated_tokens) == (9, 6)
    assert (source.turns, source.max_turns) == (3, 2)


def test_a_failed_row_is_counted_and_enters_no_mean():
    summary = summarise([group(0, [trajectory(1.0), failure()])])
    (source,) = summary.sources
    assert (source.rows, source.failed, source.scored) == (2, 1, 1)
    assert (source.mean_reward, source.pass_rate) == (1.0, 1.0)
    assert (summary.num_failed, summary.num_rows) == (1, 2)


def test_a_source_whose_rows_all_failed_has_no_mean_rather_than_zero():
    (source,) = summarise([group(0, [failure(), failure()])]).sources
    assert source.mean_reward is None
    assert source.pass_rate is None
    assert source.mixed_groups == 0


def test_only_groups_whose_rewards_differ_are_mixed():
    groups = [
        group(0, [trajectory(1.0), trajectory(0.0)]),
        group(1, [trajectory(1.0), trajectory(1.0)]),
        group(2, [trajectory(0.5), failure()]),
        group(3, [trajectory(0.2), trajectory(0.3), failure()]),
    ]
    assert summarise(groups).sources[0].mixed_groups == 2


def test_passing_is_the_verifiers_word_and_the_mean_is_of_the_shaped_total():
    (source,) = summarise([group(0, [trajectory(1.0, total=0.0)])]).sources
    assert source.passed == 1
    assert source.mean_reward == 0.0


def test_sources_come_in_row_order_whatever_finished_first():
    groups = [
        group(1, [trajectory(0.0)], source="tools"),
        group(0, [trajectory(1.0)], source="sums"),
        group(2, [trajectory(1.0)], source="sums"),
    ]
    summary = summarise(groups)
    assert [source.source for source in summary.sources] == ["sums", "tools"]
    assert [source.prompts for source in summary.sources] == [2, 1]


def test_rows_without_a_task_source_are_counted_under_their_agent():
    summary = summarise([group(0, [trajectory(1.0)], source=None, route="some_agent")])
    assert summary.sources[0].source == "some_agent"


def test_failures_are_listed_by_class_the_most_frequent_first_with_the_first_as_example():
    groups = [
        group(0, [failure("RolloutTimeout", "row 0 timed out"), trajectory(1.0)]),
        group(
            1,
            [failure("GymRequestError", "row 2: 422", row=2), failure(message="row 3: 400", row=3)],
        ),
    ]
    listed = [(f.error, f.count, f.example.message) for f in summarise(groups).failures]
    assert listed == [
        ("GymRequestError", 2, "row 2: 422"),
        ("RolloutTimeout", 1, "row 0 timed out"),
    ]


def test_the_runs_timings_are_those_of_the_group_that_carries_them():
    groups = [group(0, [trajectory(1.0)], timings={"timing/rollout/total": 2.0})]
    summary = summarise([group(1, [trajectory(1.0)]), *groups], seconds=3.5)
    assert summary.timings == {"timing/rollout/total": 2.0}
    assert summary.seconds == 3.5


def test_truncated_rows_are_counted():
    samples = [trajectory(0.0, reason="max_output_tokens"), trajectory(1.0)]
    assert summarise([group(0, samples)]).sources[0].truncated == 1


def test_an_empty_run_has_no_sources():
    summary = summarise([])
    assert summary.sources == ()
    assert summary.num_rows == 0


def test_timing_shares_are_of_the_total_and_leave_out_percentages_and_single_shards():
    shares = timing_shares(
        {
            "timing/rollout/total": 10.0,
            "timing/rollout/run_rollouts": 9.9,
            "timing/rollout/postprocess_results": 1.0,
            "timing/rollout/await_results": 8.0,
            "timing/rollout/postprocess_results_pct": 10.0,
            "timing/rollout/shard/a/await_results": 8.0,
        }
    )
    assert list(shares) == ["await_results", "postprocess_results"]
    assert shares["await_results"] == pytest.approx(0.8)


def test_without_a_total_there_are_no_shares():
    assert timing_shares({}) == {}
    assert timing_shares({"timing/rollout/await_results": 1.0}) == {}


def test_failures_of_groups_that_were_left_out_are_counted_too():
    tally = RunTally()
    tally.add(group(0, [trajectory(1.0)]))
    tally.add_failure(failure(row=3))
    summary = tally.summary()
    assert (summary.num_failed, summary.failures[0].example.row) == (1, 3)
    assert (summary.num_rows, summary.sources[0].failed) == (1, 0)


def test_the_example_of_a_class_is_that_of_the_first_row_whatever_failed_first():
    tally = RunTally()
    for row in (5, 2, 9):
        tally.add_failure(failure(row=row))
    (listed,) = tally.summary().failures
    assert (listed.count, listed.example.row) == (3, 2)
