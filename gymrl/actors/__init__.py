"""Actors: classes that run in worker processes and are called with messages."""

from gymrl.actors.actor import Actor
from gymrl.actors.handle import ActorHandle
from gymrl.actors.options import SpawnOptions
from gymrl.actors.spawn import spawn
from gymrl.actors.streams import ActorStream

__all__ = ["Actor", "ActorHandle", "ActorStream", "SpawnOptions", "spawn"]
