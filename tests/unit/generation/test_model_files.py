"""Directories that are no whole model, or two halves of different ones."""

import json
import logging
import shutil

import pytest

from gymrl.config import GenerationConfig
from gymrl.errors import ConfigError
from gymrl.generation.checkpoints import load_tokenizer
from gymrl.generation.model_loading import load_model


@pytest.fixture
def directory(tiny_directory, tmp_path):
    return shutil.copytree(tiny_directory, tmp_path / "model")


def with_vocabulary(directory, size) -> str:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    return str(directory)


def test_weights_that_are_cut_short_name_the_model_and_the_remedy(directory):
    """It was `SafetensorError: invalid header length`, and no word of which file."""
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"can't be loaded from .*model: .*whole"):
        load_model(str(directory), GenerationConfig(model=str(directory)))


def test_a_tokenizer_of_another_model_is_refused_when_it_is_loaded(directory):
    """The server started, and refused every call for a token outside the vocabulary."""
    with pytest.raises(ConfigError, match=r"the model has a vocabulary of 100; .*own tokenizer"):
        load_tokenizer(with_vocabulary(directory, 100))


def test_tokens_that_a_model_has_not_and_nobody_writes_are_told(directory, caplog):
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    with caplog.at_level(logging.WARNING):
        tokenizer, _ = load_tokenizer(str(directory))
        assert not caplog.records
        load_tokenizer(with_vocabulary(directory, len(tokenizer) - 1))
    assert f"{len(tokenizer)} tokens" in caplog.text
    assert len(tokenizer) <= size
