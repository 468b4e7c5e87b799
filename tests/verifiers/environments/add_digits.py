"""Sums, one answer each; the classic kind of environment."""

import verifiers as vf
from datasets import Dataset


def load_environment(size: int = 4):
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(size)]

    def has_answer(completion, answer, **_):
        return 1.0 if answer in completion[-1]["content"] else 0.0

    def said_something(completion, **_):
        return 1.0 if completion else 0.0

    rubric = vf.Rubric(funcs=[has_answer, said_something], weights=[1.0, 0.25])
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), system_prompt="Add the numbers.", rubric=rubric
    )
