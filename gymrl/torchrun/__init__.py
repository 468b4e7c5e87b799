"""Rollouts for a trainer that torchrun launched: every rank enters, each gets its share.

::

    with gymrl.torchrun.rollouts(config) as rollouts:
        for step in range(steps):
            share = rollouts.collect(rows, num_generations=8)   # whole groups, on every rank its own
            train_on(share.groups)
            rollouts.update_weights(model)

The same lines work under plain ``python``, where the world has one rank.
"""

from gymrl.extras import optional_imports

with optional_imports():
    from gymrl.torchrun.config import PerNode, TorchrunConfig
    from gymrl.torchrun.cursor import RowCursor
    from gymrl.torchrun.session import Rollouts, rollouts
    from gymrl.torchrun.shares import Share

__all__ = ["PerNode", "Rollouts", "RowCursor", "Share", "TorchrunConfig", "rollouts"]
