"""Which real Gym servers need Ray, told from their source before any of them runs.

What uses Ray for its work (``import ray``, ``@ray.remote``) needs it, whatever its class says, and so
does a class that sets ``ray_enabled = True``. One that says nothing would start Ray without need;
``ray_enabled = False`` says that it does not. A class may say so in one that it inherits from, in
another server's module, so imports of server modules are followed.
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
    script = Path(directory) / entrypoint
    sources = [*_served_sources(Path(directory)), *_imported(script, _paths(roots), set())]
    for path in dict.fromkeys(sources):
        if _USE.search(_text(path)):
            return f"{path} uses Ray"
    if "True" in _said(script, _paths(roots), set()):
        return f"{script} sets ray_enabled = True"
    return None


def says_no_ray(directory: str, entrypoint: str, roots: Sequence[str]) -> bool:
    """Whether a server's class says that it does without Ray; arguments as :func:`why_ray`."""
    return _said(Path(directory) / entrypoint, _paths(roots), set()) == {"False"}


def _paths(roots: Sequence[str]) -> list[Path]:
    return [Path(root) for root in roots]


def _served_sources(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*.py")):
        if not _NOT_SERVED & set(path.relative_to(directory).parts):
            yield path


def _imported(source: Path, roots: Sequence[Path], seen: set[Path]) -> Iterator[Path]:
    """A module and the servers' modules that it imports, those of its own directory among them."""
    if source in seen or not source.is_file():
        return
    seen.add(source)
    yield source
    for path in _imports(source, roots):
        yield from _imported(path, roots, seen)


def _imports(source: Path, roots: Sequence[Path]) -> list[Path]:
    text = _text(source)
    # Modules of its own directory are imported by their bare name there.
    own = re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE)
    paths = [source.parent / f"{name}.py" for name in own]
    for module in _IMPORT.findall(text):
        paths += [root.joinpath(*module.split(".")).with_suffix(".py") for root in roots]
    return paths


def _said(source: Path, roots: Sequence[Path], seen: set[Path]) -> set[str]:
    """What a module says, else what the servers' modules that it imports say."""
    if source in seen or not source.is_file():
        return set()
    seen.add(source)
    says = set(_SAYS.findall(_text(source)))
    if says:
        return says
    return {answer for path in _imports(source, roots) for answer in _said(path, roots, seen)}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
