from pathlib import Path

import pytest

from gymrl.cli.plan import RolloutOptions, make_plan, parse_params
from gymrl.cli.rollout import check_output, open_records
from gymrl.errors import ConfigError
from gymrl.records import read_run


def plan(target="chain_sum", **options):
    options.setdefault("model", "smollm2")
    return make_plan(RolloutOptions(target=target, **options))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


ROW = '{"task_source": "adder", "responses_create_params": {"input": "1 + 1?"}}\n'
SERVERS = "adder:\n  resources_servers:\n    adder: {entrypoint: 'x:Y'}\n"


def test_a_benchmark_brings_its_rows_servers_and_suggested_sampling():
    made = plan(num_prompts=3, num_generations=4)
    assert (len(made.rows), made.num_generations, made.num_rows) == (3, 4, 12)
    assert set(made.config.gym.servers) == {"chain_sum", "chain_sum_simple_agent"}
    assert made.config.sampling.temperature == 0.7
    assert made.config.sampling.max_tokens == 24
    assert made.config.failure_policy == "mask"
    assert made.config.seed == 0
    assert made.config.generation is not None
    assert made.config.generation.model == "smollm2"


def test_options_win_over_what_the_benchmark_suggests():
    made = plan(temperature=1.0, top_p=0.9, max_output_tokens=7, seed=5, batch_size=1)
    sampling = made.config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 0.9, 7)
    assert made.config.seed == 5
    assert made.config.generation is not None
    assert made.config.generation.max_batch_size == 1
    assert made.rows[0]["task_id"] == "chain_sum-s5-00000"


def test_a_configuration_file_stands_between_options_and_suggestions(tmp_path):
    file = write(
        tmp_path / "run.yaml",
        "seed: 9\nnum_workers: 2\nfailure_policy: drop_group\n"
        "sampling: {temperature: 0.5}\n"
        "generation: {model: some/model, dtype: bfloat16}\n"
        "gym: {row_timeout_s: 30}\n",
    )
    made = plan(model=None, config=file, top_p=0.8)
    assert made.config.seed == 9
    assert made.rows[0]["task_id"] == "chain_sum-s9-00000"
    assert made.config.num_workers == 2
    assert made.config.failure_policy == "drop_group"
    sampling = made.config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.8, 24)
    assert made.config.gym.row_timeout_s == 30
    assert made.config.generation is not None
    assert (made.config.generation.model, made.config.generation.dtype) == (
        "some/model",
        "bfloat16",
    )
    other = plan(config=file, workers=3)
    assert other.config.num_workers == 3
    assert other.config.generation is not None
    assert (other.config.generation.model, other.config.generation.dtype) == (
        "smollm2",
        "bfloat16",
    )


def test_an_unknown_key_of_a_configuration_file_is_refused_with_its_path(tmp_path):
    file = write(tmp_path / "run.yaml", "gym: {row_timeout: 30}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: gym\.row_timeout: .*row_timeout_s"):
        plan(config=file)


def test_base_urls_replace_the_loaded_model(tmp_path):
    file = write(tmp_path / "run.yaml", "generation: {model: some/model}\ngym: {}\n")
    made = plan(
        model=None,
        config=file,
        base_urls=("http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"),
        model_name="policy-7b",
        tokenizer="some/dir",
    )
    assert made.config.generation is None
    assert made.config.gym.base_urls == ("http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1")
    assert made.config.gym.model_name == "policy-7b"
    assert made.config.gym.tokenizer == "some/dir"


def test_rows_of_a_file_go_with_servers_of_a_file(tmp_path):
    rows = write(tmp_path / "rows.jsonl", ROW * 3)
    servers = write(tmp_path / "servers.yaml", SERVERS)
    made = plan(str(rows), servers=servers)
    assert made.name == "rows"
    assert len(made.rows) == 3
    assert set(made.config.gym.servers) == {"adder"}
    assert made.config.sampling.temperature == 1.0
    assert len(plan(str(rows), servers=servers, num_prompts=2).rows) == 2


def test_rows_can_go_to_servers_that_run_already(tmp_path):
    rows = write(tmp_path / "rows.jsonl", ROW)
    made = plan(str(rows), registry="http://127.0.0.1:11000")
    assert made.config.gym.registry_url == "http://127.0.0.1:11000"
    assert made.config.gym.servers == {}


def test_servers_that_run_already_know_their_policy():
    made = plan(model=None, registry="http://127.0.0.1:11000")
    assert made.config.generation is None
    assert made.config.gym.base_urls == ()
    assert not made.asks_model_name


def test_policy_servers_are_asked_for_their_model_where_nobody_named_it(tmp_path):
    urls = ("http://127.0.0.1:1/v1",)
    assert plan(model=None, base_urls=urls).asks_model_name
    assert not plan(model=None, base_urls=urls, model_name="m").asks_model_name
    file = write(tmp_path / "run.yaml", "gym: {model_name: m, base_urls: ['http://x/v1']}\n")
    assert not plan(model=None, config=file).asks_model_name


def test_a_benchmarks_rows_can_go_to_servers_that_run_already():
    made = plan(registry="http://127.0.0.1:11000")
    assert made.config.gym.servers == {}
    assert len(made.rows) == 8


def test_tokens_can_come_from_the_policy_servers_ledger(tmp_path):
    assert plan().config.gym.token_source == "messages"
    assert plan(token_source="both").config.gym.token_source == "both"
    kept = plan(token_source="ledger", side_calls="keep").config.gym
    assert (kept.token_source, kept.side_calls) == ("ledger", "keep")
    file = write(tmp_path / "run.yaml", "gym: {token_source: ledger}\n")
    assert plan(config=file, side_calls="keep").config.gym.side_calls == "keep"
    assert plan(config=file, token_source="messages").config.gym.token_source == "messages"


def test_a_ledger_of_a_policy_that_nobody_names_is_refused():
    with pytest.raises(ConfigError, match="add its --base-url"):
        plan(model=None, registry="http://127.0.0.1:11000", token_source="ledger")
    named = plan(
        model=None,
        registry="http://127.0.0.1:11000",
        base_urls=("http://127.0.0.1:1/v1",),
        token_source="ledger",
    )
    assert named.config.gym.base_urls == ("http://127.0.0.1:1/v1",)


def test_servers_of_a_file_replace_those_of_a_benchmark_by_name(tmp_path):
    servers = write(
        tmp_path / "servers.yaml",
        "chain_sum:\n  resources_servers:\n    strict: {entrypoint: 'my:Strict'}\n",
    )
    made = plan(servers=servers)
    assert made.config.gym.servers["chain_sum"] == {
        "resources_servers": {"strict": {"entrypoint": "my:Strict"}}
    }
    assert "chain_sum_simple_agent" in made.config.gym.servers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "no model: give --model"),
        ({"base_urls": ("http://x/v1",)}, "give one of them"),
        ({"model": None, "base_urls": ("http://x/v1",), "dtype": "float32"}, "--dtype needs"),
        ({"model": None, "batch_size": 2}, "--batch-size needs --model"),
        ({"model": None, "backend": "vllm"}, "--backend needs --model"),
        ({"backend": "vllm", "batch_size": 1}, r"--batch-size 1 .*max_num_seqs: 1"),
        ({"side_calls": "keep"}, "add --token-source ledger"),
        ({"side_calls": "keep", "token_source": "both"}, "add --token-source ledger"),
        ({"num_generations": 0}, "--num-generations 0: must be positive"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"in_process": True, "workers": 2}, "one process has one worker"),
        ({"params": ("min_terms",)}, "write it as key=value"),
        ({"params": ("terms=3",)}, "has no parameter 'terms'"),
        ({"target": "chainsum"}, "Did you mean 'chain_sum'"),
        ({"target": "zzz"}, r"A file of rows must end in \.jsonl or exist"),
        ({"target": "missing.jsonl"}, r"missing\.jsonl: No such file"),
        ({"config": Path("missing.yaml")}, r"missing\.yaml: No such file"),
    ],
)
def test_what_cannot_be_run_is_refused_with_what_to_do(options, message):
    with pytest.raises(ConfigError, match=message):
        plan(**options)


def test_rows_without_servers_are_refused(tmp_path):
    rows = write(tmp_path / "rows.jsonl", ROW)
    with pytest.raises(ConfigError, match="add --servers"):
        plan(str(rows))


def test_parameters_of_a_file_of_rows_are_refused(tmp_path):
    rows = write(tmp_path / "rows.jsonl", ROW)
    with pytest.raises(ConfigError, match="a file of rows has none"):
        plan(str(rows), params=("a=1",))


def test_servers_and_a_registry_together_are_refused(tmp_path):
    servers = write(tmp_path / "servers.yaml", SERVERS)
    with pytest.raises(ConfigError, match="give one of them"):
        plan(servers=servers, registry="http://127.0.0.1:1")


def test_parameters_are_read_as_what_they_look_like():
    assert parse_params(("a=3", "b=true", "c=[1, 2]", "d=last_integer", "e=1.5", "f=")) == {
        "a": 3,
        "b": True,
        "c": [1, 2],
        "d": "last_integer",
        "e": 1.5,
        "f": None,
    }


@pytest.mark.parametrize(
    ("params", "message"),
    [(("a=1", "a=2"), "given twice"), (("=1",), "key=value"), (("a=[",), "does not parse")],
)
def test_malformed_parameters_are_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        parse_params(params)


def test_of_two_runs_that_start_together_the_second_leaves_the_first_ones_file(tmp_path):
    output = tmp_path / "rollouts.jsonl"
    check_output(output, overwrite=False)
    first = open_records(plan(num_prompts=1), output, overwrite=False)
    written = output.read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        open_records(plan(num_prompts=1), output, overwrite=False)
    first.close()
    assert output.read_bytes() == written
    open_records(plan(num_prompts=2), output, overwrite=True).close()
    assert read_run(output).notes["benchmark"] == "chain_sum"
