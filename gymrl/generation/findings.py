"""What checks before a run find, and what to change."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

Severity = Literal["ok", "note", "warn", "break"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found.

    Attributes:
        check: What was looked at.
        severity: ``break``: a run that does this fails. ``warn``: it runs, and not as one may
            think. ``note``: worth knowing.
        found: What is the case.
        remedy: What to change; empty where nothing need be.
        position: Token of the first difference, where there is one.
    """

    check: str
    severity: Severity
    found: str
    remedy: str = ""
    position: int | None = None


def would_break(findings: Collection[Finding]) -> bool:
    """Whether a run would fail."""
    return any(finding.severity == "break" for finding in findings)
