"""The environment that runs the model's programs."""

import pytest

from gymrl.environments import settled, spawn_environment
from gymrl.environments.builtin.python_code import PythonCodeEnvironment, make_task
from gymrl.environments.builtin.python_sandbox import PythonLimits


def said(text):
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]


def program(code):
    return said(f"Here it is:\n```python\n{code}\n```\nThat should do.")


async def step(task, *logs, **settings):
    environment = PythonCodeEnvironment(PythonLimits(wall_time_s=50), **settings)
    answer = await environment.step(list(logs), [task.metadata] * len(logs))
    return settled(answer, len(logs), "code")


async def test_a_program_is_judged_by_what_it_writes():
    task = make_task("Add.", stdin="1 2\n", expected_output="3\n")

    answer = await step(
        task,
        program("print(sum(map(int, input().split())))"),
        program("print(4)"),
        program("print(3); raise SystemExit(1)"),
        program("print('3  ')"),
    )

    assert answer.rewards == [1.0, 0.0, 0.0, 1.0]
    assert answer.terminateds == [True] * 4
    assert answer.observations[1]["content"] == "The program ended with exit code 0.\nstdout:\n4\n"


async def test_tests_run_after_the_program():
    task = make_task("Write add.", tests="assert add(1, 2) == 3\nassert add(0, 0) == 0")

    answer = await step(
        task,
        program("def add(a, b): return a + b"),
        program("def add(a, b): return 3"),
        program("def add(a, b): return a + b\nprint('seen')"),
    )

    assert answer.rewards == [1.0, 0.0, 1.0]
    assert "AssertionError" in answer.observations[1]["content"]
    assert answer.observations[2]["content"].endswith("stdout:\nseen\n")


@pytest.mark.parametrize(
    "escape", ["raise SystemExit(0)", "import os; os._exit(0)", "quit()", "exit(0)"]
)
async def test_a_program_that_leaves_before_the_tests_has_not_passed_them(escape):
    answer = await step(make_task("x", tests="assert False"), program(escape))

    assert answer.rewards == [0.0]


async def test_an_answer_without_a_program_is_told_how_to_write_one():
    task = make_task("Add.", expected_output="3", max_attempts=2)

    answer = await step(task, said("I would rather not."))

    assert (answer.rewards, answer.terminateds, answer.answers) == ([0.0], [False], [None])
    assert answer.metadata[0]["attempts"] == 1
    assert task.metadata["attempts"] == 0
    again = await PythonCodeEnvironment().step([said("No.")], answer.metadata)
    assert again.terminateds == [True]


async def test_a_long_error_is_shown_in_part():
    answer = await step(
        make_task("x", expected_output="1"),
        program("raise ValueError('é' * 10_000 + 'the end')"),
        max_observation_chars=100,
    )

    text = answer.observations[0]["content"]
    assert "(last 100 characters)" in text
    assert text.endswith("the end\n")
    assert len(text) < 300


async def test_a_program_that_hangs_is_reported_as_such():
    environment = PythonCodeEnvironment(PythonLimits(wall_time_s=0.5))
    task = make_task("x", expected_output="1")

    answer = await environment.step([program("import time; time.sleep(60)")], [task.metadata])

    assert answer.rewards == [0.0]
    assert answer.observations[0]["content"] == (
        "The program was stopped: it took longer than 0.5 s.\n"
    )


async def test_programs_run_in_a_worker_as_well():
    task = make_task("Add.", stdin="1 2\n", expected_output="3\n")
    async with spawn_environment(
        "gymrl.environments.builtin.python_code:PythonCodeEnvironment", num_workers=1
    ) as world:
        answer = await world.step(
            [
                program("print(sum(map(int, input().split())))"),
                program("import socket; socket.socket()"),
            ],
            [task.metadata] * 2,
        )

    assert answer.rewards == [1.0, 0.0]
