"""A task as a shipped environment makes it."""

from __future__ import annotations

from typing import Any

import msgspec

from gymrl.environments.base import Message


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The first messages, and what the environment needs to know.

    Attributes:
        messages: As a prompt takes them.
        metadata: Plain data for the environment's first step.
        stop_strings: Texts that end the first answer; None: none.
    """

    messages: list[Message]
    metadata: dict[str, Any]
    stop_strings: list[str] | None = None


def environment_message(content: str) -> Message:
    """What an environment says."""
    return {"role": "environment", "content": content}
