"""Gym agents that treat their harness as a black box: all they give it is a base URL."""

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import aiohttp
import anyio
from aiohttp import web

from gymrl.gym.embedded.base import EmbeddedServer, json_response
from gymrl.token_ledger import rollout_base_url

SCRIPT = Path(__file__).parent / "plain_agent.py"


class SubprocessAgent(EmbeddedServer):
    """Runs :mod:`plain_agent` in a process of its own, with the rollout's base URL."""

    kind: ClassVar[str] = "responses_api_agents"

    def add_routes(self, app: web.Application) -> None:
        self.add_post(app, "/run", self._run)

    async def _run(self, request: web.Request) -> web.Response:
        row = await request.json()
        base_url = rollout_base_url(self.peers.url("policy_model"), row["_ng_rollout_id"])
        command = [sys.executable, str(SCRIPT), base_url, *row["questions"]]
        done = await anyio.run_process(command, stderr=subprocess.PIPE)
        return json_response({"reward": 1.0, "answers": json.loads(done.stdout)})


class ChatAgent(EmbeddedServer):
    """Asks `questions` over chat completions in this process; keeps role and content alone.

    A row with ``aside`` asks a question outside the conversation after each turn; one with
    ``hold`` stays in its first turn until it is cancelled.
    """

    kind: ClassVar[str] = "responses_api_agents"

    async def open(self) -> None:
        self._session = aiohttp.ClientSession()

    async def close(self) -> None:
        await self._session.close()

    def add_routes(self, app: web.Application) -> None:
        self.add_post(app, "/run", self._run)

    async def _run(self, request: web.Request) -> web.Response:
        row = await request.json()
        url = rollout_base_url(self.peers.url("policy_model"), row["_ng_rollout_id"])
        messages: list[dict] = []
        for question in row["questions"]:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": await self._ask(url, messages)})
            if row.get("aside"):
                await self._ask(url, [{"role": "user", "content": f"title of {question}"}])
            if row.get("hold"):
                await anyio.sleep(60)
        return json_response({"reward": 0.5, "answers": [m["content"] for m in messages[1::2]]})

    async def _ask(self, url: str, messages: list[dict]) -> str:
        body = {"messages": messages, "max_tokens": 12}
        async with self._session.post(f"{url}/chat/completions", json=body) as answer:
            answer.raise_for_status()
            return (await answer.json())["choices"][0]["message"]["content"]
