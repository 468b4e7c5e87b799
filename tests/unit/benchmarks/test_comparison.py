"""Turns, ratios and targets: the arithmetic that benchmarks are judged by."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks import __main__ as runner
from benchmarks.comparison import Clock, Comparison, Report, Turns, publish, table, take_turns


def comparison(value: float | None, *, at_least: bool, target: float = 4.0) -> Comparison:
    return Comparison(
        name="calls",
        unit="calls/s",
        sides={"gymrl": 50_000.0, "Ray": 2000.0},
        ratio="gymrl / Ray",
        value=value,
        target=target,
        at_least=at_least,
    )


def test_a_ratio_is_the_median_of_the_turns_and_not_the_ratio_of_medians():
    turns = Turns({"Ray": [(1.0, 10.0), (2.0, 10.0), (4.0, 100.0)]})
    assert turns.times_faster("Ray") == 10.0
    assert turns.times_longer("Ray") == 0.1


def test_medians_count_gymrls_turns_beside_every_other():
    turns = Turns({"Ray": [(1.0, 10.0)], "xoscar": [(3.0, 5.0)]})
    assert turns.medians() == {"gymrl": 2.0, "Ray": 10.0, "xoscar": 5.0}
    assert turns.rates(20) == {"gymrl": 10.0, "Ray": 2.0, "xoscar": 4.0}


def test_the_best_turns_are_compared_over_all_turns_of_gymrl():
    turns = Turns({"Ray": [(2.0, 10.0), (4.0, 8.0)], "xoscar": [(1.0, 5.0)]})
    assert turns.best_faster("Ray") == 8.0


def test_a_side_that_is_missing_has_no_ratio():
    turns = Turns({"xoscar": [(1.0, 5.0)]})
    assert turns.times_faster("Ray") is None
    assert turns.best_faster("Ray") is None


async def test_turns_alternate_and_the_first_is_not_counted():
    order: list[str] = []

    def measure(name: str, seconds: list[float]):
        async def run() -> float:
            order.append(name)
            return seconds.pop(0)

        return run

    own = measure("own", [9.0, 9.0, 1.0, 1.0])
    others = {"a": measure("a", [9.0, 2.0]), "b": measure("b", [9.0, 4.0])}
    turns = await take_turns(own, others, rounds=1)
    assert order == ["own", "a", "own", "b"] * 2
    assert turns.medians() == {"gymrl": 1.0, "a": 2.0, "b": 4.0}


async def test_without_others_gymrl_is_measured_alone():
    async def own() -> float:
        return 2.0

    turns = await take_turns(own, {}, rounds=2)
    assert turns.medians() == {"gymrl": 2.0}


@pytest.mark.parametrize(
    ("value", "at_least", "reached"),
    [(4.0, True, True), (3.9, True, False), (4.0, False, True), (4.1, False, False)],
)
def test_a_target_is_reached_at_its_bound(value: float, at_least: bool, reached: bool):
    assert comparison(value, at_least=at_least).reached is reached


def test_what_was_not_measured_is_neither_reached_nor_missed():
    assert comparison(None, at_least=True).reached is None


def test_the_table_has_a_line_for_each_comparison_with_both_sides():
    lines = table([comparison(25.0, at_least=True), comparison(2.0, at_least=True)]).splitlines()
    assert len(lines) == 4
    assert "| ≥ 4 | 25 | yes | gymrl 50,000, Ray 2,000 calls/s |" in lines[2]
    assert "**no**" in lines[3]


@pytest.mark.parametrize(("quick", "code"), [(False, 1), (True, 0)])
def test_a_missed_target_is_an_error_unless_the_sizes_were_tiny(tmp_path, capsys, quick, code):
    missed = [comparison(1.0, at_least=True)]
    path = tmp_path / "deep" / "out.json"
    assert publish(Clock().report("actors", missed, {}, quick), path) == code
    written = msgspec.json.decode(path.read_bytes(), type=Report)
    assert written.comparisons == missed
    assert written.quick is quick
    assert "actors:" in capsys.readouterr().out


def test_the_runner_knows_the_packages_that_can_be_run():
    assert {"actors", "rollout"} <= set(runner.packages())
