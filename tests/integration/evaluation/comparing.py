"""An environment that ranks the attempts at a task against each other."""

import asyncio
from typing import Any

from gymrl.gym.embedded import Reply, ResourcesServer, ServerSettings, Verdict
from gymrl.gym.embedded.base import RefusedRequest


class RankingSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    num_rollouts_per_prompt: int = 4


class Ranking(ResourcesServer):
    """The share of its peers that a reply is longer than, once all of them are here."""

    Settings = RankingSettings

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._here: dict[str, dict[int, tuple[str, asyncio.Future]]] = {}

    async def verify(self, row: dict[str, Any], reply: Reply, state: None) -> Verdict:
        if reply.text == row.get("unverifiable"):
            raise RefusedRequest("this reply can't be judged")
        peers = self._here.setdefault(row["_ng_group_id"], {})
        mine = asyncio.get_running_loop().create_future()
        peers[row["_ng_rollout_index"]] = reply.text, mine
        if len(peers) == self.settings.num_rollouts_per_prompt:
            for text, peer in peers.values():
                shorter = sum(len(other) < len(text) for other, _ in peers.values())
                peer.set_result(shorter / (len(peers) - 1))
        return Verdict(reward=await mine, extras={"peers": len(peers)})


class KeyedSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    judge_api_key: str


class Keyed(ResourcesServer):
    """Rewards who says its key."""

    Settings = KeyedSettings

    async def verify(self, row: dict[str, Any], reply: Reply, state: None) -> Verdict:
        return Verdict(reward=float(reply.text == self.settings.judge_api_key))
