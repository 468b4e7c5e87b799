"""A server's worker that can be told not to load a checkpoint."""

from pathlib import Path
from typing import Any

from gymrl.generation.vllm_worker import WeightUpdateExtension
from tests.integration.vllm.servers import MARK


class RefusingExtension(WeightUpdateExtension):
    """Refuses directories that hold a file of that name."""

    def gymrl_load_weights(self: Any, directory: str) -> str | None:
        if (Path(directory) / MARK).exists():
            return "told to refuse them"
        return WeightUpdateExtension.gymrl_load_weights(self, directory)
