"""Checkpoints on disk and in memory: what they hold, and a place on shared memory for tensors.

An engine in another process reads weights from a directory. Tensors are therefore written, once, as
a checkpoint on the machine's shared-memory file system, where the engine maps them. The directory's
name carries the process that owns it; what a killed process left is swept at the next start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub

from gymrl.errors import ConfigError, WeightUpdateError
from gymrl.extras import optional_imports
from gymrl.generation.weights import Manifest, WeightTensor, weight_files
from gymrl.routed_experts import count_experts

with optional_imports():
    import safetensors.torch
    import torch
    import transformers

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "gymrl-weights-"

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def checkpoint_entries(directory: str | Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor, read off the files' headers; no weight is read.

    Raises:
        WeightUpdateError: There are no safetensors files, one is cut short or is something else.
    """
    entries: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in weight_files(directory):
        try:
            with safetensors.safe_open(file, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    view = opened.get_slice(name)
                    dtype = _DTYPES.get(view.get_dtype(), view.get_dtype().lower())
                    entries[name] = (tuple(view.get_shape()), dtype)
        except (OSError, safetensors.SafetensorError) as error:
            raise WeightUpdateError(
                f"{file} is no whole safetensors file: {error}", source=str(file)
            ) from error
    return entries


def directory_manifest(directory: str | Path) -> Manifest:
    """What checkpoints of the model in `directory` hold.

    Raises:
        WeightUpdateError: As :func:`checkpoint_entries`.
    """
    shapes = {name: shape for name, (shape, _) in checkpoint_entries(directory).items()}
    config_file = Path(directory) / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    # Models of several parts keep the setting with their text model.
    is_tied = any(c.get("tie_word_embeddings") for c in (config, config.get("text_config") or {}))
    tied = frozenset({"lm_head.weight"}) if is_tied else frozenset[str]()
    return Manifest(shapes=shapes, tied=tied)


def model_manifest(model: torch.nn.Module) -> Manifest:
    """What checkpoints of `model` hold; names that share their storage are tied."""
    state = model.state_dict()
    owners: dict[int, list[str]] = {}
    for name, tensor in state.items():
        if tensor.numel():
            owners.setdefault(tensor.data_ptr(), []).append(name)
    tied = {name for names in owners.values() for name in names[1:]}
    return Manifest(
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        tied=frozenset(tied),
    )


def torch_tensor(tensor: WeightTensor) -> torch.Tensor:
    """The tensor, over the array's own memory."""
    data = tensor.data if tensor.data.flags.writeable else tensor.data.copy()
    return torch.from_numpy(data).view(getattr(torch, tensor.dtype))


class StagedTensors:
    """Tensors as a checkpoint on shared memory, until :meth:`remove`.

    Args:
        tensors: Copied here, once.

    Raises:
        WeightUpdateError: There is no room for them.
    """

    def __init__(self, tensors: Mapping[str, WeightTensor]) -> None:
        size = sum(tensor.data.nbytes for tensor in tensors.values())
        root = _roomy_directory(size)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root))
        try:
            safetensors.torch.save_file(
                {name: torch_tensor(tensor) for name, tensor in tensors.items()},
                self.path / "model.safetensors",
            )
        except BaseException as error:
            self.remove()
            if isinstance(error, OSError | safetensors.SafetensorError | RuntimeError):
                raise WeightUpdateError(f"can't stage {size} bytes in {root}: {error}") from error
            raise

    def remove(self) -> None:
        """Give the memory back. Whoever maps it keeps it for as long. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)


def _roomy_directory(size: int) -> Path:
    candidates = [SHARED_MEMORY, Path(tempfile.gettempdir())]
    for directory in candidates:
        if directory.is_dir() and shutil.disk_usage(directory).free > size * 1.05:
            return directory
    raise WeightUpdateError(
        f"neither {candidates[0]} nor {candidates[1]} has room for {size} bytes of weights; "
        "enlarge the shared memory, or update from a directory"
    )


def sweep_staged() -> None:
    """Remove what processes that are gone have left."""
    for root in {SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for directory in root.glob(f"{PREFIX}*"):
            owner = directory.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(directory, ignore_errors=True)


def load_tokenizer(source: str) -> tuple[Any, list[int]]:
    """The tokenizer of `source`, and the tokens that end a turn.

    Raises:
        ConfigError: The files are not there, can't be read, or the tokenizer is not this model's.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        config = transformers.AutoConfig.from_pretrained(source)
    except Exception as error:  # broken files raise whatever their reader stumbles over
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"model={source!r} can't be read: {reason}; name a directory that save_pretrained "
            "wrote, with the tokenizer in it",
            setting="model",
        ) from error
    _check_vocabulary(source, tokenizer, config.get_text_config(decoder=True))
    try:
        named = transformers.GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:  # a checkpoint may do without the file
        named = None
    if named is None:
        named = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
    found = [named, tokenizer.eos_token_id]
    end_ids = [i for ids in found for i in (ids if isinstance(ids, list) else [ids])]
    return tokenizer, [int(i) for i in end_ids if i is not None]


def _check_vocabulary(source: str, tokenizer: Any, config: Any) -> None:
    """Refuse a tokenizer of another model, with which every prompt would be refused.

    Raises:
        ConfigError: What it makes of plain words, or of a conversation, is outside the vocabulary.
    """
    vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is None or len(tokenizer) <= vocab_size:
        return
    ids = list(tokenizer.encode("What is the capital of France?"))
    if tokenizer.chat_template:
        with contextlib.suppress(Exception):  # a template may refuse anything; others say so
            message = {"role": "user", "content": "hi"}
            text = tokenizer.apply_chat_template([message], tokenize=False)
            ids += tokenizer.encode(text, add_special_tokens=False)
    highest = max(ids)
    if highest >= vocab_size:
        raise ConfigError(
            f"model={source!r}: its tokenizer has {len(tokenizer)} tokens and writes "
            f"{tokenizer.convert_ids_to_tokens(highest)!r} ({highest}), the model has a vocabulary of "
            f"{vocab_size}; take the model's own tokenizer, or resize its embeddings",
            setting="model",
        )
    logger.warning(
        "model=%r: its tokenizer has %d tokens and the model a vocabulary of %d; calls with the others "
        "are refused",
        source,
        len(tokenizer),
        vocab_size,
    )


def model_num_experts(source: str) -> int | None:
    """How many experts a layer of a checkpoint's model has; None where it does not say."""
    return count_experts(transformers.AutoConfig.from_pretrained(source))


def model_context(source: str) -> int:
    """The context that the model itself names, in tokens."""
    config = transformers.AutoConfig.from_pretrained(source).get_text_config(decoder=True)
    return int(getattr(config, "max_position_embeddings", None) or 4096)


def local_checkpoint(source: str) -> str:
    """The directory of a model that was loaded, if need be the one in the hub's cache.

    Raises:
        WeightUpdateError: It is not there.
    """
    if Path(source).is_dir():
        return source
    try:
        return str(huggingface_hub.snapshot_download(source, local_files_only=True))
    except (OSError, ValueError) as error:
        raise WeightUpdateError(f"the files of {source} are not in the cache: {error}") from error
