"""Where benchmarks lie, and which file a name stands for.

A root is a folder in NeMo Gym's layout: ``<root>/benchmarks/NAME/config.yaml`` is the benchmark
``NAME`` and ``<root>/benchmarks/NAME/FLAVOR.yaml`` is ``NAME/FLAVOR``. Earlier roots win. A folder
of gymrl's own may hold a family instead of single flavors: its ``_flavor.yaml`` is the configuration of
every flavor that the function named in its ``_flavors_from`` knows, and ``${flavor}`` is which. In other
roots such a file is none: looking for a name, or listing all, runs nothing that lies there.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl._version import __version__
from gymrl.benchmark.installed_gym import own_gym_folder
from gymrl.config import read_mapping
from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gymrl.benchmark.installed_gym import InstalledGym

EXTRA_ROOTS_VARIABLE = "NEMO_GYM_EXTRA_ROOTS"
FAMILY_FILE = "_flavor.yaml"
_MANIFEST = "manifest.yaml"
_ROLLED_OUT = "verifiers/"
_SHIPPED = "gymrl/benchmark/shipped"
_GIT_TIMEOUT_S = 10.0
_SHOWN_FLAVORS = 5
_DECLARATION = re.compile(r"\btype:\s*[\"']?benchmark\b")


class SearchRoot(msgspec.Struct, frozen=True):
    """A folder that paths are looked up under.

    Attributes:
        path: The folder; relative paths of configurations are relative to it.
        benchmarks: Its folder of benchmarks.
    """

    path: Path
    benchmarks: str = "benchmarks"


class BenchmarkSource(msgspec.Struct, frozen=True, kw_only=True):
    """The file that a benchmark's name stands for.

    Attributes:
        name: As it was asked for.
        file: The configuration.
        config_path: The same relative to its root, with forward slashes.
        presets: Configuration keys that the name itself sets (a family's ``flavor``).
    """

    name: str
    file: Path
    config_path: str
    presets: dict[str, Any] = {}


def search_roots(
    extra: Sequence[str | Path] = (), gym: InstalledGym | None = None
) -> tuple[SearchRoot, ...]:
    """The folders that are searched, first to last.

    `extra`, then those of ``NEMO_GYM_EXTRA_ROOTS`` (separated as in ``PATH``), the working
    directory, the folder of an installed NeMo Gym (`gym`, else the one in this interpreter, which is
    found and not imported), and gymrl's own.

    Raises:
        ConfigError: One of `extra` is no folder.
    """
    for root in extra:
        if not Path(root).is_dir():
            raise ConfigError(f"search root {str(root)!r} is no folder", setting="search_roots")
    named = [part for part in os.environ.get(EXTRA_ROOTS_VARIABLE, "").split(os.pathsep) if part]
    folders = [Path(root).expanduser() for root in (*extra, *named)]
    folders.append(Path.cwd())
    installed = gym.folder if gym is not None else own_gym_folder()
    if installed is not None:
        folders.append(installed)
    unique = dict.fromkeys(folder.resolve() for folder in folders)
    return (*(SearchRoot(folder) for folder in unique), SearchRoot(_own_folder(), _SHIPPED))


def _own_folder() -> Path:
    return Path(__file__).resolve().parents[2]


def gym_version(source: BenchmarkSource, gym: InstalledGym | None) -> tuple[str, str | None]:
    """Version and commit of the Gym that a benchmark comes from.

    The installed NeMo Gym's; where there is none, or gymrl ships the benchmark, gymrl's own as
    ``gymrl-<version>``. The commit is that of its git checkout, with ``-dirty`` behind it where
    files differ; None where it is no checkout.
    """
    if gym is None or source.file.is_relative_to(_own_folder() / _SHIPPED):
        return f"gymrl-{__version__}", _commit(_own_folder())
    return gym.version, _commit(gym.folder)


def _commit(folder: Path) -> str | None:
    if not (folder / ".git").exists():
        return None
    try:
        head, changes = (_git(folder, *args) for args in (["rev-parse", "HEAD"], ["status", "-s"]))
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}-dirty" if changes else head


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=_GIT_TIMEOUT_S,
    )
    return done.stdout.strip()


def find_path(path: str | Path, roots: Iterable[SearchRoot]) -> Path | None:
    """The first existing file or folder that `path` names under a root; absolute ones as they are."""
    candidate = Path(path).expanduser()
    if candidate.is_absolute():
        return candidate if candidate.exists() else None
    return next((r.path / candidate for r in roots if (r.path / candidate).exists()), None)


def find_benchmark(name: str, roots: Sequence[SearchRoot]) -> BenchmarkSource:
    """The configuration of ``NAME`` or ``NAME/FLAVOR``.

    Raises:
        ConfigError: There is none; says what comes close.
    """
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or any(part in ("", ".", "..") or part.startswith("_") for part in parts):
        raise ConfigError(
            f"benchmark {name!r}: a name is written NAME or NAME/FLAVOR", setting="benchmark"
        )
    for root in roots:
        found = _in_root(name, parts, root)
        if found is not None:
            return found
    raise _unknown(name, roots)


def _in_root(name: str, parts: list[str], root: SearchRoot) -> BenchmarkSource | None:
    folder = root.path / root.benchmarks
    candidates = [folder.joinpath(*parts, "config.yaml")]
    if len(parts) > 1:
        candidates.append(folder.joinpath(*parts[:-1], f"{parts[-1]}.yaml"))
    presets: dict[str, Any] = {}
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None and len(parts) > 1:
        family = folder.joinpath(*parts[:-1], FAMILY_FILE)
        if _is_family(family) and parts[-1] in _flavors(family):
            file, presets = family, {"flavor": parts[-1]}
    if file is None:
        return None
    relative = file.relative_to(root.path).as_posix()
    return BenchmarkSource(name=name, file=file, config_path=relative, presets=presets)


def _is_family(file: Path) -> bool:
    return file.is_relative_to(_own_folder() / _SHIPPED) and file.is_file()


def _flavors(family: Path) -> tuple[str, ...]:
    target = str(read_mapping(family).get("_flavors_from"))
    module, _, function = target.partition(":")
    try:
        names = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{family}: _flavors_from={target!r} cannot be called: {error}", setting="_flavors_from"
        ) from error
    return tuple(names)


def benchmark_names(roots: Iterable[SearchRoot]) -> tuple[str, ...]:
    """Every name and flavor under the roots, sorted; of a family every flavor.

    Listed are files that declare one dataset of type ``benchmark`` themselves, as NeMo Gym lists them:
    prompts, manifests and suites lie in the same folders.
    """
    names: set[str] = set()
    for root in roots:
        names.update(_names_in(root.path / root.benchmarks))
    return tuple(sorted(names))


def _names_in(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*/**/*.yaml")):
        text = "" if file.name == _MANIFEST else file.read_text(encoding="utf-8", errors="replace")
        if len(_DECLARATION.findall(text)) != 1:
            continue
        place = file.parent.relative_to(folder).as_posix()
        if file.name == FAMILY_FILE and not _is_family(file):
            continue
        if file.name == FAMILY_FILE:
            yield from (f"{place}/{flavor}" for flavor in _flavors(file))
        elif file.name == "config.yaml":
            yield place
        else:
            yield f"{place}/{file.stem}"


def _unknown(name: str, roots: Sequence[SearchRoot]) -> ConfigError:
    if name.startswith(_ROLLED_OUT):
        return ConfigError(
            f"{name!r}: an environment of verifiers is rolled out (gymrl rollout {name}, or "
            "load_benchmark); it cannot be planned, evaluated or served as a benchmark",
            setting="benchmark",
        )
    known = benchmark_names(roots)
    flavors = [other for other in known if other.startswith(f"{name}/")]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(other) for other in close)}?" if close else ""
    if flavors:
        shown = ", ".join(flavors[:_SHOWN_FLAVORS])
        more = ", ..." if len(flavors) > _SHOWN_FLAVORS else "."
        hint = f" It has flavors ({len(flavors)}); name one: {shown}{more}"
    if not hint:
        tops = ", ".join(sorted({other.split("/", maxsplit=1)[0] for other in known})) or "none"
        hint = f" There are: {tops}."
    looked = ", ".join(str(root.path / root.benchmarks) for root in roots)
    return ConfigError(
        f"no benchmark is called {name!r}.{hint} Looked in: {looked}",
        setting="benchmark",
    )
