import pytest

from gymrl.benchmark.roots import BenchmarkSource, SearchRoot, find_benchmark, search_roots
from gymrl.benchmark.settings import checked_overrides, load_config, resolved, value_of
from gymrl.errors import ConfigError


@pytest.fixture
def load(tmp_path):
    def loading(files, overrides=None):
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        source = BenchmarkSource(
            name="bench", file=tmp_path / "main.yaml", config_path="main.yaml", presets={}
        )
        return load_config(source, [SearchRoot(tmp_path)], checked_overrides(overrides))

    return loading


@pytest.mark.parametrize(
    "overrides",
    [
        {"a.b": 1},
        {"a": {"b.c": 1}},
        {"a": [{"x": 1}, {"b.c": 1}]},
        {"a": ({"deep": [{"b.c": {}}]},)},
    ],
)
def test_a_dotted_key_is_refused_at_any_depth(overrides):
    with pytest.raises(ConfigError, match="has a dot; write nested mappings instead"):
        checked_overrides(overrides)


def test_the_refusal_shows_the_nested_mapping():
    with pytest.raises(ConfigError, match=r"\{'judge': \{'model': \.\.\.\}\}"):
        checked_overrides({"judge.model": "x"})


def test_a_value_may_have_dots():
    assert checked_overrides({"a": "b.c"}) == {"a": "b.c"}


def test_overrides_that_are_no_mapping_are_refused():
    with pytest.raises(ConfigError, match="overrides is a list"):
        checked_overrides(["a=1"])


def test_own_keys_win_over_those_of_included_files(load):
    config = load(
        {
            "main.yaml": "config_paths: [one.yaml, two.yaml]\na: {x: main}\n",
            "one.yaml": "config_paths: [deep.yaml]\na: {x: one, y: one, z: one}\n",
            "two.yaml": "a: {y: two}\n",
            "deep.yaml": "a: {z: deep, w: deep}\n",
        }
    )

    assert resolved(config.a, "a") == {"x": "main", "y": "two", "z": "one", "w": "deep"}
    assert list(config.config_paths) == ["main.yaml", "one.yaml", "deep.yaml", "two.yaml"]


def test_files_that_include_each_other_are_each_read_once(load):
    config = load(
        {
            "main.yaml": "config_paths: [other.yaml]\na: 1\n",
            "other.yaml": "config_paths: [main.yaml]\nb: 2\n",
        }
    )

    assert (config.a, config.b) == (1, 2)


def test_overrides_win_and_are_not_changed(load):
    overrides = {"a": {"x": 2, "list": (1, 2)}}

    config = load({"main.yaml": "a: {x: 1, y: 1}\nb: ${a.x}\n"}, overrides)

    assert resolved(config.a, "a") == {"x": 2, "y": 1, "list": [1, 2]}
    assert value_of(config, "b") == 2
    assert overrides == {"a": {"x": 2, "list": (1, 2)}}


def test_paths_are_taken_as_texts_and_other_objects_are_refused(load, tmp_path):
    assert value_of(load({"main.yaml": "a: 1\n"}, {"a": tmp_path}), "a") == str(tmp_path)
    with pytest.raises(ConfigError, match=r"overrides\['a'\]\[0\] is a set"):
        load({"main.yaml": "a: 1\n"}, {"a": [{1}]})


def test_an_env_file_comes_between_files_and_overrides(load):
    config = load(
        {"main.yaml": "a: file\nb: file\nc: file\n", "env.yaml": "a: env\nb: env\n"},
        {"a": "override"},
    )

    assert [value_of(config, key) for key in "abc"] == ["override", "env", "file"]


def test_an_included_file_that_is_missing_is_named_with_where_it_was_looked_for(load, tmp_path):
    with pytest.raises(ConfigError, match=rf"names 'gone\.yaml', which is in none of: {tmp_path}"):
        load({"main.yaml": "config_paths: [gone.yaml]\n"})


def test_a_file_that_does_not_parse_is_named(load):
    with pytest.raises(ConfigError, match=r"main\.yaml does not parse"):
        load({"main.yaml": "a: [1\n"})


def test_values_that_are_not_set_are_listed(load):
    config = load({"main.yaml": "a: {x: '???', y: [{z: '???'}]}\n"})

    with pytest.raises(ConfigError, match=r"2 required values are not set .*x, y\[0\]\.z"):
        resolved(config.a, "a")


def test_an_interpolation_that_leads_nowhere_is_named(load):
    config = load({"main.yaml": "a: {x: '${judge_base_url}'}\n"})

    with pytest.raises(ConfigError, match="judge_base_url"):
        resolved(config.a, "instance 'a'")


def write(root, name, text="{}"):
    file = root / "benchmarks" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")
    return file


def test_earlier_roots_win(tmp_path, monkeypatch):
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for root in (one, two, three):
        write(root, "aime/config.yaml")
    write(two, "ifeval/config.yaml")
    write(three, "ifeval/config.yaml")
    write(three, "gpqa/diamond.yaml")
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", f"{two}")
    monkeypatch.chdir(three)
    roots = search_roots([one])

    assert find_benchmark("aime", roots).file == one / "benchmarks/aime/config.yaml"
    assert find_benchmark("ifeval", roots).file == two / "benchmarks/ifeval/config.yaml"
    found = find_benchmark("gpqa/diamond", roots)
    assert found.file == three / "benchmarks/gpqa/diamond.yaml"
    assert found.config_path == "benchmarks/gpqa/diamond.yaml"
    assert find_benchmark("chain_sum", roots).config_path == (
        "gymrl/benchmark/shipped/chain_sum/config.yaml"
    )


def test_flavors_may_nest(tmp_path):
    write(tmp_path, "code/lcb/v6.yaml")

    assert find_benchmark("code/lcb/v6", [SearchRoot(tmp_path)]).config_path == (
        "benchmarks/code/lcb/v6.yaml"
    )


DECLARED = "agent: {responses_api_agents: {impl: {datasets: [{type: benchmark}]}}}"


def test_an_unknown_name_is_refused_with_what_comes_close(tmp_path):
    write(tmp_path, "ifeval/config.yaml", DECLARED)
    write(tmp_path, "tinymath/hard.yaml", DECLARED)
    write(tmp_path, "tinymath/prompts/default.yaml", "user: the type of a benchmark: {question}")
    write(tmp_path, "tinymath/manifest.yaml", "type: benchmark")
    write(tmp_path, "tinymath/suite.yaml", f"{DECLARED}\n{DECLARED.replace('agent', 'other', 1)}")
    roots = [SearchRoot(tmp_path)]

    with pytest.raises(ConfigError, match="Did you mean 'ifeval'"):
        find_benchmark("ifevl", roots)
    with pytest.raises(ConfigError, match="Did you mean 'tinymath/hard'"):
        find_benchmark("tinymath/herd", roots)
    with pytest.raises(ConfigError, match=r"It has flavors \(1\); name one: tinymath/hard\."):
        find_benchmark("tinymath", roots)
    with pytest.raises(ConfigError, match=r"'zzz'\. There are: ifeval, tinymath\. Looked in"):
        find_benchmark("zzz", roots)


def test_an_environment_of_verifiers_is_told_where_it_can_be_had():
    with pytest.raises(
        ConfigError, match="gymrl rollout verifiers/owner/wordle, or load_benchmark"
    ):
        find_benchmark("verifiers/owner/wordle", search_roots())


@pytest.mark.parametrize("name", ["", "/etc", "../x", "a/../b", "reasoning_gym/_flavor", 3])
def test_a_name_that_leaves_the_folder_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="a name is written NAME or NAME/FLAVOR"):
        find_benchmark(name, [SearchRoot(tmp_path)])


def test_a_family_knows_its_flavors():
    found = find_benchmark("reasoning_gym/leg_counting", search_roots())

    assert found.presets == {"flavor": "leg_counting"}
    with pytest.raises(ConfigError, match="Did you mean 'reasoning_gym/leg_counting'"):
        find_benchmark("reasoning_gym/leg_countin", search_roots())


def test_a_search_root_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        search_roots([tmp_path / "gone"])


def test_looking_for_a_name_runs_nothing_that_lies_in_a_root(tmp_path, monkeypatch):
    family = tmp_path / "benchmarks/x/_flavor.yaml"
    family.parent.mkdir(parents=True)
    family.write_text("_flavors_from: planted_flavors:run\ndatasets:\n- type: benchmark\n")
    (tmp_path / "planted_flavors.py").write_text("raise SystemExit('it was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    roots = search_roots([tmp_path])
    for name in ("x/a", "x", "nothing-of-this-name"):
        with pytest.raises(ConfigError, match="no benchmark is called"):
            find_benchmark(name, roots)
    assert find_benchmark("reasoning_gym/chain_sum", roots).presets == {"flavor": "chain_sum"}
