"""The report's numbers as they are handed to the page."""

import msgspec
import pytest

from gymrl.errors import ConfigError
from gymrl.evaluation import compare, read_evaluation, report_evaluation
from gymrl.viewer.comparison import SHOWN_TASKS, view_of_comparison
from gymrl.viewer.index import RolloutIndex, take_snapshot
from gymrl.viewer.report import EvaluationReports, list_tasks, parse_task_query, view_of
from gymrl.viewer.scan import LineScanner
from tests.evaluation_files import add_rows, plan_of

PLAN = plan_of({"math": {"a": "sums", "b": "sums", "c": "tables"}, "words": {"d": "words"}}, 2)
# Lines 2 to 7; b has failed and was made again, c lacks an attempt, d has none.
ROWS = (
    ("a", 0, 1.0),
    ("b", 0, None),
    ("a", 1, 0.0),
    ("b", 1, 0.25),
    ("c", 0, None),
    ("b", 0, 0.5),
)


@pytest.fixture
def file(tmp_path):
    return add_rows(tmp_path, PLAN, *ROWS)


def snapshot_of(file):
    index = RolloutIndex()
    index.extend(LineScanner().scan(file.read_bytes()))
    return take_snapshot(*index.freeze())


@pytest.fixture
def tasks(file):
    """Ids of a benchmark's tasks by the address's parameters."""

    def make(**parameters):
        query = parse_task_query({"benchmark": "math", **parameters})
        return list_tasks(read_evaluation(file.parent), 1.0, query, snapshot_of(file))

    return make


async def test_the_page_has_the_numbers_that_the_command_prints(file):
    view = await EvaluationReports(file).view()
    report = report_evaluation(read_evaluation(file.parent))
    assert [one.label for one in view.benchmarks] == ["math", "words"]
    math, words = view.benchmarks
    assert math.total.numbers == report.benchmarks["math"].total
    assert {part.name: part.numbers for part in math.sources} == report.benchmarks["math"].sources
    assert (math.total.numbers.reward.mean, math.total.numbers.failed) == (0.4375, 1)
    assert (view.complete, view.failed, view.missing) == (False, 1, 3)
    assert (view.confidence, view.pass_reward) == (0.95, 1.0)
    assert view.settings["policy"]["model"] == "tiny"
    assert (words.total.numbers.reward, words.total.histogram) == (None, None)


async def test_histograms_are_of_the_rewards_that_there_are(file):
    math, _ = (await EvaluationReports(file).view()).benchmarks
    counts = [0] * 20
    for place in (19, 0, 5, 10):  # 1, 0, 0.25 and 0.5
        counts[place] += 1
    assert math.total.histogram.counts == tuple(counts)
    by_source = {part.name: part.histogram for part in math.sources}
    assert (by_source["sums"].counts, by_source["tables"]) == (tuple(counts), None)


async def test_a_single_source_is_not_shown_beside_its_benchmark(file):
    _, words = (await EvaluationReports(file).view()).benchmarks
    assert words.sources == []


async def test_what_is_written_meanwhile_is_in_the_next_answer(file):
    reports = EvaluationReports(file)
    before = await reports.view()
    assert await reports.view() is before
    add_rows(file.parent, PLAN, ("c", 0, 1.0), ("c", 1, 1.0), ("d", 0, 0.0), ("d", 1, 0.0))
    after = await reports.view()
    assert (before.missing, after.missing, after.failed, after.complete) == (3, 0, 0, True)


async def test_a_plan_that_is_gone_is_named(file):
    reports = EvaluationReports(file)
    file.with_name("plan.json").unlink()
    with pytest.raises(ConfigError, match=r"plan\.json: No such file"):
        await reports.view()


def test_each_task_leads_to_its_group_and_says_what_it_lacks(tasks):
    page = tasks()
    found = [
        (one.task_id, one.group, one.mean, one.scored, one.failed, one.missing, one.passed)
        for one in page.tasks
    ]
    assert found == [
        ("a", 0, 0.5, 2, 0, 0, 1),
        ("b", 1, 0.375, 2, 0, 0, 0),
        ("c", 2, None, 0, 1, 1, 0),
    ]
    assert (page.total, [one.number for one in page.tasks]) == (3, [0, 1, 2])


def test_a_task_without_a_row_leads_nowhere(tasks):
    (task,) = tasks(benchmark="words").tasks
    assert (task.number, task.group, task.missing) == (3, None, 2)


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("plan", ["a", "b", "c"]),
        ("-plan", ["c", "b", "a"]),
        ("mean", ["b", "a", "c"]),
        ("-mean", ["a", "b", "c"]),
        ("failed", ["a", "b", "c"]),
        ("-failed", ["c", "a", "b"]),
    ],
)
def test_tasks_are_sorted_and_those_without_a_reward_come_last(tasks, sort, expected):
    assert [one.task_id for one in tasks(sort=sort).tasks] == expected


def test_tasks_come_in_pages(tasks):
    page = tasks(offset="1", limit="1")
    assert (page.total, page.offset, [one.task_id for one in page.tasks]) == (3, 1, ["b"])
    assert tasks(limit="9999999").total == 3
    assert tasks(benchmark="none").total == 0


@pytest.mark.parametrize("wrong", [{"sort": "size"}, {"offset": "-1"}, {"limit": "x"}])
def test_a_parameter_that_means_nothing_is_refused(wrong):
    with pytest.raises(ConfigError):
        parse_task_query(wrong)


def test_the_view_is_made_of_what_json_can_hold(file):
    evaluation = read_evaluation(file.parent)
    view = view_of(evaluation, report_evaluation(evaluation))
    decoded = msgspec.json.decode(msgspec.json.encode(view))
    assert decoded["benchmarks"][0]["total"]["numbers"]["pass_at"][0]["k"] == 1


async def test_two_runs_are_compared_as_the_command_does_and_tasks_lead_to_their_groups(
    file, tmp_path
):
    other = tmp_path / "other"
    add_rows(other, PLAN, ("a", 0, 0.0), ("a", 1, 0.0), ("b", 0, 1.0), ("c", 0, 1.0))
    view = await EvaluationReports(file, other).comparison(snapshot_of(file))
    found = compare(read_evaluation(other), read_evaluation(file.parent))
    math, words = view.benchmarks
    assert math.total.numbers == found.benchmarks["math"].total
    assert math.differences == [-0.625, 0.5]
    (better,), (worse,) = math.better, math.worse
    assert (better.task_id, better.group, better.before, better.after) == ("a", 0, 0.0, 0.5)
    assert (worse.task_id, worse.number, worse.difference) == ("b", 1, -0.625)
    (why,) = math.left_out.items()
    assert (why[0], why[1].names) == ("without a reward in A or B", ("c",))
    assert (words.total.numbers.difference, words.differences) == (None, [])


async def test_of_many_changed_tasks_the_first_are_named_and_all_are_counted(tmp_path):
    names = [f"t{number:02}" for number in range(30)]
    plan = plan_of({"math": dict.fromkeys(names, "sums")}, 1)
    first = add_rows(tmp_path / "a", plan, *((name, 0, 1.0) for name in names))
    second = add_rows(tmp_path / "b", plan, *((name, 0, 0.0) for name in names))
    view = view_of_comparison(
        read_evaluation(first.parent), read_evaluation(second.parent), snapshot_of(second)
    )
    (math,) = view.benchmarks
    assert (math.total.numbers.worse, len(math.worse), math.better) == (30, SHOWN_TASKS, [])


async def test_there_is_nothing_to_compare_without_another_run(file, tmp_path):
    with pytest.raises(ConfigError, match="--against"):
        await EvaluationReports(file).comparison(snapshot_of(file))
    with pytest.raises(ConfigError, match="No such file"):
        await EvaluationReports(file, tmp_path / "nowhere").check_other()
