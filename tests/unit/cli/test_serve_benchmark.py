"""The options of ``gymrl serve --benchmark`` as overrides of the configuration."""

import pytest
from typer.testing import CliRunner

from gymrl.cli.app import app, run_app
from gymrl.cli.serve_benchmark import ServeBenchmarkOptions, overrides_of
from gymrl.errors import ConfigError


def options(*params, **more):
    return ServeBenchmarkOptions(benchmark="chain_sum", params=params, **more)


def test_a_dotted_parameter_is_a_path_and_its_value_is_yaml():
    overrides = overrides_of(options("num_tasks=4", "judge.a.model=m", "judge.a.top=0.5"), ["u"])

    assert overrides == {
        "num_tasks": 4,
        "judge": {"a": {"model": "m", "top": 0.5}},
        "policy_base_url": "u",
        "policy_model_name": "policy",
    }


def test_several_endpoints_stay_several():
    assert overrides_of(options(), ["u", "v"])["policy_base_url"] == ["u", "v"]


def test_a_path_through_a_value_is_refused():
    with pytest.raises(ConfigError, match=r"--param judge\.model: judge has a value already"):
        overrides_of(options("judge=no", "judge.model=m"), ["u"])


def test_the_key_comes_from_the_variable_that_is_named(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    overrides = overrides_of(options(api_key_variable="MY_KEY"), ["u"])
    assert overrides["policy_api_key"] == "secret"


def test_a_variable_that_is_not_set_is_refused(monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="--api-key-env MY_KEY: the variable is not set"):
        overrides_of(options(api_key_variable="MY_KEY"), ["u"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "name what to serve"),
        (["serve", "--benchmark", "chain_sum"], "a benchmark needs a policy"),
        (
            ["serve", "--benchmark", "chain_sum", "--model", "m", "--base-url", "http://x/v1"],
            "a benchmark needs a policy",
        ),
    ],
)
def test_what_is_served_must_be_said_and_who_samples(arguments, message):
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ConfigError)
    assert message in error.message


def test_options_of_a_benchmark_without_one_are_refused(capsys):
    assert run_app(["serve", "--model", "smollm2", "--registry-port", "11000"]) == 2
    assert "name it (--benchmark)" in capsys.readouterr().err
