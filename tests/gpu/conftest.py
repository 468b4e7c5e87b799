"""Tests that need GPUs: ``make gpu`` runs them, and fails where there is none; else they are skipped."""

import os

import pytest
import torch

from tests.integration.vllm.conftest import first, models, second  # noqa: F401 - fixtures


@pytest.fixture(scope="session", autouse=True)
def num_gpus() -> int:
    count = torch.cuda.device_count()
    if count == 0 and os.environ.get("GYMRL_GPU") == "1":
        pytest.fail("torch sees no GPU")
    if count == 0:
        pytest.skip("torch sees no GPU; make gpu runs these where there is one")
    return count
