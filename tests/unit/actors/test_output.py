"""A child's output: tagged lines in the log, the last ones kept, a flood counted."""

from __future__ import annotations

import logging
import os

from gymrl.actors.output import ChildOutput


def fed(data: bytes, caplog, *, keep: int = 3, lines_per_s: int = 100) -> ChildOutput:
    caplog.set_level(logging.INFO, "gymrl.actors.output")
    read, write = os.pipe()
    output = ChildOutput("worker", read, keep, lines_per_s)
    os.write(write, data)
    os.close(write)
    output.close()
    return output


def test_lines_are_logged_with_the_actors_name(caplog):
    fed(b"one\ntwo\r\nlast without end", caplog)
    assert [r.getMessage() for r in caplog.records] == ["[worker] one", "[worker] two"]


def test_the_last_lines_are_kept(caplog):
    output = fed(b"1\n2\n3\n4\n5\nrest", caplog)
    assert output.last_lines == "3\n4\n5\nrest"


def test_a_flood_is_counted_and_its_end_kept(caplog):
    output = fed(b"".join(b"%d\n" % n for n in range(1000)), caplog, lines_per_s=10)
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 11
    assert messages[-1] == "[worker] ... 990 lines left out"
    assert output.last_lines == "997\n998\n999"


def test_long_lines_and_bad_bytes_are_cut_and_shown(caplog):
    output = fed(b"x" * 10_000 + b"\n\xff\xfe\n", caplog)
    first, second = output.last_lines.split("\n")
    assert len(first) == 2003
    assert second == "��"
