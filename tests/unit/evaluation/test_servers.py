import pytest

from gymrl.errors import ConfigError
from gymrl.evaluation.servers import merged_servers, rerouted


def family(extractor):
    """The servers that every flavor of a family calls alike."""
    return {
        "quiz": {"resources_servers": {"ours": {"entrypoint": "a:B", "extractor": extractor}}},
        "quiz_agent": {
            "responses_api_agents": {
                "simple": {
                    "resources_server": {"type": "resources_servers", "name": "quiz"},
                    "model_server": {"type": "responses_api_models", "name": "policy_model"},
                }
            }
        },
    }


def test_benchmarks_with_the_same_servers_share_them(make_benchmark, make_plan):
    plan = make_plan(
        make_benchmark("a", servers=family("x")), make_benchmark("b", servers=family("x"))
    )
    merged = merged_servers(plan)
    assert merged.servers == family("x")
    assert merged.renamed == {"a": {}, "b": {}}


def test_different_servers_of_one_name_are_told_apart(make_benchmark, make_plan):
    plan = make_plan(*(make_benchmark(label, servers=family(label)) for label in ("a", "b", "c")))
    merged = merged_servers(plan)
    assert merged.renamed["a"] == {}
    assert merged.renamed["b"] == {"quiz": "quiz_2", "quiz_agent": "quiz_agent_2"}
    assert merged.renamed["c"] == {"quiz": "quiz_3", "quiz_agent": "quiz_agent_3"}
    agent = merged.servers["quiz_agent_3"]["responses_api_agents"]["simple"]
    assert agent["resources_server"]["name"] == "quiz_3"
    assert agent["model_server"]["name"] == "policy_model"
    assert merged.servers["quiz_3"]["resources_servers"]["ours"]["extractor"] == "c"
    assert plan.benchmarks[2].servers == family("c")


def test_rows_follow_their_servers():
    row = {"task_source": "quiz", "agent_ref": {"type": "x", "name": "quiz_agent"}, "task_id": 1}
    moved = rerouted(row, {"quiz": "quiz_2", "quiz_agent": "quiz_agent_2"})
    assert moved == {
        "task_source": "quiz_2",
        "agent_ref": {"type": "x", "name": "quiz_agent_2"},
        "task_id": 1,
    }
    assert row["task_source"] == "quiz"
    assert rerouted(row, {}) == row


def test_servers_that_gymrl_cannot_start_are_refused_by_name(make_benchmark, make_plan):
    plan = make_plan(make_benchmark("real", refusal="these are NeMo Gym's own: app.py"))
    with pytest.raises(ConfigError, match=r"'real': these are .* registry"):
        merged_servers(plan)
