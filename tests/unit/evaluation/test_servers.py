import pytest

from gymrl.errors import ConfigError
from gymrl.evaluation import EvaluationPlan, plan_differences
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


def test_tasksets_are_routed_to_the_renamed_servers(make_benchmark, make_plan):
    def servers(label):
        return {**family(label), "environment_server_routes": {f"set of {label}": "quiz"}}

    plan = make_plan(*(make_benchmark(label, servers=servers(label)) for label in ("a", "b")))
    routes = merged_servers(plan).servers["environment_server_routes"]
    assert routes == {"set of a": "quiz", "set of b": "quiz_2"}
    assert plan.benchmarks[0].servers == servers("a")


@pytest.mark.parametrize(
    "settings", [("environment_server_routes", {"set": "quiz"}), ("rounds", "of")]
)
def test_what_benchmarks_set_otherwise_for_all_servers_is_refused(
    make_benchmark, make_plan, settings
):
    name, value = settings
    other = value if isinstance(value, dict) else f"{value} another"
    plan = make_plan(
        make_benchmark("a", servers={**family("a"), name: value}),
        make_benchmark("b", servers={**family("b"), name: other}),
    )
    with pytest.raises(ConfigError, match=f"'b' sets {name} otherwise"):
        merged_servers(plan)


def test_gyms_version_is_part_of_what_was_asked_and_is_told_when_it_differs(
    make_benchmark, make_plan
):
    ours, before, after = (
        make_plan(make_benchmark("a", servers=family("x"), gym_version=version))
        for version in (None, "0.7.0", "0.7.1")
    )
    assert len({plan.config_digest for plan in (ours, before, after)}) == 3
    assert plan_differences(before, after) == ['servers.a.nemo_gym_version: "0.7.0" -> "0.7.1"']
    again = EvaluationPlan.from_json(before.to_json())
    assert again == before
