"""Which real Gym servers would start Ray, told from their source before any of them runs.

A server class of Gym says ``ray_enabled = False`` where it does without; one that says nothing
starts Ray. It may say so in a class that it inherits from, in another server's module. What uses
Ray for its work (``import ray``, ``@ray.remote``) needs it, whatever it says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_USE = re.compile(r"^\s*(?:@ray\.remote|import ray\b|from ray\b)", re.MULTILINE)
_SAYS = re.compile(r"^\s+ray_enabled\b[^=\n]*=\s*(True|False)", re.MULTILINE)
_IMPORT = re.compile(
    r"^\s*(?:from|import)\s+((?:resources_servers|responses_api_agents|responses_api_models"
    r"|environment_servers)(?:\.\w+)+)",
    re.MULTILINE,
)
_NOT_SERVED = frozenset({"tests", "scripts", "notebooks", "__pycache__"})


def why_ray(directory: str, entrypoint: str, roots: Sequence[str]) -> str | None:
    """Why a server cannot run without Ray, or None where it can.

    Args:
        directory: Where the implementation is.
        entrypoint: Its script, in there.
        roots: Where Gym looks for the modules of other servers.
    """
    for path in _served_sources(Path(directory)):
        if _USE.search(_text(path)):
            return f"{path} uses Ray"
    says = _said(Path(directory) / entrypoint, [Path(root) for root in roots], set())
    if "True" in says:
        return f"{Path(directory) / entrypoint} sets ray_enabled = True"
    if "False" not in says:
        return (
            f"{Path(directory) / entrypoint} does not set ray_enabled, and Gym starts Ray for a "
            "server that does not say"
        )
    return None


def _served_sources(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*.py")):
        if not _NOT_SERVED & set(path.relative_to(directory).parts):
            yield path


def _said(source: Path, roots: Sequence[Path], seen: set[Path]) -> set[str]:
    """What a module says, else what the servers' modules that it imports say."""
    if source in seen or not source.is_file():
        return set()
    seen.add(source)
    text = _text(source)
    says = set(_SAYS.findall(text))
    if says:
        return says
    # Modules of its own directory are imported by their bare name there.
    own = re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE)
    inherited = [source.parent / f"{name}.py" for name in own]
    for module in _IMPORT.findall(text):
        inherited += [root.joinpath(*module.split(".")).with_suffix(".py") for root in roots]
    return {answer for path in inherited for answer in _said(path, roots, seen)}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
