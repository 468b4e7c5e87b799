"""Keys that servers ask for: read from the environment, sent as a header.

A key is never in a configuration, a record or a command line; those hold the name of the variable that
holds it.
"""

from __future__ import annotations

import os

from gymrl.errors import ConfigError


def read_api_key(variable: str | None, setting: str, told_as: str | None = None) -> str | None:
    """The key in an environment variable of this process.

    Args:
        variable: Its name; None: no key.
        setting: The configuration's field or the command's option that names the variable.
        told_as: What errors call the two; None: the setting, then the variable.

    Raises:
        ConfigError: It is not set, empty, or holds what no HTTP header may; the key is not shown.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    named = told_as or f"{setting} {variable}"
    if not key:
        raise ConfigError(
            f"{named}: the variable is not set, or empty, in the process that calls the servers; "
            "export it where gymrl is started",
            setting=setting,
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{named}: what the variable holds can't be sent in an HTTP header; it is not shown here",
            setting=setting,
        )
    return key


def authorization(key: str | None) -> dict[str, str]:
    """The headers that bring a key; none for none."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}
