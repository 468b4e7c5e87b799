import json

import pytest
import torch

from gymrl.cli.app import run_app
from gymrl.testing import build_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_a_model_whose_template_keeps_everything_passes(model, capsys):
    assert run_app(["doctor", "--model", str(model)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "a loop of tool calls" in printed
    assert "Nothing of this would break a run." in printed


def test_a_template_that_drops_reasoning_fails_unless_the_run_has_none(model, tmp_path, capsys):
    template = json.loads((model / "tokenizer_config.json").read_text()).get("chat_template")
    source = model / "chat_template.jinja"
    template = template or source.read_text()
    dropping = template.replace(
        "{%- if message.reasoning_content %}", "{%- if message.reasoning_content and loop.last %}"
    )
    assert dropping != template
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(dropping)
    assert run_app(["doctor", "--model", str(tmp_path)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "rewritten: at token" in printed
    assert "would break a run" in printed
    without = ["doctor", "--model", str(tmp_path), "--without", "reasoning"]
    assert run_app(without) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing to check"),
        (("--model", "/nowhere"), "/nowhere"),
        (("--model", "smollm2", "--without", "colour"), "one of turns, tools and reasoning"),
        (("--base-url", "127.0.0.1:80/v1"), "is no URL; write http://host:port/v1"),
        (("rollouts.jsonl",), "add --model"),
        (("r.jsonl", "--model", "m", "--base-url", "http://h/v1"), "leave one of them out"),
    ],
)
def test_what_can_not_be_checked_is_said(arguments, said, capsys):
    assert run_app(["doctor", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def copied(model, directory, **changed: str):
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    for name, text in changed.items():
        (directory / name.replace("__", ".")).write_text(text)
    return str(directory)


def test_a_template_that_can_not_be_written_is_a_finding_with_what_to_change(
    model, tmp_path, capsys
):
    broken = copied(model, tmp_path, chat_template__jinja="{{ messages | nofilter }}")
    assert run_app(["doctor", "--model", broken]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "No filter named 'nofilter'" in printed
    assert "-> use another template" in printed


def test_a_tokenizer_without_a_template_is_a_finding_with_what_to_change(model, tmp_path, capsys):
    directory = copied(model, tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert run_app(["doctor", "--model", directory]) == 1
    assert "-> add chat_template.jinja" in " ".join(capsys.readouterr().out.split())


def test_tokenizer_files_that_are_broken_in_any_way_are_told_without_a_stack(
    model, tmp_path, capsys
):
    assert run_app(["doctor", "--model", copied(model, tmp_path, tokenizer__json="{}")]) == 2
    told = capsys.readouterr().err
    assert "can't be read: KeyError" in told
    assert "Traceback" not in told


def test_a_server_that_is_not_there_is_an_error(capsys):
    assert run_app(["doctor", "--base-url", "http://127.0.0.1:9/v1"]) == 1
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err
