"""Reference trainers: short, without a framework, meant to be read and copied."""

from gymrl.extras import optional_imports

# Each of them needs these, so they are asked for once, here.
with optional_imports():
    import torch  # noqa: F401
    import transformers  # noqa: F401
