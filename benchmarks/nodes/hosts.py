"""Several hosts on one machine: network namespaces on a bridge, each with an address of its own.

Needs root and iproute2. Processes of different hosts reach each other over the bridge only, so a
host can be killed, or its cable pulled. The bridge is in a namespace too: the machine's own network
stays as it is, and so do programs that start anew when it changes, as browsers do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
PORT = 29500
_BRIDGE = "bridge"

_number = itertools.count()


def why_not() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    probe = f"gymrl-probe-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Host:
    """One of them.

    Attributes:
        number: From 0.
        address: On the bridge.
    """

    def __init__(self, prefix: str, number: int) -> None:
        self.number = number
        self.address = f"10.203.0.{number + 1}"
        self._space = f"{prefix}-{number}"
        self._switch = f"{prefix}-switch"
        self._cable = f"cable{number}"

    def open(self) -> None:
        """Make the namespace and plug it in."""
        _ip("netns", "add", self._space)
        peer = ["type", "veth", "peer", "name", "eth0", "netns", self._space]
        _ip("-n", self._switch, "link", "add", self._cable, *peer)
        _ip("-n", self._switch, "link", "set", self._cable, "master", _BRIDGE, "up")
        _ip("-n", self._space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self._space, "link", "set", "eth0", "up")
        _ip("-n", self._space, "link", "set", "lo", "up")

    def launch(
        self,
        hosts: int,
        script: list[str],
        output: IO[str],
        log: IO[str],
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start torchrun here with one rank, as one of so many hosts."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TP_SOCKET_IFNAME": "eth0",
            "OWN_ADDRESS": self.address,
            **(variables or {}),
        }
        command = ["ip", "netns", "exec", self._space, sys.executable, "-m"]
        command += ["torch.distributed.run", f"--nnodes={hosts}", "--nproc-per-node=1"]
        command += [f"--node-rank={self.number}", "--master-addr=10.203.0.1"]
        command += [f"--master-port={PORT}", *script]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=log, text=True
        )

    def slow_down(self, rate: str) -> None:
        """Let no more than `rate` (``2mbit``, say) leave this host; what waits is queued."""
        limit = ["rate", rate, "burst", "16kbit", "latency", "2s"]
        subprocess.run(
            ["tc", "-n", self._space, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit],
            check=True,
            capture_output=True,
            text=True,
        )

    def unplug(self) -> None:
        """Pull the cable: nothing arrives any more, and nobody is told."""
        _ip("-n", self._switch, "link", "set", self._cable, "nomaster")

    def kill(self) -> None:
        """End every process of this host at once."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self._space], capture_output=True, text=True, check=True
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        """End what runs here and take the host away."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.kill()
            _ip("netns", "del", self._space)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, plugged into one bridge; gone with all their processes at the end."""
    # A namespace that is deleted goes a while later: no two ever have the same name.
    prefix = f"gymrl{os.getpid()}x{next(_number)}"
    switch = f"{prefix}-switch"
    made = [Host(prefix, number) for number in range(count)]
    _ip("netns", "add", switch)
    try:
        _ip("-n", switch, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", switch, "link", "set", _BRIDGE, "up")
        for host in made:
            host.open()
        yield made
    finally:
        for host in made:
            host.close()
        _ip("netns", "del", switch)
