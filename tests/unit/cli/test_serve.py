import pytest

from gymrl.cli.serve import generation_config
from gymrl.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["model: there\nport: 5\n", "generation: {model: there, port: 5}\nseed: 1\n"]
)
def test_what_is_served_comes_from_a_file_and_options_win_over_it(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    config = generation_config(path, port=7, dtype=None, tool_parser="none")
    assert (config.model, config.port, config.dtype) == ("there", 7, "float32")
    assert config.tool_parser == "none"


def test_options_alone_do_and_without_a_model_there_is_nothing_to_serve():
    assert generation_config(None, model="there", port=None).model == "there"
    assert generation_config(None, port=7) is None


def test_a_setting_that_is_none_is_told(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: there\nbatchsize: 5\n")
    with pytest.raises(ConfigError, match="batchsize"):
        generation_config(path)


def test_a_batch_size_that_the_backend_would_not_keep_to_is_refused(tmp_path):
    """It was ignored, and with it the promise of `--batch-size 1`."""
    path = tmp_path / "config.yaml"
    path.write_text("{model: there, backend: vllm}")
    with pytest.raises(ConfigError, match="max_num_seqs: 4") as caught:
        generation_config(path, max_batch_size=4)
    assert caught.value.setting == "--batch-size"
    assert generation_config(path, max_batch_size=4, backend="transformers").max_batch_size == 4
