"""Runs in the interpreter that has NeMo Gym: a server's script, with Ray left alone.

Every server of NeMo Gym before 0.7 starts Ray, and so does one of a later version whose class does
not say ``ray_enabled``, whether it has use for Ray or not. Started through here, the call that would
do it does nothing. Servers that do use Ray are told by their source and never get here; should one
be missed, ``RAY_ENABLE_AUTO_CONNECT=0`` (which :mod:`gymrl.gym.real_processes` sets) makes its first
use of Ray an error instead of a cluster.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from typing import Any


def main(entrypoint: str) -> None:
    """Run a server's script as Python itself would, but for Ray."""
    # `run_webserver` of Gym's server class finds the function here, in every version since 0.4.
    servers: Any = importlib.import_module("nemo_gym.server_utils")
    servers.initialize_ray = _leave_ray_alone
    sys.argv = [entrypoint]
    runpy.run_path(entrypoint, run_name="__main__")


def _leave_ray_alone() -> None:
    sys.stderr.write("gymrl: Ray is not started\n")


if __name__ == "__main__":
    main(sys.argv[1])
