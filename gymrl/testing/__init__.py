"""Public fakes and tiny real models for tests of code that uses gymrl.

Names are loaded when they are first used, so that a test of one room does not import another's
dependencies.
"""

from __future__ import annotations

import importlib
from typing import Any

from gymrl.extras import optional_imports

_HOMES = {
    "FakeGymServer": "gymrl.testing.gym_server",
    "ScriptedGenerator": "gymrl.testing.generator",
    "ScriptedImageGenerator": "gymrl.testing.generator",
    "build_image": "gymrl.testing.vision",
    "build_image_uri": "gymrl.testing.vision",
    "build_tiny_image_format": "gymrl.testing.vision",
    "build_tiny_model": "gymrl.testing.models",
    "build_tiny_tokenizer": "gymrl.testing.models",
    "build_tiny_vision_model": "gymrl.testing.vision",
    "build_tiny_vision_processor": "gymrl.testing.vision",
    "build_tiny_vision_tokenizer": "gymrl.testing.vision",
}

__all__ = [
    "FakeGymServer",
    "ScriptedGenerator",
    "ScriptedImageGenerator",
    "build_image",
    "build_image_uri",
    "build_tiny_image_format",
    "build_tiny_model",
    "build_tiny_tokenizer",
    "build_tiny_vision_model",
    "build_tiny_vision_processor",
    "build_tiny_vision_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with optional_imports():
        return getattr(importlib.import_module(_HOMES[name]), name)
