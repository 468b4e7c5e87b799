"""Workers of servers: one that can be told not to load a checkpoint, one that leaves that to vLLM."""

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


class TransferExtension:
    """Takes transfers; checkpoints are loaded as vLLM does it, without gymrl."""

    gymrl_transfer_backend = WeightUpdateExtension.gymrl_transfer_backend
    gymrl_abandon_transfer = WeightUpdateExtension.gymrl_abandon_transfer
    gymrl_forget_cache = WeightUpdateExtension.gymrl_forget_cache
