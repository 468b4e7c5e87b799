"""What tells one model directory from another, without reading all of its weights."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from gymrl.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_WHOLE_BYTES = 1 << 20
_EDGE_BYTES = 1 << 16


def fingerprint_of(directory: Path) -> str:
    """``sha256:`` over the directory's files: names, sizes, and what is in them.

    Of a file above 1 MiB only the first and the last 64 KiB are read, which any step of training
    changes; dates and the directory's own place don't count. Files that begin with a dot are left
    out.

    Raises:
        ConfigError: The directory cannot be read.
    """
    digest = hashlib.sha256()
    try:
        files = sorted(path for path in directory.iterdir() if path.is_file())
        for file in files:
            if file.name.startswith("."):
                continue
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            with file.open("rb") as opened:
                if size <= _WHOLE_BYTES:
                    digest.update(opened.read())
                    continue
                digest.update(opened.read(_EDGE_BYTES))
                opened.seek(size - _EDGE_BYTES)
                digest.update(opened.read(_EDGE_BYTES))
    except OSError as error:
        raise ConfigError(
            f"model={str(directory)!r} cannot be read: {error}", setting="model"
        ) from error
    return f"sha256:{digest.hexdigest()}"
