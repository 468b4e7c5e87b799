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
        (("rollouts.jsonl",), "add --model"),
        (("r.jsonl", "--model", "m", "--base-url", "http://h/v1"), "leave one of them out"),
    ],
)
def test_what_can_not_be_checked_is_said(arguments, said, capsys):
    assert run_app(["doctor", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_server_that_is_not_there_is_an_error(capsys):
    assert run_app(["doctor", "--base-url", "http://127.0.0.1:9/v1"]) == 1
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err
