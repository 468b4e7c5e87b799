"""Prompt ids to sampled ids and log-probabilities, and the HTTP server in front of it.

Names are loaded when they are first used: importing the package imports neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gymrl.extras import optional_imports
from gymrl.generation.base import (
    FinishReason,
    Generated,
    GenerationConfig,
    Generator,
    SamplingParams,
    WeightSpan,
)
from gymrl.generation.weights import (
    DirectoryWeights,
    TensorWeights,
    TransferWeights,
    UpdatableGenerator,
)

if TYPE_CHECKING:
    from gymrl.generation.batch import (
        BatchGenerator,
        GenerationDatumSpec,
        GenerationOutputSpec,
        verify_right_padding,
    )
    from gymrl.generation.chat import ChatFormat
    from gymrl.generation.fidelity import FidelityReport, RecordedSequence, check_fidelity
    from gymrl.generation.models import resolve_model
    from gymrl.generation.policy import Policy
    from gymrl.generation.prefix import splice
    from gymrl.generation.server import GenerationServer
    from gymrl.generation.service import GenerationEndpoint, GenerationService
    from gymrl.generation.transformers import TransformersGenerator
    from gymrl.generation.vllm import VllmGenerator
    from gymrl.generation.vllm_http import RemoteVllmGenerator

_HOMES = {
    "BatchGenerator": "gymrl.generation.batch",
    "ChatFormat": "gymrl.generation.chat",
    "GenerationDatumSpec": "gymrl.generation.batch",
    "GenerationEndpoint": "gymrl.generation.service",
    "GenerationOutputSpec": "gymrl.generation.batch",
    "GenerationServer": "gymrl.generation.server",
    "GenerationService": "gymrl.generation.service",
    "Policy": "gymrl.generation.policy",
    "RemoteVllmGenerator": "gymrl.generation.vllm_http",
    "TransformersGenerator": "gymrl.generation.transformers",
    "VllmGenerator": "gymrl.generation.vllm",
    "FidelityReport": "gymrl.generation.fidelity",
    "RecordedSequence": "gymrl.generation.fidelity",
    "check_fidelity": "gymrl.generation.fidelity",
    "resolve_model": "gymrl.generation.models",
    "splice": "gymrl.generation.prefix",
    "verify_right_padding": "gymrl.generation.batch",
}

__all__ = [
    "BatchGenerator",
    "ChatFormat",
    "DirectoryWeights",
    "FidelityReport",
    "FinishReason",
    "Generated",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationEndpoint",
    "GenerationOutputSpec",
    "GenerationServer",
    "GenerationService",
    "Generator",
    "Policy",
    "RecordedSequence",
    "RemoteVllmGenerator",
    "SamplingParams",
    "TensorWeights",
    "TransferWeights",
    "TransformersGenerator",
    "UpdatableGenerator",
    "VllmGenerator",
    "WeightSpan",
    "check_fidelity",
    "resolve_model",
    "splice",
    "verify_right_padding",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with optional_imports():
        return getattr(importlib.import_module(_HOMES[name]), name)
