"""Deadlines and intervals are measured by clocks that never jump."""

from __future__ import annotations

import ast
from pathlib import Path

import gymrl.actors
import gymrl.concurrency

WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "localtime"),
    ("time", "gmtime"),
    ("time", "clock_gettime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}
FILES = [
    *Path(gymrl.actors.__file__).parent.glob("*.py"),
    Path(gymrl.concurrency.__file__),
]


def wall_clocks(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            found += [f"from {node.module} import {alias.name}" for alias in node.names]
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if (name, node.attr) in WALL_CLOCKS:
                found.append(f"{name}.{node.attr} in line {node.lineno}")
    return found


def test_no_wall_clock_is_read_anywhere_in_the_actors():
    assert len(FILES) > 20
    assert {file.name: found for file in FILES if (found := wall_clocks(file.read_text()))} == {}


def test_the_search_for_wall_clocks_finds_them():
    assert wall_clocks("import time\nx = time.time()")
    assert wall_clocks("import datetime\nx = datetime.datetime.now()")
    assert wall_clocks("from time import time")
    assert not wall_clocks("import time\nx = time.monotonic()")
