import json
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.torch
import torch

from gymrl.errors import ConfigError, WeightUpdateError
from gymrl.generation.checkpoints import (
    StagedTensors,
    checkpoint_entries,
    directory_manifest,
    model_manifest,
    sweep_staged,
    torch_tensor,
)
from gymrl.generation.weights import (
    DirectoryWeights,
    Manifest,
    TensorWeights,
    WeightSource,
    WeightTensor,
    check_update,
    describe,
)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn"])
def test_a_tensor_survives_as_an_array_and_on_disk(dtype):
    tensor = torch.linspace(-3, 3, 12).reshape(3, 4).to(getattr(torch, dtype))
    weights = TensorWeights.of({"w": tensor})
    assert weights.tensors["w"].dtype == dtype
    assert weights.tensors["w"].shape == (3, 4)
    assert torch.equal(torch_tensor(weights.tensors["w"]).float(), tensor.float())

    staged = StagedTensors(weights.tensors)
    try:
        assert checkpoint_entries(staged.path) == {"w": ((3, 4), dtype)}
        loaded = safetensors.torch.load_file(staged.path / "model.safetensors")
        assert torch.equal(loaded["w"].float(), tensor.float())
    finally:
        staged.remove()
        staged.remove()
    assert not staged.path.exists()


def test_arrays_of_numpy_are_taken_as_they_are():
    array = np.arange(6, dtype=np.float32)
    weights = TensorWeights.of({"w": array})
    assert weights.tensors["w"].data is array


def test_a_transposed_tensor_arrives_in_its_own_order():
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert torch_tensor(TensorWeights.of({"w": tensor}).tensors["w"]).tolist() == tensor.tolist()


def test_arrays_that_may_not_be_written_are_copied():
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    torch_tensor(WeightTensor(dtype="float32", data=array))[0] = 1
    assert array[0] == 0


def test_a_value_that_is_no_tensor_is_refused_with_its_name():
    with pytest.raises(WeightUpdateError, match="'w' is a list"):
        TensorWeights.of({"w": [1.0]})


def test_the_source_is_told_apart_by_its_tag():
    encoded = msgspec.json.encode(DirectoryWeights(path="/models/step_7"))
    assert msgspec.json.decode(encoded, type=WeightSource) == DirectoryWeights(
        path="/models/step_7"
    )
    assert str(DirectoryWeights(path="/models/step_7")) == "/models/step_7"
    assert str(TensorWeights.of({"w": np.zeros(1, np.float32)})) == "1 tensors"


MANIFEST = Manifest(
    shapes={"embed": (10, 4), "norm": (4,), "head": (10, 4)}, tied=frozenset({"head"})
)
WHOLE = {"embed": ((10, 4), "float32"), "norm": ((4,), "bfloat16"), "head": ((10, 4), "float32")}


def test_a_whole_set_fits_in_any_float_type():
    MANIFEST.check(WHOLE)


def test_a_tied_tensor_may_be_left_out_or_given():
    MANIFEST.check({name: entry for name, entry in WHOLE.items() if name != "head"})
    Manifest(shapes={"embed": (10, 4), "norm": (4,)}, tied=frozenset({"head"})).check(WHOLE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm": None}, "1 missing: norm"),
        ({"norm": None, "embed": None}, "2 missing: embed, norm"),
        ({"bias": ((4,), "float32")}, "1 unknown: bias"),
        ({"norm": ((5,), "float32")}, r"1 of another shape: norm is \[5\] instead of \[4\]"),
        ({"norm": ((4,), "int32")}, "1 of a type .*: norm"),
        ({f"x{n}": ((4,), "float32") for n in range(5)}, "5 unknown: x0, x1, x2 and 2 more"),
    ],
)
def test_what_does_not_fit_is_named(change, said):
    offered = {name: entry for name, entry in {**WHOLE, **change}.items() if entry is not None}
    with pytest.raises(WeightUpdateError, match=said):
        MANIFEST.check(offered)


def test_several_faults_are_said_at_once():
    with pytest.raises(WeightUpdateError, match="1 missing: norm; 1 unknown: bias"):
        MANIFEST.check({"embed": ((10, 4), "float32"), "bias": ((4,), "float32")})


def test_tensors_that_share_their_storage_are_tied():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(10, 4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

    manifest = model_manifest(Tied())
    assert manifest.tied == {"head.weight"}
    manifest.check({"embed.weight": ((10, 4), "float32")})


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    safetensors.torch.save_file({"embed": torch.zeros(10, 4)}, directory / "model-1.safetensors")
    safetensors.torch.save_file({"norm": torch.zeros(4)}, directory / "model-2.safetensors")
    return directory


def test_a_checkpoint_in_several_files_is_read_as_one(checkpoint):
    assert checkpoint_entries(checkpoint) == {
        "embed": ((10, 4), "float32"),
        "norm": ((4,), "float32"),
    }


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({}, set()),
        ({"tie_word_embeddings": True}, {"lm_head.weight"}),
        ({"tie_word_embeddings": False}, set()),
        ({"text_config": {"tie_word_embeddings": True}}, {"lm_head.weight"}),
    ],
)
def test_the_configuration_says_whether_the_head_is_tied(checkpoint, config, tied):
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert directory_manifest(checkpoint).tied == tied


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_file_that_is_cut_short_is_named(checkpoint, kept):
    file = checkpoint / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightUpdateError, match=r"model-2\.safetensors is no whole") as caught:
        checkpoint_entries(checkpoint)
    assert caught.value.source == str(file)


def test_a_directory_without_weights_says_what_to_do(tmp_path):
    with pytest.raises(WeightUpdateError, match=r"holds no \*\.safetensors; name one that"):
        checkpoint_entries(tmp_path)
    with pytest.raises(WeightUpdateError, match="does not exist"):
        checkpoint_entries(tmp_path / "absent")


def test_what_a_process_that_is_gone_left_is_swept_and_nothing_else():
    tensors = TensorWeights.of({"w": np.zeros(3, np.float32)}).tensors
    own = StagedTensors(tensors)
    no_process = 2**22 + 1  # above the largest process id of Linux
    left = own.path.with_name(own.path.name.replace(str(os.getpid()), str(no_process)))
    shutil.copytree(own.path, left)
    try:
        sweep_staged()
        assert own.path.exists()
        assert not left.exists()
    finally:
        own.remove()


def test_staging_fails_with_the_size_where_there_is_no_room():
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (1 << 46,), (0,))
    with pytest.raises(WeightUpdateError, match=f"{huge.nbytes} bytes"):
        StagedTensors({"w": WeightTensor(dtype="float32", data=huge)})


def test_pause_modes_are_checked():
    for mode in ("keep", "wait", "abort"):
        check_update("7", mode)
    with pytest.raises(ConfigError, match="pause='later': use keep, wait or abort"):
        check_update("7", "later")


def test_a_description_has_shape_and_type():
    tensors = TensorWeights.of({"w": torch.zeros(2, 3, dtype=torch.bfloat16)}).tensors
    assert describe(tensors) == {"w": ((2, 3), "bfloat16")}
