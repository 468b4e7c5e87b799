"""What ``gymrl view`` refuses before anything is served, and whom it lets in."""

import pytest

from gymrl.cli import main
from gymrl.cli.view import file_of, token_of, tokenizer_of
from gymrl.errors import ConfigError
from tests.rollout_files import trajectory, write_rollouts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere.jsonl",), "nowhere.jsonl: No such file"),
        (("{sample}", "--host", "0.0.0.0"), "--token"),
        (("{sample}", "--tokenizer", "{sample}"), "cannot be loaded"),
        (("{sample}", "--against", "runs/a"), "can't be compared with runs/a"),
        (("{sample}", "--port", "99999"), "65535"),
        ((), "ROLLOUTS.jsonl"),
    ],
)
def test_what_cannot_be_shown_is_a_message_and_exit_code_2(capsys, tmp_path, arguments, said):
    sample = write_rollouts(tmp_path / "rollouts.jsonl", [trajectory()])
    with pytest.raises(SystemExit) as exit_request:
        main(["view", *(argument.format(sample=sample) for argument in arguments)])

    captured = capsys.readouterr()
    assert exit_request.value.code == 2
    assert said in captured.err
    assert "Traceback" not in captured.out + captured.err


def test_a_token_is_the_environments_or_new_where_one_is_required(monkeypatch):
    monkeypatch.delenv("GYMRL_VIEW_TOKEN", raising=False)
    assert token_of(required=False) is None
    first, second = token_of(required=True), token_of(required=True)
    assert first != second
    assert min(len(first), len(second)) >= 32

    monkeypatch.setenv("GYMRL_VIEW_TOKEN", "chosen")
    assert token_of(required=False) == "chosen"


def test_a_tokenizer_that_is_no_shipped_model_is_taken_by_its_name():
    assert tokenizer_of("some/where") == "some/where"
    assert tokenizer_of(None) is None


def test_of_an_evaluations_directory_its_rollouts_are_shown(tmp_path):
    sample = write_rollouts(tmp_path / "rollouts.jsonl", [trajectory()])
    assert file_of(tmp_path) == sample
    assert file_of(sample) == sample


def test_what_has_no_rollouts_is_refused_with_what_to_name(tmp_path):
    with pytest.raises(ConfigError, match="nowhere: No such file or directory"):
        file_of(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"a directory without rollouts\.jsonl: name a file"):
        file_of(tmp_path)
