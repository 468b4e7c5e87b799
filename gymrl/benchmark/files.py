"""Rows and servers from files, for benchmarks that are not shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gymrl.config import read_mapping
from gymrl.errors import ConfigError

_SERVER_TYPES = (
    "resources_servers",
    "responses_api_agents",
    "responses_api_models",
    "environment_servers",
)


def read_rows(path: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The rows of a JSONL file: one JSON object a line, blank lines left out.

    Args:
        path: The file.
        limit: Only this many from the top; more than there are is refused.

    Raises:
        ConfigError: The file is missing or empty, a line is no JSON object (names the line), or
            it has fewer rows than `limit`.
    """
    file = Path(path)
    rows: list[dict[str, Any]] = []
    decoder = msgspec.json.Decoder(dict[str, Any])
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(rows) == limit:
                    break
                if not line.strip():
                    continue
                try:
                    rows.append(decoder.decode(line))
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise ConfigError(
                        f"{file}, line {number}: {error}; each line must be a whole JSON object",
                        setting=str(file),
                    ) from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}", setting=str(file)) from error
    if not rows:
        raise ConfigError(f"{file} holds no rows", setting=str(file))
    if limit is not None and len(rows) < limit:
        raise ConfigError(
            f"{file} holds {len(rows)} rows; {limit} were asked for", setting="num_prompts"
        )
    return rows


def read_servers(path: str | Path) -> dict[str, Any]:
    """The server instances of a YAML file in Gym's shape.

    Its other keys are left out, unless it includes Gym's own files (``config_paths``, which may be
    an empty list): then Gym reads it, and needs all of it.

    Raises:
        ConfigError: The file cannot be read, or no key of it is a server instance.
    """
    values = read_mapping(path)
    if "config_paths" in values:
        return values
    servers = {
        name: block
        for name, block in values.items()
        if isinstance(block, dict) and any(kind in block for kind in _SERVER_TYPES)
    }
    if not servers:
        raise ConfigError(
            f"{path} declares no server instance: a key with one of {', '.join(_SERVER_TYPES)} "
            "under it is needed",
            setting=str(path),
        )
    return servers
