"""Agents of the tests, for a worker's own process."""

import asyncio
import json
import sys

from aiohttp import web

from gymrl.gym.embedded.base import EmbeddedServer, ServerSettings
from gymrl.testing.gym_server import gym_answer


class CohortSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many attempts at a prompt are scored against each other."""

    cohort: int


class CohortAgent(EmbeddedServer):
    """Answers the attempts at a prompt when all of them are here, in this very process."""

    kind = "responses_api_agents"
    Settings = CohortSettings

    def add_routes(self, app: web.Application) -> None:
        self._here: dict[int, list[asyncio.Future]] = {}
        self.add_post(app, "/run", self._run)

    async def _run(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        mine = asyncio.get_running_loop().create_future()
        peers = self._here.setdefault(body["_ng_task_index"], [])
        peers.append(mine)
        if len(peers) == self.settings.cohort:
            for rank, peer in enumerate(peers):
                peer.set_result(rank)
        rank = await mine
        return web.json_response(gym_answer([([1, 2], [3])], reward=float(rank)))


class BrokenSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many rows are answered before it breaks."""

    after: int


class BrokenAgent(EmbeddedServer):
    """Its code raises for the rows that say so, when the others have their answers."""

    kind = "responses_api_agents"
    Settings = BrokenSettings

    def add_routes(self, app: web.Application) -> None:
        self._answered = 0
        self._others = asyncio.Event()
        self.add_post(app, "/run", self._run)

    async def _run(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if "broken" in body:
            await self._others.wait()
        if body.get("broken") == "exit":
            sys.exit(3)
        if "broken" in body:
            return web.json_response(gym_answer([([1, 2], [3])], reward={}[body["broken"]]))
        self._answered += 1
        if self._answered == self.settings.after:
            self._others.set()
        return web.json_response(gym_answer([([1, 2], [3])]))
