import random
import re

import msgspec
import pytest

from gymrl.benchmark import list_benchmarks, load_benchmark
from gymrl.benchmark.base import generator_seed, global_random
from gymrl.errors import ConfigError


def test_chain_sum_rows_carry_what_the_agent_and_the_verifier_need():
    benchmark = load_benchmark("chain_sum", num_tasks=3, seed=0)
    assert len(benchmark.rows) == 3
    row = benchmark.rows[0]
    assert row["task_id"] == "chain_sum-s0-00000"
    assert row["task_source"] == "chain_sum"
    assert row["dataset"] == "chain_sum"
    assert row["responses_create_params"]["input"][0]["content"] == row["entry"]["question"]
    assert row["entry"]["answer"].lstrip("-").isdigit()


def test_chain_sum_servers_are_in_gyms_shape():
    servers = load_benchmark("chain_sum", num_tasks=1).servers
    assert servers["chain_sum"]["resources_servers"]["reasoning_gym"] == {
        "entrypoint": "gymrl.gym.embedded.reasoning_gym:ReasoningGymServer",
        "answer_extractor": "last_integer",
    }
    agent = servers["chain_sum_simple_agent"]["responses_api_agents"]["simple_agent"]
    assert agent["resources_server"] == {"type": "resources_servers", "name": "chain_sum"}
    assert agent["model_server"] == {"type": "responses_api_models", "name": "policy_model"}


@pytest.mark.parametrize("name", ["chain_sum", "tool_arithmetic", "reasoning_gym/gcd"])
def test_the_same_seed_gives_the_same_tasks_and_another_seed_gives_others(name):
    first = load_benchmark(name, num_tasks=6, seed=4)
    again = load_benchmark(name, num_tasks=6, seed=4)
    other = load_benchmark(name, num_tasks=6, seed=5)
    assert msgspec.json.encode(first.rows) == msgspec.json.encode(again.rows)
    questions = [r["responses_create_params"]["input"][0]["content"] for r in first.rows]
    others = [r["responses_create_params"]["input"][0]["content"] for r in other.rows]
    assert questions != others
    # Generators seeded with seed + index would share all tasks but one here.
    assert questions[1:] != others[:-1]


def test_a_shorter_benchmark_is_the_beginning_of_a_longer_one():
    for name in ("chain_sum", "tool_arithmetic"):
        short = load_benchmark(name, num_tasks=2, seed=1).rows
        assert short == load_benchmark(name, num_tasks=5, seed=1).rows[:2]


def test_a_dataset_that_draws_from_the_global_generator_is_still_decided_by_the_seed():
    random.seed(1)
    first = load_benchmark("reasoning_gym/list_functions", num_tasks=3, seed=0)
    random.seed(2)
    again = load_benchmark("reasoning_gym/list_functions", num_tasks=3, seed=0)
    assert first.rows == again.rows


def test_loading_leaves_the_callers_global_generator_alone():
    random.seed(7)
    expected = random.random()
    random.seed(7)
    load_benchmark("chain_sum", num_tasks=2)
    assert random.random() == expected


def test_global_random_restores_the_state_when_the_block_raises():
    state = random.getstate()

    def draw_and_raise():
        with global_random(3):
            raise KeyError(random.random())

    with pytest.raises(KeyError):
        draw_and_raise()
    assert random.getstate() == state


def test_generator_seeds_are_31_bits_and_differ_by_benchmark_and_seed():
    seeds = {generator_seed(name, seed) for name in ("a", "b") for seed in range(20)}
    assert len(seeds) == 40
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_reasoning_gym_takes_the_datasets_own_settings():
    benchmark = load_benchmark(
        "reasoning_gym/chain_sum",
        num_tasks=4,
        params={"min_terms": 4, "max_terms": 4, "answer_extractor": "last_integer"},
    )
    for row in benchmark.rows:
        assert row["entry"]["metadata"]["num_terms"] == 4
    servers = benchmark.servers["reasoning_gym_chain_sum"]["resources_servers"]
    assert servers["reasoning_gym"]["answer_extractor"] == "last_integer"


def test_the_answer_tag_is_asked_for_only_where_it_is_extracted():
    def prompt(**params):
        row = load_benchmark("reasoning_gym/gcd", num_tasks=1, params=params).rows[0]
        return row["responses_create_params"]["input"][0]["content"]

    assert "<answer>" in prompt()
    assert "<answer>" not in prompt(answer_extractor="whole")
    assert prompt(prompt="Q: {question} A:").startswith("Q: Find the Greatest")


def test_an_unknown_benchmark_names_the_near_one_and_all_others():
    with pytest.raises(ConfigError) as error:
        load_benchmark("chainsum", num_tasks=1)
    assert "Did you mean 'chain_sum'?" in str(error.value)
    assert "tool_arithmetic" in str(error.value)


def test_an_unknown_dataset_names_the_near_ones():
    with pytest.raises(ConfigError, match=r"no dataset 'gcdd'\. Did you mean gcd"):
        load_benchmark("reasoning_gym/gcdd", num_tasks=1)


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("reasoning_gym/gcd", {"digits": 3}, r"has no parameter 'digits'; it has: .*min_numbers"),
        ("reasoning_gym/gcd", {"seed": 3}, "has no parameter 'seed'"),
        ("reasoning_gym/gcd", {"min_numbers": 9, "max_numbers": 2}, "reasoning-gym refuses"),
        ("reasoning_gym/gcd", {"min_numbers": "x"}, "reasoning-gym refuses"),
        ("reasoning_gym/gcd", {"answer_extractor": "guess"}, "must be one of whole, last_integer"),
        ("reasoning_gym/gcd", {"prompt": "no place"}, r"must contain \{question\}"),
        ("tool_arithmetic", {"items": 3}, "it has: max_steps, num_items"),
        ("tool_arithmetic", {"num_items": 0}, "from 1 to 6"),
        ("tool_arithmetic", {"max_steps": 0}, "positive integer"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(name, params, text):
    with pytest.raises(ConfigError, match=text):
        load_benchmark(name, num_tasks=1, params=params)


@pytest.mark.parametrize("name", ["chain_sum", "tool_arithmetic"])
def test_a_benchmark_of_no_tasks_is_refused(name):
    with pytest.raises(ConfigError, match="num_tasks=0: must be positive"):
        load_benchmark(name, num_tasks=0)


def test_an_entry_without_an_answer_is_refused_when_the_benchmark_is_prepared():
    with pytest.raises(ConfigError, match="entry 0 of reasoning-gym 'propositional_logic' has no"):
        load_benchmark("reasoning_gym/propositional_logic", num_tasks=1)


def test_an_entry_whose_own_answer_fails_once_it_travelled_as_json_is_refused():
    # Its scorer compares tuples, which JSON turns into lists: every reply would score 0.05.
    with pytest.raises(ConfigError, match=r"gives the reference answer 0\.05 instead of 1"):
        load_benchmark("reasoning_gym/rearc", num_tasks=1)


def test_tool_arithmetic_answers_are_what_the_question_spells_out():
    for row in load_benchmark("tool_arithmetic", num_tasks=20, seed=3).rows:
        question = row["responses_create_params"]["input"][0]["content"]
        terms = re.findall(r"(\d+) times the number of (\w+)", question)
        assert len(terms) == 2
        assert row["expected_answer"] == sum(int(n) * row["table"][item] for n, item in terms)


def test_tool_arithmetic_hides_the_numbers_behind_tools():
    row = load_benchmark("tool_arithmetic", num_tasks=1, params={"num_items": 3}).rows[0]
    tools = row["responses_create_params"]["tools"]
    assert [tool["name"] for tool in tools] == ["lookup", "calculator"]
    question = row["responses_create_params"]["input"][0]["content"]
    assert question.count("times the number of") == 3
    assert len(row["table"]) == 5


def test_changing_a_row_changes_no_other_row():
    rows = load_benchmark("tool_arithmetic", num_tasks=2).rows
    rows[0]["responses_create_params"]["tools"][0]["parameters"]["type"] = "changed"
    assert rows[1]["responses_create_params"]["tools"][0]["parameters"]["type"] == "object"
    again = load_benchmark("tool_arithmetic", num_tasks=1).rows[0]
    assert again["responses_create_params"]["tools"][0]["parameters"]["type"] == "object"


def test_every_listed_benchmark_has_one_line():
    infos = list_benchmarks()
    assert [info.name for info in infos] == [
        "chain_sum",
        "reasoning_gym/<dataset>",
        "tool_arithmetic",
        "instruction_following",
        "exact_maths",
        "verifiers/<environment>",
    ]
    assert all(info.description and "\n" not in info.description for info in infos)
