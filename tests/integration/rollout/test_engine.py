import contextlib
import gc
import json
import logging

import anyio
import pytest

from gymrl.config import GenerationConfig, SamplingParams, ShardConfig
from gymrl.errors import (
    ConfigError,
    DeadlineExceeded,
    GymTransportError,
    IncompleteStreamError,
    NoGenerationError,
    RolloutRedispatchExhausted,
    RolloutStreamError,
    RowIndexValueError,
    RowValueError,
    ServerDiedError,
    UnsupportedOptionError,
)
from gymrl.rollout.prepare import GroupSizes
from gymrl.scoring import LengthPenaltyConfig, ScoringConfig
from gymrl.tensors import to_batch
from gymrl.types import Failure
from tests.integration.actors.watching import until, what_is_left, what_is_open


def facts(sample):
    return json.loads(sample.result)


async def test_groups_come_back_in_completion_order_and_whole(engine, row, tmp_path):
    first, second = tmp_path / "the first is here", tmp_path / "the second is here"
    rows = [row(delay=0.1, until=str(second)), row(), row(until=str(first))]
    groups = []
    async for group in engine.stream(rows, num_generations=3):
        groups.append(group)
        (second if first.exists() else first).touch()
    assert [group.index for group in groups] == [1, 2, 0]
    for group in groups:
        assert [r.rollout_index for r in group.rows] == [0, 1, 2]
        assert [r.index for r in group.rows] == [3 * group.index + n for n in range(3)]
        assert len(group.trajectories) == 3
        assert len({facts(sample)["pid"] for sample in group.samples}) == 1
        assert group.metrics["total_reward/mean"] == 1.0


async def test_no_group_is_split_over_workers(make_engine, row):
    async with make_engine(num_workers=3) as engine:
        groups = await engine.run([row() for _ in range(5)], num_generations=4)
    homes = [{facts(sample)["pid"] for sample in group.samples} for group in groups]
    assert [len(home) for home in homes] == [1, 1, 1, 1, 1]
    assert len(set.union(*homes)) == 3


async def test_run_returns_groups_in_input_order(engine, row):
    rows = [row(delay=0.2, reward=0), row(delay=0.0, reward=1), row(delay=0.1, reward=0)]
    groups = await engine.run(rows, num_generations=2)
    assert [group.index for group in groups] == [0, 1, 2]
    assert [group.samples[0].reward.total for group in groups] == [0.0, 1.0, 0.0]


async def test_groups_are_yielded_while_a_straggler_runs(engine, row):
    async with contextlib.aclosing(engine.stream([row(delay=30), row(), row()])) as stream:
        with anyio.fail_after(30):
            first, second = await anext(stream), await anext(stream)
    assert {first.index, second.index} == {1, 2}


async def test_the_last_group_carries_the_timings_of_every_instance(engine, row):
    groups = [group async for group in engine.stream([row(), row(delay=0.1)])]
    assert groups[0].timings is None
    timings = groups[1].timings
    assert timings["timing/rollout/shard/default/0/run_rollouts"] == 0.0
    assert timings["timing/rollout/shard/default/1/run_rollouts"] == 0.1
    assert timings["timing/rollout/run_rollouts"] == 0.1
    assert timings["timing/rollout/total"] >= 0.1
    assert engine.progress.timings == timings


async def test_equal_runs_use_equal_seeds_whatever_completes_first(make_engine, row):
    async def seeds(delays):
        async with make_engine(seed=3, num_workers=2) as engine:
            groups = await engine.run([row(delay=d) for d in delays], num_generations=2)
            return [facts(sample)["seed"] for group in groups for sample in group.samples]

    first = await seeds([0.0, 0.1])
    assert first == await seeds([0.1, 0.0])
    assert len(set(first)) == 4


async def test_a_bad_row_is_refused_before_any_request(engine, row, log):
    with pytest.raises(RowValueError, match=r"row 1: .*'nope' \(known: code, math\)"):
        engine.stream([row(), row("nope")])
    with pytest.raises(UnsupportedOptionError):
        engine.stream([row()], sampling=SamplingParams(top_k=4))
    assert "run" not in log.read_text()


async def test_two_streams_over_one_engine_both_end(engine, row):
    results = {}

    async def consume(name, delay):
        rows = [row(delay=delay * n) for n in range(4)]
        results[name] = await engine.run(rows, num_generations=2)

    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume, "one", 0.05)
            tasks.start_soon(consume, "two", 0.02)
    for groups in results.values():
        assert [group.index for group in groups] == [0, 1, 2, 3]


async def test_leaving_early_ends_what_is_in_flight(engine, row, log):
    with anyio.fail_after(40):
        stream = engine.stream([row(), row(delay=60), row(delay=60)])
        async with contextlib.aclosing(stream):
            async for _ in stream:
                break
    events = log.read_text()
    assert events.count("left") == events.count("run")
    assert len(await engine.run([row()])) == 1


async def test_a_cancelled_consumer_ends_what_is_in_flight(engine, row, log):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run, [row(delay=60), row(delay=60)])
        await until(lambda: log.read_text().count("run") == 2)
        tasks.cancel_scope.cancel()
    events = log.read_text()
    assert events.count("left") == events.count("run") == 2


async def test_a_stream_that_is_never_iterated_sends_nothing(engine, row, log):
    stream = engine.stream([row()])
    await stream.aclose()
    assert "run" not in log.read_text()


async def test_a_failed_row_ends_the_run_naming_row_agent_instance_and_cause(make_engine, row):
    async with make_engine() as engine:
        with pytest.raises(RuntimeError) as caught:
            await engine.run([row(), row(fail_times=9)])
    message = str(caught.value)
    assert message.startswith("row 1 (agent 'math', instance 'default') failed: NoGenerationError")
    assert (caught.value.row, caught.value.instance) == (1, "default")
    cause = caught.value.__cause__
    assert isinstance(cause, NoGenerationError)
    assert (cause.row, cause.turn) == (1, 2)
    assert "Traceback of the worker" in cause.__notes__[0]


async def test_a_masked_failure_stays_in_its_place_and_is_in_no_mean(make_engine, row):
    rows = [row(reward=0.5), row(fail_times=9), row(reward=1.0), row(reward=1.0)]
    async with make_engine(failure_policy="mask") as engine:
        sizes = GroupSizes(group=4)
        (group,) = [group async for group in engine.stream_repeated(rows, sizes)]
        progress = engine.progress
    assert [isinstance(sample, Failure) for sample in group.samples] == [False, True, False, False]
    failure = group.samples[1]
    assert (failure.row, failure.agent, failure.instance) == (1, "math", "default")
    assert group.metrics["total_reward/mean"] == pytest.approx(2.5 / 3)
    assert group.metrics["rollout_failures/NoGenerationError"] == 1
    assert progress.failures == {"NoGenerationError": 1}
    assert (progress.rows_done, progress.rows_failed) == (3, 1)
    batch = to_batch([group], pad_token_id=0)
    assert batch.reward_valid.tolist() == [True, False, True, True]


async def test_a_dropped_group_is_counted_and_the_others_are_yielded(make_engine, row):
    rows = [row(), row(fail_times=9), row()]
    async with make_engine(failure_policy="drop_group") as engine:
        groups = await engine.run(rows, num_generations=2)
        progress = engine.progress
    assert [group.index for group in groups] == [0, 2]
    assert (progress.groups, progress.groups_done, progress.groups_dropped) == (3, 2, 1)
    assert progress.timings


async def test_a_failed_row_is_dispatched_again_and_then_equals_a_fresh_one(make_engine, row):
    async with make_engine(max_data_attempts=2, seed=1, num_workers=2) as engine:
        (group,) = await engine.run([row(fail_times=1)])
        (fresh,) = await engine.run([row()])
        assert engine.progress.redispatches == 1
    assert facts(group.samples[0])["seed"] == facts(fresh.samples[0])["seed"]
    assert group.samples[0].token_ids.tolist() == fresh.samples[0].token_ids.tolist()
    assert facts(group.samples[0])["id"] == group.rows[0].rollout_id
    assert group.rows[0].rollout_id.endswith(".1")


async def test_a_row_of_a_group_is_dispatched_again_where_its_group_is(make_engine, row):
    async with make_engine(max_data_attempts=2, num_workers=2) as engine:
        rows = [row(), row(fail_times=1)]
        (group,) = [g async for g in engine.stream_repeated(rows, GroupSizes(group=2))]
    assert facts(group.samples[0])["pid"] == facts(group.samples[1])["pid"]


async def test_a_spent_infra_budget_ends_the_run_whatever_the_policy(make_engine, row):
    rows = [row(fail_times=9, kind="infra", error="GymTransportError")]
    async with make_engine(failure_policy="mask", max_infra_attempts=2) as engine:
        with pytest.raises(RolloutRedispatchExhausted, match="failed 2 times") as caught:
            await engine.run(rows)
    assert isinstance(caught.value.__cause__, GymTransportError)
    assert (caught.value.row, caught.value.attempts) == (0, 2)


async def test_a_row_that_only_times_out_follows_the_policy(make_engine, row):
    rows = [row(fail_times=9, kind="infra", error="RolloutTimeout"), row()]
    async with make_engine(failure_policy="mask", max_infra_attempts=1) as engine:
        groups = await engine.run(rows)
    assert [group.samples[0].__class__.__name__ for group in groups] == ["Failure", "Trajectory"]


async def test_one_error_among_a_hundred_rows_is_shown_as_itself(make_engine, row):
    rows = [row(delay=n / 1000) for n in range(100)]
    rows[57] = row(delay=0.057, fail_times=9, error="KeyError")
    async with make_engine(failure_policy="mask") as engine:
        groups = await engine.run(rows)
    failures = [sample for group in groups for sample in group.failures]
    assert len(groups) == 100
    (failure,) = failures
    assert (failure.row, failure.error, failure.traceback) == (
        57,
        "KeyError",
        "Traceback of the worker",
    )


async def test_a_worker_that_raises_is_named_and_the_rows_before_are_delivered(
    engine, row, tmp_path
):
    came = tmp_path / "the first row came"
    stream = engine.stream([row(), row(until=str(came), **{"raise": "x"})])
    assert (await anext(stream)).index == 0
    came.touch()
    with pytest.raises(RuntimeError, match="instance 'default/1' failed: KeyError: 'x'") as caught:
        await anext(stream)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_stream_that_ends_early_names_the_missing_rows_and_their_instance(engine, row):
    stream = engine.stream([row(), row(skip=True), row(), row(skip=True)])
    assert {(await anext(stream)).index, (await anext(stream)).index} == {0, 2}
    with pytest.raises(
        IncompleteStreamError, match=r"2 of 4 rows missing .*rows 1, 3 at 'default/1'"
    ):
        await anext(stream)


async def test_a_row_that_comes_twice_is_refused_naming_the_instance(make_engine, row):
    async with make_engine() as engine:
        with pytest.raises(RowIndexValueError, match="instance 'default': row 0 arrived twice"):
            await engine.run([row(twice=True), row(delay=0.1)])


async def test_an_index_outside_the_batch_is_refused_naming_the_instance(make_engine, row):
    async with make_engine() as engine:
        with pytest.raises(RowIndexValueError, match=r"'default': .*index 7") as caught:
            await engine.run([row(index=7)])
    assert caught.value.instance == "default"


async def test_silence_ends_the_run_naming_who_is_waited_for(make_engine, row):
    async with make_engine(num_workers=2, no_progress_timeout_s=3.0) as engine:
        stream = engine.stream([row(), row(delay=60), row(), row(delay=60)])
        assert {(await anext(stream)).index, (await anext(stream)).index} == {0, 2}
        with pytest.raises(
            DeadlineExceeded, match=r"no_progress_timeout_s.*rows 1, 3 at 'default/1'"
        ):
            await anext(stream)


async def test_a_slow_consumer_is_no_silence(make_engine, row):
    async with make_engine(no_progress_timeout_s=2.0) as engine:
        async for _ in engine.stream([row(), row()]):
            await anyio.sleep(2.2)


async def test_shards_get_the_rows_of_their_routes(make_engine, row):
    shards = {"m": ShardConfig(servers=("math",), replicas=2), "c": ShardConfig(servers=("code",))}
    async with make_engine(shards=shards) as engine:
        assert engine.routes == ("code", "math")
        groups = await engine.run([row("code"), row("math"), row("math"), row("code")])
        with pytest.raises(RowValueError, match="mix routes"):
            await anext(engine.stream_repeated([row("code"), row("math")], GroupSizes(group=2)))
    pids = [facts(group.samples[0])["pid"] for group in groups]
    assert pids[0] == pids[3]
    assert len(set(pids)) == 3


async def test_a_whole_batch_as_one_group_may_mix_agents(engine, row):
    sizes = GroupSizes(group=4, routing=2, identity=2, returns_entire_batch=True)
    rows = [row("math"), row("math"), row("code"), row("code")]
    (group,) = [group async for group in engine.stream_repeated(rows, sizes)]
    assert [r.task_index for r in group.rows] == [0, 0, 1, 1]
    assert [r.rollout_index for r in group.rows] == [0, 1, 0, 1]
    assert {sample.agent for sample in group.samples} == {"math_agent", "code_agent"}


async def test_a_whole_batch_as_one_group_is_scored_prompt_by_prompt(make_engine, row, caplog):
    block = {"default": {"length_type": "chars", "total_bonus": 0.5}}
    scoring = ScoringConfig(length_penalty=LengthPenaltyConfig.from_dict(block))
    sizes = GroupSizes(group=4, routing=2, identity=2, returns_entire_batch=True)
    async with make_engine(scoring=scoring, num_workers=2) as engine:
        rows = [row(reward=0.0), row(reward=0.0), row(reward=1.0), row(reward=0.5)]
        for _ in range(2):
            (group,) = [group async for group in engine.stream_repeated(rows, sizes)]
    assert group.metrics["baseline_reward/pct_0"] == 50.0
    assert group.metrics["baseline_reward/pct_mixed"] == 50.0
    # Only the second prompt has a graded reward: the first is not skipped with it.
    assert group.metrics["length_penalty/skipped_non_binary_frac"] == 0.5
    heard = [record.message for record in caplog.records if "math_agent" in record.message]
    assert len(heard) == 1


class Watcher:
    def __init__(self):
        self.rows, self.groups, self.stats = [], [], []

    def on_row(self, result, instance):
        self.rows.append((result.index, instance))

    def on_group(self, group, stats):
        self.groups.append(group.index)
        self.stats.append(stats)


async def test_an_observer_hears_of_every_row_and_group(make_engine, row):
    watcher = Watcher()
    async with make_engine(observer=watcher, num_workers=2) as engine:
        await engine.run([row(), row(delay=0.1)])
    assert sorted(watcher.rows) == [(0, "default/0"), (1, "default/1")]
    assert watcher.groups == [0, 1]
    assert watcher.stats[0].scalars()["total_reward/mean"] == 1.0


async def test_progress_counts_over_streams(engine, row):
    await engine.run([row(tokens=5)], num_generations=2)
    await engine.run([row(tokens=1)])
    progress = engine.progress
    assert (progress.rows, progress.rows_done, progress.groups_done) == (3, 3, 2)
    assert progress.tokens_generated == 11


async def test_the_generators_address_reaches_every_worker(make_engine, row, log):
    generation = GenerationConfig(model="tiny", served_model_name="policy")
    async with make_engine(generation=generation, num_workers=2) as engine:
        assert engine.max_model_len == 64
        await engine.health_check()
        await engine.run([row()])
    assert log.read_text().count("spin_up http://127.0.0.1:2/v1 policy") == 2


async def test_a_limit_above_the_context_warns_once(make_engine, row, caplog):
    sampling = SamplingParams(max_tokens=100)
    async with make_engine(generation=GenerationConfig(model="tiny")) as engine:
        with caplog.at_level(logging.WARNING):
            await engine.run([row()], sampling=sampling)
            await engine.run([row()], sampling=sampling)
    assert caplog.text.count("above the generator's context of 64 tokens") == 1


async def test_who_fails_to_start_is_named_and_everything_is_torn_down(make_engine):
    before = what_is_open()
    with pytest.raises(RuntimeError, match=r"the generator: .*no weights"):
        async with make_engine(generation=GenerationConfig(model="broken"), num_workers=2):
            pytest.fail("it started")
    assert await what_is_left(before) == {}


async def test_a_worker_whose_set_up_raises_is_named(make_engine):
    with pytest.raises(RuntimeError, match=r"gym worker 'default/[01]': .*no tokenizer"):
        async with make_engine({"setup_error": "no tokenizer"}, num_workers=2):
            pytest.fail("it started")


async def test_who_is_late_at_the_start_is_named_and_everything_is_torn_down(make_engine, log):
    engine = make_engine({"spin_up_sleep": 60}, num_workers=2, start_timeout_s=8.0)
    with pytest.raises(DeadlineExceeded, match=r"start_timeout_s.*: default/0, default/1"):
        async with engine:
            pytest.fail("it started")
    assert log.read_text().count("close") == 2


async def test_a_start_that_is_cancelled_leaves_nothing_behind(make_engine, log):
    async def start() -> None:
        async with make_engine({"spin_up_sleep": 60}):
            pytest.fail("it started")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start)
        await until(lambda: "spin_up" in log.read_text())
        tasks.cancel_scope.cancel()
    assert log.read_text().count("close") == 1
    assert log.read_text().count("close") == log.read_text().count("setup")


async def test_a_sick_server_is_named_by_the_health_check(make_engine):
    async with make_engine({"sick": True}) as engine:
        with pytest.raises(ServerDiedError, match="gym worker 'default': math is gone") as caught:
            await engine.health_check()
    assert (caught.value.instance, caught.value.exit_code) == ("math", 3)


async def test_an_engine_that_is_not_open_says_so(make_engine, row):
    engine = make_engine()
    with pytest.raises(RuntimeError, match="async with"):
        engine.stream([row()])
    with pytest.raises(RuntimeError, match="async with"):
        await engine.health_check()


async def test_an_engine_can_be_opened_again_but_not_twice_at_once(make_engine, row):
    engine = make_engine()
    async with engine:
        with pytest.raises(RuntimeError, match="open already"):
            await engine.__aenter__()
        assert len(await engine.run([row()])) == 1
    async with engine:
        assert len(await engine.run([row()])) == 1
        assert engine.progress.rows == 1


async def test_leaving_the_engine_ends_a_consumer_in_another_task(make_engine, row, log):
    engine = make_engine()
    outcome = []

    async def consume():
        try:
            await engine.run([row(delay=60)])
        except RolloutStreamError as error:
            outcome.append(str(error))

    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            async with engine:
                tasks.start_soon(consume)
                await until(lambda: "run" in log.read_text())
    assert "closed" in outcome[0]


async def test_a_configuration_that_cannot_work_is_refused_before_any_process(make_engine, log):
    with pytest.raises(ConfigError, match="no server 'nope'"):
        make_engine(shards={"a": ShardConfig(servers=("nope",))})
    assert log.read_text() == ""


async def test_nothing_is_left_running_after_all_this(make_engine, row):
    async with make_engine(num_workers=2, failure_policy="mask") as engine:
        async with contextlib.aclosing(engine.stream([row(), row(delay=60)])) as stream:
            await anext(stream)
        with contextlib.suppress(RolloutStreamError):
            await engine.run([row(**{"raise": "x"}), row(delay=60)])
    gc.collect()


@pytest.mark.parametrize(
    "sizes",
    [
        GroupSizes(group=2),
        GroupSizes(group=2, routing=1),
        GroupSizes(group=4, routing=2, identity=2, returns_entire_batch=True),
    ],
)
async def test_groups_that_mix_routes_are_refused_before_there_is_a_stream(
    make_engine, row, sizes, log
):
    async with make_engine(in_process=True) as engine:
        with pytest.raises(RowValueError, match="'math'"):
            engine.stream_repeated([row("math"), row("code"), row("math"), row("math")], sizes)
    assert "run" not in log.read_text()
