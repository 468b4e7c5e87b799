"""Actors: classes that run in worker processes and are called with messages."""

from gymrl.actors.actor import Actor
from gymrl.actors.connecting import connect_actor
from gymrl.actors.handle import ActorHandle
from gymrl.actors.node import ActorServer, serve_actor
from gymrl.actors.options import SpawnOptions
from gymrl.actors.restarting import RestartPolicy, WorkerHealth
from gymrl.actors.spawn import spawn
from gymrl.actors.streams import ActorStream
from gymrl.actors.supervisor import Supervisor

__all__ = [
    "Actor",
    "ActorHandle",
    "ActorServer",
    "ActorStream",
    "RestartPolicy",
    "SpawnOptions",
    "Supervisor",
    "WorkerHealth",
    "connect_actor",
    "serve_actor",
    "spawn",
]
