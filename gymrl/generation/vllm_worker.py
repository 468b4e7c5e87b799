"""What gymrl adds to vLLM's worker: a reload of weights that can be undone, and a transfer.

vLLM imports this module in the engine's process. It must stay small.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from gymrl.extras import optional_imports
from gymrl.generation.weights import GLOO_BACKEND, IPC_BACKEND

with optional_imports():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

logger = logging.getLogger(__name__)

# Imported only by workers of an engine that is started with it.
WeightTransferEngineFactory.register_engine(
    GLOO_BACKEND, "gymrl.generation.vllm_transfer", "GlooTransferEngine"
)
WeightTransferEngineFactory.register_engine(
    IPC_BACKEND, "gymrl.generation.vllm_transfer", "IpcTransferEngine"
)


def undo_load(model: Any, model_config: Any) -> None:
    """Give layers their tensors back after a load that failed.

    Layers that waited for the rest of their weights would take them from the next load.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            # Among what is buffered may be what failed: it must not be loaded after all.
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)


class WeightUpdateExtension:
    """Methods that ``collective_rpc`` reaches; ``self`` is vLLM's worker."""

    def gymrl_load_weights(self: Any, directory: str) -> str | None:
        """Load the checkpoint in `directory`, or of a model by its hub id.

        Returns:
            None, or what went wrong. The model is then whole in shape but mixed in content, and
            must be loaded again from where its weights came from.
        """
        if os.path.isabs(directory) and not os.path.isdir(directory):
            # vLLM would take the path for the name of a model, and look for it on the network.
            return f"the directory {directory} is gone"
        try:
            self.reload_weights(weights_path=directory)
        except Exception as error:
            logger.exception("loading the weights of %s failed", directory)
            undo_load(self.model_runner.get_model(), self.model_config)
            return f"{type(error).__name__}: {error}"
        WeightUpdateExtension.gymrl_forget_cache(self)
        return None

    def gymrl_forget_cache(self: Any) -> None:
        """Overwrite the cache, which no call uses after a pause.

        Weights that gave NaN leave it there, and zero times NaN is NaN: an attention that multiplies
        what it masks would go on with it under weights that are sound.
        """
        for cache in self.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, list | tuple) else [cache]:
                if tensor is not None:
                    tensor.zero_()

    def gymrl_transfer_backend(self: Any) -> str | None:
        """What takes weights from a trainer here; None: nothing does."""
        config = self.vllm_config.weight_transfer_config
        return None if config is None else str(config.backend)

    def gymrl_abandon_transfer(self: Any) -> bool:
        """Close a weight transfer that failed.

        Returns:
            Whether the model may have been touched: it is then whole in shape but mixed in
            content.
        """
        self._weight_update_active = False
        engine = self.weight_transfer_engine
        engine.reset_weight_update_target()
        if hasattr(engine, "leave"):
            engine.leave("the update was abandoned")
        if not getattr(engine, "has_touched_model", True):
            return False
        undo_load(self.model_runner.get_model(), self.model_config)
        return True
