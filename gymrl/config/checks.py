"""Checks that several configurations share."""

from __future__ import annotations

import re

from gymrl.errors import ConfigError
from gymrl.settings import require

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def require_variable(setting: str, name: str | None) -> None:
    """Refuse what is no name of an environment variable, without showing it.

    Raises:
        ConfigError: Names the setting.
    """
    if name is not None and not _VARIABLE.fullmatch(name):
        # Not shown: it may be the key.
        raise ConfigError(
            f"{setting} holds something else than the name of an environment variable; "
            "put the key into a variable and name that",
            setting=setting,
        )


_URL = re.compile(r"https?://[^/\s]+(/\S*)?", re.IGNORECASE)


def require_urls(setting: str, urls: tuple[str, ...]) -> None:
    """Refuse what is no address of a server, and addresses that hold a password.

    Raises:
        ConfigError: Names the setting, and shows no password.
    """
    for url in urls:
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ConfigError(
                f"{setting} holds a user's name or a key in an address (before its '@'): addresses are in "
                "records, logs and what registries give out. Put the key into an environment variable "
                "and name that in api_key_env",
                setting=setting,
            )
        require(
            _URL.fullmatch(url) is not None,
            setting,
            url,
            "is no address of a server; write it with http:// or https:// and a host",
        )
