import gc
import os

import pytest

# Two processes share two cores on a small machine; torch must not spin on both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests use what packages ship or what they make; nothing is fetched from a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What collecting imports stays to the end, so no search for garbage goes through it.

    It is several hundred thousand objects; the searches were a tenth of the unit tests' time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
