"""One answer, two rewards; a taskset of v1."""

from collections.abc import Iterable

import verifiers.v1 as vf


class CountData(vf.TaskData):
    answer: str


class CountTask(vf.Task[CountData]):
    @vf.reward
    async def counts_far_enough(self, trace: vf.Trace) -> float:
        return 1.0 if self.data.answer in trace.last_reply else 0.0

    @vf.reward(weight=0.5)
    async def answers(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class CountConfig(vf.TasksetConfig):
    size: int = 4


class CountTaskset(vf.Taskset[CountTask, CountConfig]):
    def load(self) -> Iterable[CountTask]:
        for number in range(self.config.size):
            data = CountData(prompt=f"Count to {number}.", answer=str(number))
            yield CountTask(data, self.config.task)


__all__ = ["CountTaskset"]
