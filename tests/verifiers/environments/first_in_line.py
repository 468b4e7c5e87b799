"""Answers scored by their order among all answers to a question; the classic kind of environment."""

import verifiers as vf
from datasets import Dataset


def load_environment():
    def order(completions, **_):
        texts = [completion[-1]["content"] for completion in completions]
        return [float(sorted(texts).index(text)) for text in texts]

    def said_something(completion, **_):
        return 1.0 if completion else 0.0

    rows = [{"question": f"Name number {n}.", "answer": ""} for n in range(4)]
    rubric = vf.Rubric(funcs=[order, said_something], weights=[1.0, 0.25])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
