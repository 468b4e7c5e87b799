"""A conversation of three turns, whatever is answered; the classic kind of environment."""

import verifiers as vf
from datasets import Dataset


class AskAgain(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "Are you sure?"}]


def load_environment():
    def num_answers(state, **_):
        return float(len(state["trajectory"]))

    dataset = Dataset.from_list([{"question": "Is it raining?", "answer": "yes"}])
    return AskAgain(dataset=dataset, rubric=vf.Rubric(funcs=[num_answers]), max_turns=3)
