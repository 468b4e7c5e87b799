"""Tests that need GPUs: ``make gpu`` runs them, and fails where there is none; else they are skipped."""

import os

import pytest
import torch

from gymrl.testing import build_tiny_model
from tests.integration.vllm.engines import Models, Reference


@pytest.fixture(scope="session", autouse=True)
def num_gpus() -> int:
    count = torch.cuda.device_count()
    if count == 0 and os.environ.get("GYMRL_GPU") == "1":
        pytest.fail("torch sees no GPU")
    if count == 0:
        pytest.skip("torch sees no GPU; make gpu runs these where there is one")
    return count


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(
        str(build_tiny_model(root / "first", seed=0)),
        str(build_tiny_model(root / "second", seed=1)),
    )


@pytest.fixture(scope="session")
def first(models) -> Reference:
    return Reference(models.first)


@pytest.fixture(scope="session")
def second(models) -> Reference:
    return Reference(models.second)
