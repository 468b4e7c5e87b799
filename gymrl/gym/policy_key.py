"""The key that policy servers ask for: who sends it, who hears that it is refused.

It comes from an environment variable of the process that calls the servers. Configurations,
records and command lines hold the variable's name.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from gymrl.api_keys import authorization
from gymrl.errors import ConfigError, RolloutFailure
from gymrl.gym.client import HttpAnswer, HttpPool
from gymrl.gym.health import PROBE_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Mapping

REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_SHOWN_CHARS = 200


OWN_SECRETS = frozenset({"GYMRL_SECRET", "GYMRL_VIEW_TOKEN"})
"""Variables of links between nodes and of the viewer, which no server's process has use for."""


def without_key(environment: Mapping[str, str], variable: str | None) -> dict[str, str]:
    """A process's environment without the variable that holds the key, and without gymrl's secrets."""
    withheld = OWN_SECRETS | {variable}
    return {name: value for name, value in environment.items() if name not in withheld}


class KeyedPool(HttpPool):
    """A pool that sends a key with every request, and lets no answer repeat it.

    Args:
        key: The key; None: an ordinary pool.
    """

    def __init__(self, key: str | None) -> None:
        super().__init__(headers=authorization(key))
        self._key = key

    async def _request(self, method: str, url: str, **arguments: Any) -> HttpAnswer:
        answer = await super()._request(method, url, **arguments)
        if self._key is None or answer.status < HTTPStatus.BAD_REQUEST:
            return answer
        # Some servers say which key they were given.
        body = answer.body.replace(self._key.encode(), b"(the key)")
        return msgspec.structs.replace(answer, body=body)


def require_taken(answer: HttpAnswer, remedy: str, setting: str) -> None:
    """Refuse to go on with a server that refuses the key, or misses one.

    Args:
        answer: Of the server.
        remedy: What to do.
        setting: Which setting is to blame.

    Raises:
        ConfigError: The status is 401 or 403.
    """
    if answer.status in REFUSED:
        raise ConfigError(
            f"{answer.url} answered HTTP {answer.status}: {answer.excerpt[:_SHOWN_CHARS]}; {remedy}",
            setting=setting,
        )


async def wait_for_policy(
    pool: HttpPool, name: str, base_url: str, waiting: set[str], variable: str | None
) -> None:
    """Ask a policy server for its models until there is an answer; take `name` out of `waiting`.

    Args:
        pool: That sends the key.
        name: The server.
        base_url: With ``/v1``.
        waiting: The names of servers that are not up.
        variable: The variable that holds the key; None: none is sent.

    Raises:
        ConfigError: It wants a key, or another one.
    """
    remedy = (
        "set gym.api_key_env to the environment variable that holds its key"
        if variable is None
        else f"the key in {variable} (gym.api_key_env) is not one it takes"
    )
    while True:
        try:
            answer = await pool.get(f"{base_url}/models")
        except RolloutFailure:
            await anyio.sleep(PROBE_INTERVAL_S)
        else:
            require_taken(answer, remedy, "gym.api_key_env")
            waiting.discard(name)
            return
