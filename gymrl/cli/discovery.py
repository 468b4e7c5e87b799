"""What a policy server of somebody else says about itself."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from gymrl.concurrency import deadline
from gymrl.errors import ConfigError, GymTransportError, ServerError
from gymrl.gym.policy_key import KeyedPool, require_taken

if TYPE_CHECKING:
    from gymrl.gym.client import HttpAnswer

ANSWER_WITHIN_S = 30.0
DEFAULT_NAME = "policy"


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def choose_model(names: list[str], base_url: str) -> str:
    """The model to ask for: ``policy`` where there is one of that name, else the only one.

    Raises:
        ConfigError: There is none, or a choice.
    """
    if DEFAULT_NAME in names:
        return DEFAULT_NAME
    if len(names) != 1:
        raise ConfigError(
            f"{base_url} serves {', '.join(names) or 'no model'}: name one with --model-name",
            setting="--model-name",
        )
    return names[0]


async def served_model_name(base_url: str, api_key: str | None = None) -> str:
    """Ask an OpenAI-compatible server which model it serves.

    Args:
        base_url: With ``/v1``.
        api_key: Sent as a bearer token; None: no key.

    Raises:
        GymTransportError: Nothing answers there.
        DeadlineExceeded: It stays silent for thirty seconds.
        ServerError: What answers is no such server.
        ConfigError: It serves none or several, so that a name is needed; or it refuses the key, or
            wants one.
    """
    url = f"{base_url.rstrip('/')}/models"
    async with KeyedPool(api_key) as pool:
        with deadline(ANSWER_WITHIN_S, f"an answer of the policy server {url}"):
            answer = await _ask(pool, url)
    remedy = (
        "name the environment variable that holds its key with --api-key-env"
        if api_key is None
        else "the key that was sent is not one it takes: look into the variable of --api-key-env"
    )
    require_taken(answer, remedy, "--api-key-env")
    try:
        if answer.status != HTTPStatus.OK:
            raise msgspec.ValidationError(f"HTTP {answer.status}: {answer.excerpt}")
        models = msgspec.json.decode(answer.body, type=_Models)
    except msgspec.MsgspecError as error:
        raise ServerError(
            f"{url} does not list models as an OpenAI-compatible server does ({error}); "
            "does --base-url end in /v1?",
            url=url,
        ) from error
    return choose_model([model.id for model in models.data], base_url)


async def _ask(pool: KeyedPool, url: str) -> HttpAnswer:
    try:
        return await pool.get(url)
    except GymTransportError as error:
        raise GymTransportError(
            f"{error}; is the server up, and is --base-url its address, with /v1?", **error.fields
        ) from error
