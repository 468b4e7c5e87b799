"""What models and servers wrote, on a terminal."""

import io
import logging

import pytest
from rich.console import Console

from gymrl.cli.app import run_app
from gymrl.cli.consoles import configure_logging, printable_lines
from gymrl.errors import ConfigError

ATTACK = "all is well\x1b]0;owned\x07\x1b[2J\x9b1A\u202egnp.exe\r\x08"


def test_what_would_steer_a_terminal_is_written_out_and_lines_stay():
    shown = printable_lines(f"first\n\t{ATTACK}\nlast é 中")
    assert shown.splitlines()[0] == "first"
    assert shown.splitlines()[2] == "last é 中"
    assert "\\x1b]0;owned\\x07" in shown
    assert all(character.isprintable() for character in shown.replace("\n", ""))


@pytest.fixture
def root_logger():
    root, own = logging.getLogger(), logging.getLogger("gymrl")
    handlers, levels = root.handlers[:], (root.level, own.level)
    yield root
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_line_of_the_log_steers_a_terminal(root_logger, is_terminal):
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, no_color=True, width=200)
    configure_logging(console, verbose=False)
    try:
        raise ConfigError(ATTACK)
    except ConfigError:
        logging.getLogger("gymrl.test").exception("a server said %s", ATTACK)
    assert "\x1b]0;" not in file.getvalue()
    assert "\x9b" not in file.getvalue()
    assert "owned" in file.getvalue()


def test_no_error_of_the_command_line_steers_a_terminal(capsys):
    assert run_app(["view", f"/nowhere/{ATTACK}.jsonl"]) != 0
    said = capsys.readouterr().err
    assert "owned" in said
    assert not set(said) & set("\x1b\x07\x9b\u202e\r\x08")
