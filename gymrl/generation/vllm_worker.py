"""What gymrl adds to vLLM's worker: a reload of weights that can be undone.

vLLM imports this module in the engine's process. It must stay small.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

logger = logging.getLogger(__name__)


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
            # Layers that waited for the rest of their weights would take them from the next load.
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
            return f"{type(error).__name__}: {error}"
        return None
