"""A codec of characters and scripted environments, shared by the tests of native rollouts."""

from gymrl.environments import EnvironmentReturn
from gymrl.generation import Generated


class Characters:
    """One token a character; a prompt is its messages' contents."""

    def encode_prompt(self, messages):
        return [ord(c) for message in messages for c in message["content"]]

    def encode_observation(self, observation, sampled_ids):
        return [ord(c) for c in observation["content"]]

    def decode(self, token_ids):
        return "".join(chr(token_id) for token_id in token_ids)


def says(text, finish_reason="stop", logprob=-0.5):
    return Generated(
        token_ids=[ord(c) for c in text],
        logprobs=[logprob] * len(text),
        finish_reason=finish_reason,
    )


def observation(content):
    return {"role": "environment", "content": content}


class Scripted:
    """Answers each conversation by a function of its log and metadata."""

    def __init__(self, answer):
        self._answer = answer
        self.steps = []

    async def step(self, message_logs, metadata):
        self.steps.append((message_logs, metadata))
        answers = [
            self._answer(log, meta) for log, meta in zip(message_logs, metadata, strict=True)
        ]
        return EnvironmentReturn(
            observations=[observation(a.get("observation", "")) for a in answers],
            metadata=[a.get("metadata") for a in answers],
            next_stop_strings=[a.get("stop") for a in answers],
            rewards=[a.get("reward", 0.0) for a in answers],
            terminateds=[a.get("terminated", False) for a in answers],
            answers=[a.get("answer") for a in answers],
        )
