"""Images beside a file of rollouts, each once: ``<file>.media/<SHA-256 of its bytes>``.

Lines of the file refer to them by digest, so that a prompt's image is not written for every attempt
at it, and a viewer can show one without reading a line. A file without its folder is still read;
its images are missing then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gymrl.types import RolloutGroup

logger = logging.getLogger(__name__)

KEPT_BYTES = 64 << 20
"""Images that are kept in memory between two rows, so that those of a group share them."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class MediaFolder:
    """The images of one file.

    Args:
        file: The file of rollouts.

    Attributes:
        path: The folder; made with the first image.
    """

    def __init__(self, file: str | Path) -> None:
        self.path = Path(f"{file}.media")
        self._written: set[str] = set()
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._has_warned = False

    def write(self, media: Mapping[str, bytes]) -> None:
        """Write those that are not there; each is whole once it has its name.

        Raises:
            OSError: The disk is full, say.
        """
        for digest, data in media.items():
            if digest in self._written:
                continue
            target = self.path / digest
            if not target.exists():
                self.path.mkdir(exist_ok=True)
                part = self.path / f".{digest}.{os.getpid()}"
                part.write_bytes(data)
                part.replace(target)
            self._written.add(digest)

    def write_group(self, group: RolloutGroup, *, with_task: bool = True) -> None:
        """Write the images of a group's rows and trajectories.

        Args:
            group: As the engine gave it.
            with_task: Those of the rows' requests too.

        Raises:
            OSError: As :meth:`write`.
        """
        for row in group.rows if with_task else ():
            self.write(row.media)
        for trajectory in group.trajectories:
            self.write(trajectory.media)

    def remove(self) -> None:
        """Remove the images, and the folder where nothing else is in it."""
        self._written.clear()
        self._kept.clear()
        if not self.path.is_dir():
            return
        for file in self.path.iterdir():
            if _DIGEST.fullmatch(file.name):
                file.unlink()
        with contextlib.suppress(OSError):  # somebody keeps files of their own there
            self.path.rmdir()

    def read(self, digests: Iterable[str]) -> dict[str, bytes]:
        """The bytes of those that are there; of missing ones the log is told once."""
        return {digest: data for digest in digests if (data := self._image(digest)) is not None}

    def _image(self, digest: str) -> bytes | None:
        kept = self._kept.get(digest)
        if kept is not None:
            return kept
        # A digest comes out of the file: it must not lead out of the folder.
        path = self.path / digest
        if _DIGEST.fullmatch(digest) is None or not path.is_file():
            if not self._has_warned:
                logger.warning("%s: image %s is missing; rows are read without it", path, digest)
            self._has_warned = True
            return None
        data = self._kept[digest] = path.read_bytes()
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return data
