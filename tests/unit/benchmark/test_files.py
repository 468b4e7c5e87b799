import pytest

from gymrl.benchmark import read_rows, read_servers
from gymrl.errors import ConfigError


def test_rows_are_read_in_order_and_blank_lines_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"task_id": "a"}\n\n{"task_id": "b"}\n{"task_id": "c"}\n')
    assert [row["task_id"] for row in read_rows(file)] == ["a", "b", "c"]
    assert [row["task_id"] for row in read_rows(file, limit=2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n[1]\n', "line 2: Expected `object`, got `array`"),
        ('{"a": 1}\n{"b": \n', "line 2: "),
        ("\n\n", "holds no rows"),
    ],
)
def test_a_file_that_is_no_jsonl_of_rows_is_refused_by_line(tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rows(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: No such file"):
        read_rows(tmp_path / "nowhere.jsonl")


def test_fewer_rows_than_asked_for_are_not_silently_fewer(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="holds 1 rows; 4 were asked for"):
        read_rows(file, limit=4)


def test_servers_are_the_instances_of_a_gym_configuration(tmp_path):
    file = tmp_path / "servers.yaml"
    file.write_text(
        "policy_base_url: http://127.0.0.1:1/v1\n"
        "adder:\n  resources_servers:\n    adder: {entrypoint: app.py}\n"
    )
    assert read_servers(file) == {
        "adder": {"resources_servers": {"adder": {"entrypoint": "app.py"}}}
    }


def test_a_file_that_includes_gyms_own_files_is_kept_whole(tmp_path):
    file = tmp_path / "servers.yaml"
    file.write_text("config_paths: [a.yaml]\njudge_url: http://127.0.0.1:1/v1\n")
    assert read_servers(file) == {
        "config_paths": ["a.yaml"],
        "judge_url": "http://127.0.0.1:1/v1",
    }


def test_a_file_without_any_instance_is_refused(tmp_path):
    file = tmp_path / "servers.yaml"
    file.write_text("policy_base_url: http://127.0.0.1:1/v1\n")
    with pytest.raises(ConfigError, match="declares no server instance"):
        read_servers(file)
