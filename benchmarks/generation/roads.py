"""The two roads of training tokens at many turns: carried in messages, or kept by the server.

One agent makes `turns` calls and gets a tool's answer between them. On the message road it sends
every item back with its token fields, as Gym's agents do; on the ledger road it speaks plain chat
completions and the tokens are taken at the end. Both trajectories are read, and must be equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import numpy as np

from benchmarks.comparison import Comparison, take_turns
from gymrl.generation.base import Generated
from gymrl.generation.chat import ChatFormat
from gymrl.generation.policy import Policy
from gymrl.generation.server import GenerationServer
from gymrl.gym.episode import EpisodeOptions, read_episode
from gymrl.testing import ScriptedGenerator, build_tiny_tokenizer
from gymrl.token_ledger import LedgerFrame, rollout_base_url

if TYPE_CHECKING:
    from gymrl.types import Trajectory

TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
OUTPUT = "It is 42 and then some more of what a tool may say. " * 8
CALL = 'I will look again.<tool_call>{"name": "look", "arguments": {"n": 1}}</tool_call>'


class Road:
    """Rolls out over one road, and counts the bytes of bodies that cross the network."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, turns: int) -> None:
        self._session = session
        self._base_url = base_url
        self._turns = turns
        self._number = 0
        self.num_bytes = 0
        self.trajectory: Trajectory | None = None

    async def post(self, url: str, body: dict) -> dict:
        """POST and count."""
        data = msgspec.json.encode(body)
        async with self._session.post(url, data=data) as answer:
            received = await answer.read()
        self.num_bytes += len(data) + len(received)
        return msgspec.json.decode(received)

    async def messages(self) -> float:
        """Seconds of one rollout whose items carry their tokens."""
        self.num_bytes = 0
        started = time.perf_counter()
        items: list = [{"role": "user", "content": "Look until you know."}]
        for turn in range(self._turns):
            body = {"input": items, "tools": [{"type": "function", **TOOL}]}
            made = (await self.post(f"{self._base_url}/responses", body))["output"]
            items = [*items, *made]
            if turn + 1 < self._turns:
                call_id = made[-1]["call_id"]
                items.append({"type": "function_call_output", "call_id": call_id, "output": OUTPUT})
        result = msgspec.json.encode({"reward": 1.0, "response": {"output": items[1:]}})
        self.num_bytes += len(result)
        self.trajectory = read_episode(result, agent="agent")
        return time.perf_counter() - started

    async def ledger(self) -> float:
        """Seconds of one rollout whose agent knows nothing of tokens."""
        self.num_bytes = 0
        self._number += 1
        rollout_id = f"r{self._number}"
        url = f"{rollout_base_url(self._base_url, rollout_id)}/chat/completions"
        started = time.perf_counter()
        messages: list = [{"role": "user", "content": "Look until you know."}]
        for turn in range(self._turns):
            body = {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}
            made = (await self.post(url, body))["choices"][0]["message"]
            kept = {key: made[key] for key in ("role", "content", "tool_calls")}
            messages.append(kept)
            if turn + 1 < self._turns:
                call_id = made["tool_calls"][0]["id"]
                messages.append({"role": "tool", "tool_call_id": call_id, "content": OUTPUT})
        async with self._session.delete(f"{self._base_url}/ledger/{rollout_id}") as answer:
            frame = await answer.read()
        result = msgspec.json.encode({"reward": 1.0})
        self.num_bytes += len(frame) + len(result)
        self.trajectory = read_episode(
            result,
            agent="agent",
            options=EpisodeOptions(token_source="ledger"),
            ledger=LedgerFrame.decode(frame),
        )
        return time.perf_counter() - started


def _answers(chat: ChatFormat) -> Callable[..., Generated]:
    sampled = [*chat.encode(CALL), *chat.end_ids]

    def answer(*_: object) -> Generated:
        logprobs = [-0.123456789] * len(sampled)
        return Generated(token_ids=sampled, logprobs=logprobs, finish_reason="stop")

    return answer


async def measure(turns: int, rounds: int) -> list[Comparison]:
    """Bytes and time of the two roads."""
    chat = ChatFormat(build_tiny_tokenizer())
    policy = Policy(ScriptedGenerator(_answers(chat), max_model_len=1 << 20), chat)
    server = GenerationServer(policy)
    base_url = await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            carried, kept = (Road(session, base_url, turns) for _ in range(2))
            seconds = await take_turns(kept.ledger, {"messages": carried.messages}, rounds)
    finally:
        await server.close()
    _require_same(carried.trajectory, kept.trajectory, turns)
    num_tokens = 0 if kept.trajectory is None else kept.trajectory.num_tokens
    note = f"{turns} turns, {num_tokens} tokens at the end"
    bytes_ = {"ledger": kept.num_bytes / 1e6, "messages": carried.num_bytes / 1e6}
    times = {name: 1000 * s for name, s in seconds.medians(own="ledger").items()}
    return [
        Comparison(
            name=f"bytes of a rollout of {turns} turns",
            unit="MB",
            sides=bytes_,
            ratio="the ledger's by the messages'",
            value=bytes_["ledger"] / bytes_["messages"],
            target=0.5,
            at_least=False,
            note=note,
        ),
        Comparison(
            name=f"time of a rollout of {turns} turns",
            unit="ms",
            sides=times,
            ratio="the ledger's by the messages'",
            value=seconds.times_longer("messages"),
            target=1.0,
            at_least=False,
            note=f"{note}; generation takes no time here",
        ),
    ]


def _require_same(carried: Trajectory | None, kept: Trajectory | None, turns: int) -> None:
    same = (
        carried is not None
        and kept is not None
        and len(carried.turns) == len(kept.turns) == turns
        and np.array_equal(carried.token_ids, kept.token_ids)
        and np.array_equal(carried.logprobs, kept.logprobs)
    )
    if not same:
        raise SystemExit("the two roads gave different trajectories")
