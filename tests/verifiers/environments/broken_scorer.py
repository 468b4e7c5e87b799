"""A reward function that always raises; the classic kind of environment."""

import verifiers as vf
from datasets import Dataset


def load_environment():
    def always_raises(completion, **_):
        raise RuntimeError("the scorer is broken")

    dataset = Dataset.from_list([{"question": "Is it raining?", "answer": "yes"}])
    return vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[always_raises]))
