"""What to install where an optional package is missing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

EXTRA_OF = {
    "torch": "transformers",
    "transformers": "transformers",
    "safetensors": "transformers",
    "jinja2": "transformers",
    "gguf": "smollm2",
    "reasoning_gym": "tasks",
    "math_verify": "maths",
    "PIL": "images",
    "vllm": "vllm",
    "matplotlib": "plots",
    "tensorboard": "recipes",
}
"""The extra of gymrl that brings a module, where several do the one that serves more."""


def install_hint(error: BaseException) -> str:
    """``; install it with: pip install 'gymrl[...]'``, or nothing for any other error."""
    if not isinstance(error, ModuleNotFoundError) or "gymrl[" in str(error):
        return ""
    extra = EXTRA_OF.get((error.name or "").partition(".")[0])
    return f"; install it with: pip install 'gymrl[{extra}]'" if extra else ""


@contextlib.contextmanager
def optional_imports() -> Iterator[None]:
    """A block that imports what an extra brings.

    Raises:
        ModuleNotFoundError: As the block raised it; a missing package of an extra with the extra
            and how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        hint = install_hint(error)
        if not hint:
            raise
        raise ModuleNotFoundError(f"{error}{hint}", name=error.name) from error
