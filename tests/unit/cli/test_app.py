import pytest

from gymrl import __version__
from gymrl.cli import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_request:
        main(arguments)
    captured = capsys.readouterr()
    return exit_request.value.code, captured.out, captured.err


def test_the_version_is_printed(capsys):
    assert run(capsys, "--version") == (0, f"gymrl {__version__}\n", "")


def test_benchmarks_are_listed_one_a_line(capsys):
    code, out, _ = run(capsys, "benchmarks")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        "chain_sum",
        "reasoning_gym/<dataset>",
        "tool_arithmetic",
        "instruction_following",
        "exact_maths",
        "verifiers/<environment>",
    ]


@pytest.mark.parametrize("command", ["rollout", "serve", "doctor", "benchmarks"])
def test_every_command_explains_itself(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "Usage" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("rollout", "chainsum", "--model", "smollm2"), "Did you mean 'chain_sum'?"),
        (("rollout", "chain_sum"), "no model: give --model"),
        (("rollout", "chain_sum", "--model", "m", "--num-prompts", "0"), "num-prompts"),
        (("rollout", "chain_sum", "--model", "m", "--dtype", "int3"), "dtype"),
        (("rollout", "chain_sum", "--model", "m", "--temperature", "0"), "greedy"),
        (("rollout", "nowhere.jsonl", "--model", "m"), "nowhere.jsonl: No such file"),
        (("no-such-command",), "No such command"),
        (("doctor", "nowhere.jsonl", "--model", "smollm2"), "nowhere.jsonl"),
    ],
)
def test_a_wrong_command_line_is_a_message_and_exit_code_2(capsys, arguments, text):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert text in err
    assert "Traceback" not in out + err


def test_an_output_that_exists_is_refused_before_anything_starts(capsys, tmp_path):
    output = tmp_path / "rollouts.jsonl"
    output.write_text("precious\n")
    code, _, err = run(capsys, "rollout", "chain_sum", "--model", "m", "--output", str(output))
    assert code == 2
    assert "--overwrite" in err
    assert output.read_text() == "precious\n"


def test_rollouts_are_not_written_to_standard_output(capsys):
    code, _, err = run(capsys, "rollout", "chain_sum", "--model", "m", "--output", "-")
    assert code == 2
    assert "rollouts go to a file" in err


def test_an_output_in_a_folder_that_does_not_exist_is_refused(capsys, tmp_path):
    output = tmp_path / "missing" / "rollouts.jsonl"
    code, _, err = run(capsys, "rollout", "chain_sum", "--model", "m", "--output", str(output))
    assert code == 2
    assert "missing" in err
