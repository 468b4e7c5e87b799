from pathlib import Path

import pytest
import torch
import transformers

from gymrl.generation.chat import ChatFormat
from gymrl.generation.model_loading import without_progress_bars
from gymrl.testing import build_tiny_model, build_tiny_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_directory: Path):
    with without_progress_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tiny_directory, dtype=torch.float32
        )
    return model.eval()


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return build_tiny_tokenizer()


@pytest.fixture(scope="session")
def tiny_chat(tiny_tokenizer) -> ChatFormat:
    return ChatFormat(tiny_tokenizer)
