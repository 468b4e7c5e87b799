"""Servers of our own that speak Gym's protocol, run in the worker's event loop.

Write an environment by subclassing :class:`ResourcesServer`, an agent by subclassing
:class:`AgentServer`; name the class in a server configuration as ``package.module:Class``.
"""

from gymrl.gym.embedded.agent import AgentServer, AgentSettings, Episode
from gymrl.gym.embedded.base import EmbeddedServer, Peers, ServerRef, ServerSettings
from gymrl.gym.embedded.reply import Reply, ToolCall
from gymrl.gym.embedded.resources import ResourcesServer, ToolError, Verdict, tool

__all__ = [
    "AgentServer",
    "AgentSettings",
    "EmbeddedServer",
    "Episode",
    "Peers",
    "Reply",
    "ResourcesServer",
    "ServerRef",
    "ServerSettings",
    "ToolCall",
    "ToolError",
    "Verdict",
    "tool",
]
