"""A module that imports in the driver and not in a worker."""

from __future__ import annotations

import os
import sys

from gymrl.actors import Actor

if "gymrl.actors.child" in sys.modules:
    raise ImportError(f"this module is not for workers like {os.getpid()}")


class Unimportable(Actor):
    async def never(self) -> None: ...
