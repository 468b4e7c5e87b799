"""Environments that worker actors import by name."""

import os
import threading
import time

import anyio

from gymrl.environments import EnvironmentReturn


def reply(message_logs, metadata, **fields):
    count = len(message_logs)
    return EnvironmentReturn(
        **{
            "observations": [{"role": "environment", "content": ""}] * count,
            "metadata": list(metadata),
            "next_stop_strings": [None] * count,
            "rewards": [0.0] * count,
            "terminateds": [True] * count,
            "answers": None,
            **fields,
        }
    )


class Echo:
    """Says back the last message, and which process and thread it ran in."""

    def __init__(self, prefix=""):
        self._prefix = prefix

    def step(self, message_logs, metadata):
        return reply(
            message_logs,
            metadata,
            observations=[
                {"role": "environment", "content": self._prefix + log[-1]["content"]}
                for log in message_logs
            ],
            answers=[f"{os.getpid()}/{threading.current_thread().name}" for _ in message_logs],
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {"rows": len(batch["rewards"])}


class Dies:
    """Ends its process on the word, and works otherwise."""

    def step(self, message_logs, metadata):
        if any(log[-1]["content"] == "die" for log in message_logs):
            os._exit(3)
        return reply(message_logs, metadata)


class Overlaps:
    """Counts how many of its steps ran at once."""

    def __init__(self):
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()

    def step(self, message_logs, metadata):
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(0.01)
        with self._lock:
            self.running -= 1
        return reply(message_logs, metadata)


class Opened:
    """Can be opened and closed."""

    closed = 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exception):
        type(self).closed += 1

    async def step(self, message_logs, metadata):
        return reply(message_logs, metadata)


class Slow:
    """Sleeps as long as its metadata says, a minute without."""

    async def step(self, message_logs, metadata):
        for given in metadata:
            await anyio.sleep(60 if given is None else given["seconds"])
        return reply(message_logs, metadata)
