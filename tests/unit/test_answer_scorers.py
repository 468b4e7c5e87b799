"""Scorers of reasoning-gym that would run an answer; each attack here was run before."""

import pytest
import sympy

from gymrl.answer_scorers import read_expression, read_literal, scorer_of

N_QUEENS = {"answer": "Q _\n_ Q", "metadata": {"valid_answers": ["Q _\n_ Q"]}}
COUNTDOWN = {"answer": "3*4", "metadata": {"numbers": [3, 4], "target": 12}}
POLYNOMIAL = {"answer": "x**2 - 1", "metadata": {}}
INTEGRAL = {"answer": "x**2 + C", "metadata": {"integrand": "2*x", "variable": "x"}}
BITWISE = {"answer": "0x6", "metadata": {"problem": "(0x2 * 0x3)"}}
SORTED = {"answer": "['1', '2']", "metadata": {"direction": "ascending"}}


@pytest.mark.parametrize(
    ("dataset", "entry"),
    [
        ("n_queens", N_QUEENS),
        ("countdown", COUNTDOWN),
        ("puzzle24", COUNTDOWN),
        ("polynomial_multiplication", POLYNOMIAL),
        ("simple_integration", INTEGRAL),
        ("intermediate_integration", INTEGRAL),
        ("string_insertion", POLYNOMIAL),
        ("spiral_matrix", POLYNOMIAL),
        ("binary_matrix", POLYNOMIAL),
    ],
)
def test_an_answer_is_not_run_by_the_worker_that_scores_it(dataset, entry, tmp_path):
    witness = tmp_path / "witness"
    for attack in (
        f"open({str(witness)!r}, 'w')",
        f"__import__('pathlib').Path({str(witness)!r}).touch()",
        f"[open({str(witness)!r}, 'w') for _ in 'x']",
    ):
        score = scorer_of(dataset)(attack, entry)
        assert not witness.exists()
        assert score < 0.1


def test_what_a_row_brings_is_not_run_either(tmp_path):
    witness = tmp_path / "witness"
    attack = {**SORTED, "answer": f"open({str(witness)!r}, 'w')"}
    assert scorer_of("number_sorting")('["1", "2"]', attack) == 0
    assert scorer_of("polynomial_multiplication")("x", attack) == 0
    assert not witness.exists()


@pytest.mark.parametrize(
    ("dataset", "answer", "entry", "score"),
    [
        ("n_queens", "[['Q', '_'], ['_', 'Q']]", N_QUEENS, 0.5),
        ("countdown", "4*3", COUNTDOWN, 1.0),
        ("countdown", "(4+3)", COUNTDOWN, 0.05),
        ("polynomial_multiplication", "-1 + x**2", POLYNOMIAL, 1.0),
        ("simple_integration", "x**2 + sin(1) + C", INTEGRAL, 1.0),
        ("bitwise_arithmetic", "6", BITWISE, 1.0),
        ("number_sorting", '["1", "2"]', SORTED, 1.0),
    ],
)
def test_what_a_scorer_means_is_read_as_before(dataset, answer, entry, score):
    assert scorer_of(dataset)(answer, entry) == score


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9",
        "(9**9)**(9**9)",
        "E**E**E**E**E**E",
        "exp(exp(exp(9)))",
        "x**1000",
        "1 << (1 << 40)",
        "2**1e9",
    ],
)
def test_a_tower_of_powers_is_refused_before_it_is_computed(text):
    with pytest.raises(ValueError, match=r"bits|too high"):
        read_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "(eval)(1)",
        "x.free_symbols",
        "'a'",
        "S('x')",
        "sympify(1)",
        "preview(x)",
        "lambda: 1",
        "(lambda: 1)()",
        "__builtins__",
        "sqrt(x, evaluate=0)",
        "[1][0]",
        "\uff45val(1)",
        "x if 1 else 2",
    ],
)
def test_an_expression_is_numbers_names_and_elementary_functions(text):
    with pytest.raises(ValueError, match="would have to be run"):
        read_expression(text)


@pytest.mark.parametrize(
    "text", ["'a' * 10**10", "[0] * 10**9", "9**9**9", "open", "f'{1}'", "(1).real"]
)
def test_a_literal_is_read_and_not_computed_at_length(text):
    with pytest.raises(ValueError, match=r"would have to be run|bits"):
        read_literal(text)


def test_elementary_expressions_keep_their_value():
    x = sympy.Symbol("x")
    assert (
        read_expression("sqrt(x)*exp(2*x)/3 + 0.5", {"x": x})
        == sympy.sqrt(x) * sympy.exp(2 * x) / 3 + 0.5
    )
    assert read_literal("[[1, -2.5], ['a', None]]") == [[1, -2.5], ["a", None]]
    assert read_literal("((0x3a * 0x4f) >> 0x1)") == (0x3A * 0x4F) >> 1
