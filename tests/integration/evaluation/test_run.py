"""Evaluations against an agent on a real socket: what is written, tried again, left as it was."""

import json

import anyio
import pytest
from aiohttp import web

from gymrl.benchmark.plan import PlanBenchmark, PlanGym, build_plan
from gymrl.errors import ConfigError, RolloutRedispatchExhausted
from gymrl.evaluation import (
    EvaluationPlan,
    EvaluationSettings,
    RunOptions,
    plan_evaluation,
    run_evaluation,
)
from gymrl.evaluation.journal import Journal
from gymrl.evaluation.plan import BenchmarkPlan
from gymrl.gym.listener import Listener, PortRange
from gymrl.records import read_records, read_run
from gymrl.testing.gym_server import FakeGymServer, Fault, gym_answer


def make_plan(tasks=3, repeats=2, label="math", agent="fake_agent", **settings):
    rows = [
        {
            "task_id": f"t{n}",
            "agent_ref": {"type": "responses_api_agents", "name": agent},
            "responses_create_params": {"input": f"task {n}"},
        }
        for n in range(tasks)
    ]
    plan = build_plan(
        rows, benchmark=PlanBenchmark(label, []), taskset=label, gym=PlanGym("test", None)
    )
    benchmark = BenchmarkPlan(label=label, name=label, repeats=repeats, plan=plan, rows=rows)
    return EvaluationPlan.of(EvaluationSettings.from_dict(settings), (benchmark,))


def name_of(body):
    return body["task_id"], body["_ng_rollout_index"]


class Script:
    """Answers by task and repeat, and keeps who asked."""

    def __init__(self, answers=None):
        self.answers = answers or {}
        self.asked = []
        self.bodies = {}

    def __call__(self, body):
        name = name_of(body)
        self.asked.append(name)
        self.bodies[name] = body
        answer = self.answers.get(name, 1.0)
        if isinstance(answer, float):
            return gym_answer([([1, 2, 3], [4, 5])], reward=answer)
        return answer


def options_for(server, **changes):
    return RunOptions(registry_url=server.url, in_process=True, **changes)


class Watching:
    """An observer that keeps what it was told."""

    def __init__(self, on_row=None):
        self.begun = None
        self.rows = []
        self.has_started = False
        self._on_row = on_row

    def begin(self, plan, finished, pending):
        self.begun = (plan.num_rows, finished, pending)

    def started(self):
        self.has_started = True

    def row(self, record):
        self.rows.append((record.task_id, record.rollout_index))
        if self._on_row is not None:
            self._on_row(len(self.rows))


ALL = [(f"t{n}", repeat) for n in range(3) for repeat in (0, 1)]


async def test_every_row_is_asked_once_and_written_with_all_that_is_known(tmp_path):
    script, watching = Script({("t1", 0): 0.0}), Watching()
    async with FakeGymServer(script) as server:
        report = await run_evaluation(make_plan(), tmp_path, options_for(server), observer=watching)
    assert sorted(script.asked) == ALL
    assert watching.begun == (6, 0, 6)
    assert sorted(watching.rows) == ALL
    assert report.complete
    assert report.benchmarks["math"].total.reward.mean == pytest.approx(5 / 6)
    records = list(read_records(tmp_path / "rollouts.jsonl"))
    assert sorted((r.task_id, r.rollout_index) for r in records) == ALL
    assert {r.benchmark for r in records} == {"math"}
    assert sorted(r.index for r in records) == [0, 1, 2, 3, 4, 5]
    assert all(r.trajectory.token_ids == [1, 2, 3, 4, 5] for r in records)
    assert read_run(tmp_path / "rollouts.jsonl").config_digest == report.config_digest
    written = json.loads((tmp_path / "benchmark_metrics.json").read_text())
    assert written == json.loads(report.to_json())


async def test_attempts_at_a_task_have_different_seeds_that_stay_the_same(tmp_path):
    script, again = Script(), Script()
    for number, (answers, tasks) in enumerate(((script, 3), (again, 2))):
        async with FakeGymServer(answers) as server:
            await run_evaluation(make_plan(tasks), tmp_path / str(number), options_for(server))

    def seed(body):
        return json.loads(body["responses_create_params"]["metadata"]["extra_body"])["seed"]

    seeds = {name: seed(body) for name, body in script.bodies.items()}
    assert len(set(seeds.values())) == 6
    assert {name: seed(body) for name, body in again.bodies.items()} == {
        name: value for name, value in seeds.items() if name[0] != "t2"
    }


async def test_a_finished_evaluation_is_not_run_again(tmp_path):
    async with FakeGymServer(Script()) as server:
        first = await run_evaluation(make_plan(), tmp_path, options_for(server))
        watching = Watching()
        second = await run_evaluation(make_plan(), tmp_path, options_for(server), observer=watching)
    assert (watching.begun, watching.has_started) == ((6, 6, 0), False)
    assert second == first


async def test_a_failed_row_is_a_failure_with_its_reason_and_the_others_go_on(tmp_path):
    script = Script({("t1", 1): Fault.HTTP_400})
    async with FakeGymServer(script) as server:
        report = await run_evaluation(make_plan(), tmp_path, options_for(server))
    total = report.benchmarks["math"].total
    assert (total.scored, total.failed, total.reward.mean) == (5, 1, 1.0)
    (failure,) = total.failures
    assert failure.error == "GymRequestError"
    assert failure.example.startswith("task 't1', repeat 1 (agent 'fake_agent'): HTTP 400")
    assert "maximum context length is 16 tokens" in failure.example
    (record,) = [r for r in read_records(tmp_path / "rollouts.jsonl") if r.failure]
    assert (record.failure.row, record.trajectory) == (3, None)


async def test_a_failed_row_is_tried_again_when_the_run_is_continued(tmp_path):
    script = Script({("t1", 1): Fault.HTTP_400})
    async with FakeGymServer(script) as server:
        for _ in range(2):
            await run_evaluation(make_plan(), tmp_path, options_for(server))
        script.answers.clear()
        script.asked.clear()
        report = await run_evaluation(make_plan(), tmp_path, options_for(server))
    assert script.asked == [("t1", 1)]
    assert report.complete
    assert report.num_failed == 0


async def test_a_row_that_has_failed_too_often_stays_failed(tmp_path):
    script = Script({("t1", 1): Fault.HTTP_400})
    watching = Watching()
    async with FakeGymServer(script) as server:
        for _ in range(2):
            await run_evaluation(make_plan(), tmp_path, options_for(server, max_tries=2))
        report = await run_evaluation(
            make_plan(), tmp_path, options_for(server, max_tries=2), observer=watching
        )
    assert watching.begun == (6, 5, 0)
    assert report.num_failed == 1


async def test_a_reward_that_is_no_number_is_a_failure_and_never_zero(tmp_path):
    async with FakeGymServer(Script({("t0", 0): Fault.NAN_REWARD})) as server:
        report = await run_evaluation(make_plan(), tmp_path, options_for(server))
    total = report.benchmarks["math"].total
    assert (total.scored, total.failed, total.reward.mean) == (5, 1, 1.0)


async def test_an_answer_without_token_ids_is_scored(tmp_path):
    answer = gym_answer([], reward=0.25)
    answer["response"]["usage"] = {"input_tokens": 9, "output_tokens": 4}
    async with FakeGymServer(Script(dict.fromkeys(ALL, answer))) as server:
        report = await run_evaluation(make_plan(), tmp_path, options_for(server))
    total = report.benchmarks["math"].total
    assert (report.complete, total.reward.mean, total.without_tokens) == (True, 0.25, 6)
    assert (total.total_tokens.mean, total.generated_tokens.mean) == (13, 4)


async def test_a_key_reaches_the_endpoint_and_nothing_else(tmp_path):
    keys = []

    async def responses(request):
        keys.append(request.headers.get("Authorization"))
        content = [{"type": "output_text", "text": "3", "annotations": []}]
        message = {"type": "message", "role": "assistant", "content": content}
        return web.json_response({"id": "r", "output": [message]})

    app = web.Application()
    app.router.add_post("/v1/responses", responses)
    endpoint = Listener(app, PortRange())
    await endpoint.start()
    try:
        plan = plan_evaluation(
            ["chain_sum"],
            EvaluationSettings.from_dict({"policy": {"name": "theirs"}}),
            overrides={"num_tasks": 2},
        )
        options = RunOptions(
            base_urls=(f"{endpoint.url}/v1",), api_key="hush-hush", in_process=True
        )
        report = await run_evaluation(plan, tmp_path, options)
    finally:
        await endpoint.stop()
    assert report.complete
    assert keys == ["Bearer hush-hush"] * 2
    written = [path.read_text() for path in tmp_path.iterdir()]
    assert len(written) >= 3
    assert not any("hush" in text for text in written)


async def test_a_fleet_that_is_down_ends_the_run_which_can_be_continued(tmp_path):
    down = Script(dict.fromkeys(ALL, Fault.HTTP_429))
    options = {"max_outages": 2, "concurrency": 6}
    async with FakeGymServer(down) as server:
        with pytest.raises(RolloutRedispatchExhausted, match="2 rows, one after the other") as e:
            await run_evaluation(make_plan(), tmp_path, options_for(server, **options))
    assert "task 't" in e.value.message
    assert "can be continued" in e.value.message
    assert not (tmp_path / "benchmark_metrics.json").exists()
    async with FakeGymServer(Script()) as server:
        report = await run_evaluation(make_plan(), tmp_path, options_for(server, **options))
    assert report.complete


async def test_no_more_rows_are_under_way_than_were_allowed(tmp_path):
    async with FakeGymServer(Script()) as server:
        await run_evaluation(make_plan(8, 4), tmp_path, options_for(server, concurrency=3))
        assert server.most_in_flight <= 3
        assert server.requests.total() == 32


async def test_a_run_that_is_cancelled_keeps_what_had_ended(tmp_path):
    with anyio.CancelScope() as scope:
        watching = Watching(lambda rows: scope.cancel() if rows == 4 else None)
        async with FakeGymServer(Script()) as server:
            await run_evaluation(
                make_plan(), tmp_path, options_for(server, concurrency=1), observer=watching
            )
    assert scope.cancelled_caught
    kept = watching.rows
    assert 4 <= len(kept) < 6
    script = Script()
    async with FakeGymServer(script) as server:
        report = await run_evaluation(make_plan(), tmp_path, options_for(server))
    assert sorted(script.asked + kept) == ALL
    assert report.complete


async def test_runs_in_one_process_are_independent(tmp_path):
    scripts = {"a": Script(), "b": Script(dict.fromkeys(ALL, 0.0))}
    reports = {}

    async def one(name):
        async with FakeGymServer(scripts[name]) as server:
            reports[name] = await run_evaluation(make_plan(), tmp_path / name, options_for(server))

    async with anyio.create_task_group() as group:
        for name in scripts:
            group.start_soon(one, name)
    means = {name: report.benchmarks["math"].total.reward.mean for name, report in reports.items()}
    assert means == {"a": 1.0, "b": 0.0}


async def test_a_directory_takes_one_run_at_a_time(tmp_path):
    script = Script()
    async with FakeGymServer(script) as server:
        with Journal(tmp_path, make_plan()):
            with pytest.raises(ConfigError, match="is being written by process"):
                await run_evaluation(make_plan(), tmp_path, options_for(server))
        assert script.asked == []
        await run_evaluation(make_plan(), tmp_path, options_for(server))
    assert sorted(script.asked) == ALL


async def test_rows_for_servers_that_are_not_there_are_refused_before_any_request(tmp_path):
    script = Script()
    async with FakeGymServer(script) as server:
        with pytest.raises(ConfigError, match="task 't0': nothing here is called 'nobody'"):
            await run_evaluation(make_plan(agent="nobody"), tmp_path, options_for(server))
    assert script.asked == []


async def test_a_plan_grows_by_the_rows_that_are_new(tmp_path):
    script = Script()
    async with FakeGymServer(script) as server:
        await run_evaluation(make_plan(2, 1), tmp_path, options_for(server))
        script.asked.clear()
        grown = await run_evaluation(make_plan(), tmp_path, options_for(server), extend=True)
    assert sorted(script.asked) == [("t0", 1), ("t1", 1), ("t2", 0), ("t2", 1)]
    assert grown.complete


async def test_another_plan_is_refused_before_any_request(tmp_path):
    script = Script()
    async with FakeGymServer(script) as server:
        await run_evaluation(make_plan(), tmp_path, options_for(server))
        script.asked.clear()
        with pytest.raises(ConfigError, match="seed: 0 -> 1"):
            await run_evaluation(make_plan(seed=1), tmp_path, options_for(server))
    assert script.asked == []
