"""New weights for a running generator: where they come from, and the one call that takes them.

Every embedded generator takes weights in the same way::

    await generator.update_weights(DirectoryWeights(path="step_7"), version="7")
    await generator.update_weights(TensorWeights.of(model.state_dict()), version="8", pause="wait")

What holds for all of them:

- Weights are checked before anything is touched: every name of the checkpoint, no other, with the
  shape it had. An update that fails raises :class:`~gymrl.errors.WeightUpdateError`, and the old
  weights go on serving.
- Nothing is sampled while the weights are exchanged, and what was cached from the old ones is
  thrown away: a token after the switch comes from the new weights alone.
- :attr:`~gymrl.generation.base.Generated.weight_versions` says which tokens came from which.

This module reads and writes files and arrays; it does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from gymrl.config import require
from gymrl.errors import WeightsLostError, WeightUpdateError
from gymrl.generation.base import Generator

GLOO_BACKEND = "gymrl_gloo"
"""What an engine's ``weight_transfer_config`` calls gymrl's backend for CPUs and ordinary networks."""

IPC_BACKEND = "gymrl_ipc"
"""The same for tensors of a GPU that trainer and engine share; they are not copied."""

NCCL_BACKEND = "nccl"
"""The same for GPUs that trainer and engine have to themselves; it is vLLM's own."""

WORKER_EXTENSION = "gymrl.generation.vllm_worker.WeightUpdateExtension"
"""What vLLM's ``--worker-extension-cls`` adds gymrl's methods, and its backends, with."""

INITIAL_VERSION = "0"
"""Version of the weights that a generator was started with."""

UNNAMED = "default"
"""What vLLM calls them."""

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of the calls in flight: ``keep`` freezes them, computes their caches again with the
new weights and goes on; ``wait`` lets them end on the old ones first; ``abort`` ends them with what
they have. In every mode calls that arrive meanwhile wait for the new weights."""


def check_update(version: str, pause: str) -> None:
    """Refuse a version that could not be told from others, and a mode that is none of ours.

    Raises:
        ConfigError: Naming what may be.
    """
    require(pause in get_args(PauseMode), "pause", pause, "use keep, wait or abort")
    remedy = f"name the weights by a step's number, say; {UNNAMED!r} is what vLLM calls those without a name"
    require(version not in ("", UNNAMED), "version", version, remedy)


FLOAT_TYPES = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2")
"""Types that weights may have; the generator casts them to its own."""


class WeightTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor as an array that can travel between processes.

    Attributes:
        dtype: As torch names it. A type that numpy lacks travels as unsigned integers of its size.
        data: C-contiguous, in the tensor's shape.
    """

    dtype: str
    data: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return tuple(self.data.shape)


class DirectoryWeights(msgspec.Struct, frozen=True, kw_only=True, tag="directory"):
    """Weights that ``save_pretrained`` wrote.

    Attributes:
        path: A directory with ``*.safetensors``; it must stay until the next update has ended,
            for that is where a failed one goes back to.
    """

    path: str

    def __str__(self) -> str:
        return self.path


class TensorWeights(msgspec.Struct, frozen=True, kw_only=True, tag="tensors"):
    """Weights by name, as a checkpoint of the model names them.

    Through an actor's handle the arrays travel out of band, in shared memory where they are large.

    Attributes:
        tensors: All of the model's. Of tensors that are tied to each other, one is enough.
    """

    tensors: dict[str, WeightTensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> TensorWeights:
        """From numpy arrays or torch tensors, copied only where they must be.

        Args:
            tensors: A ``state_dict``, say. Tensors on a GPU are copied to the host.

        Raises:
            WeightUpdateError: A value is neither an array nor a tensor.
        """
        return cls(tensors={name: _weight_tensor(name, value) for name, value in tensors.items()})

    def __str__(self) -> str:
        return f"{len(self.tensors)} tensors"


class TransferWeights(msgspec.Struct, frozen=True, kw_only=True, tag="transfer"):
    """Weights that a trainer sends to vLLM engines over their own weight transfer.

    For engines that were started for it, with
    ``vllm.engine_args: {weight_transfer_config: {backend: ...}}``, or for servers by URL that were
    started with the like. A sender of
    :mod:`gymrl.generation.weight_transfer` makes it. The trainer sends while ``update_weights``
    runs, and must do so again for an engine that is started again: nothing of it is kept here, so a
    later update whose load fails has nothing to go back to.

    Attributes:
        backend: As the engine was started: ``gymrl_gloo``, ``nccl``, ``gymrl_ipc``, or another one
            that vLLM knows.
        init_info: For the backend; it is handed over when it, or the sender, is another one than
            before, or when the update before has failed.
        update_info: For the backend. ``names``, ``shapes`` and ``dtype_names``, where they are in
            it, are held against the model.
        engines: What `init_info` has besides, by engine: the trainer reaches them at once, and each
            must know its place.
        sender: Tells senders apart that follow each other at one address.
    """

    backend: str
    init_info: dict[str, Any]
    update_info: dict[str, Any]
    engines: tuple[dict[str, Any], ...] = ({},)
    sender: str = ""

    @property
    def meeting(self) -> tuple[str, dict[str, Any]]:
        """Whom an engine meets, and where; when it is another one than before, it meets anew."""
        return self.sender, self.init_info

    def for_engine(self, index: int, num_engines: int) -> TransferWeights:
        """The part of one of the engines that take it together.

        Args:
            index: Its place, from 0.
            num_engines: How many take it.

        Raises:
            WeightUpdateError: The sender was made for another number.
        """
        if num_engines != len(self.engines):
            raise WeightUpdateError(
                f"the sender was made for {len(self.engines)} engines, and {num_engines} take the "
                f"weights; make it with num_engines={num_engines}",
                num_engines=num_engines,
            )
        init_info = {**self.init_info, **self.engines[index]}
        return msgspec.structs.replace(self, init_info=init_info, engines=({},))

    def offered(self) -> dict[str, tuple[tuple[int, ...], str]] | None:
        """Shape and type by name, as :meth:`Manifest.check` takes them; None where it is not told.

        Raises:
            WeightUpdateError: The lists are not of one length.
        """
        lists = [self.update_info.get(key) for key in ("names", "shapes", "dtype_names")]
        if None in lists:
            return None
        names, shapes, dtypes = (list(values or ()) for values in lists)
        if not len(names) == len(shapes) == len(dtypes):
            raise WeightUpdateError(
                f"{len(names)} names, {len(shapes)} shapes and {len(dtypes)} types in update_info; "
                "give one of each for every tensor"
            )
        return {
            name: (tuple(shape), dtype)
            for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
        }

    def __str__(self) -> str:
        return f"a transfer by {self.backend}"


WeightSource = DirectoryWeights | TensorWeights | TransferWeights


@runtime_checkable
class UpdatableGenerator(Generator, Protocol):
    """A generator whose weights can be exchanged while it runs."""

    @property
    def weight_version(self) -> str:
        """Version of the weights that serve now."""
        ...

    async def update_weights(
        self, source: WeightSource, version: str, *, pause: PauseMode = "keep"
    ) -> None:
        """Serve `source` from the next token on; updates take turns.

        Cancelling it before the switch leaves the old weights; once the switch has begun, it ends
        first.

        Raises:
            WeightUpdateError: The weights don't fit the model, can't be read, or the generator is
                closed. Its `serving` names the version that serves.
        """
        ...


async def adopt_weights(generator: Generator, version: str) -> None:
    """Have a generator stand in for one that died, whose weights a trainer had sent.

    Args:
        generator: Just started.
        version: Of those weights.

    Raises:
        WeightsLostError: Nobody has them any more: they were in the engine that died.
    """
    adopt = getattr(generator, "adopt_weights", None)
    if adopt is None:
        raise WeightsLostError(
            f"weights {version!r} came from a trainer and died with the engine; a generator that is "
            "started again can't be given them: start the job again from its checkpoint",
            version=version,
        )
    await adopt(version)


async def weight_takers(generator: Generator) -> list[str]:
    """Engines that a transfer of weights can go to now; a sender is made for so many.

    Returns:
        Each server's URL, or the model of the engine that the generator holds, in the order of their
        places. Empty where it takes no transfers.
    """
    takers = getattr(generator, "weight_takers", None)
    return [] if takers is None else list(await takers())


def _weight_tensor(name: str, value: Any) -> WeightTensor:
    if isinstance(value, WeightTensor):
        return value
    if isinstance(value, np.ndarray):
        return WeightTensor(dtype=value.dtype.name, data=np.ascontiguousarray(value))
    if hasattr(value, "detach"):
        tensor = value.detach().cpu().contiguous()
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype.startswith("float8"):
            tensor = tensor.view(_torch().uint8)
        elif dtype == "bfloat16":
            tensor = tensor.view(_torch().uint16)
        return WeightTensor(dtype=dtype, data=tensor.numpy())
    raise WeightUpdateError(
        f"weight {name!r} is a {type(value).__name__}; give numpy arrays or torch tensors"
    )


def _torch() -> Any:
    import torch  # noqa: PLC0415 - only whoever holds torch tensors needs it

    return torch


Shapes = dict[str, tuple[int, ...]]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint of the model holds.

    Attributes:
        shapes: By name.
        tied: Names that may be left out, or given though the checkpoint does not hold them: they
            share their values with another one.
    """

    shapes: Shapes
    tied: frozenset[str] = frozenset()

    def check(self, offered: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        """Refuse weights that are not a whole set of the model's.

        Args:
            offered: Shape and type by name.

        Raises:
            WeightUpdateError: A name is missing or unknown, a shape differs, or a type is no
                float's. The text names the first few of each.
        """
        missing = sorted(self.shapes.keys() - offered.keys() - self.tied)
        unknown = sorted(offered.keys() - self.shapes.keys() - self.tied)
        reshaped = [
            f"{name} is {list(shape)} instead of {list(self.shapes[name])}"
            for name, (shape, _) in sorted(offered.items())
            if name in self.shapes and shape != self.shapes[name]
        ]
        integers = sorted(name for name, (_, dtype) in offered.items() if dtype not in FLOAT_TYPES)
        faults = {
            "missing": missing,
            "unknown": unknown,
            "of another shape": reshaped,
            f"of a type that is none of {', '.join(FLOAT_TYPES)}": integers,
        }
        said = [f"{len(names)} {what}: {_some(names)}" for what, names in faults.items() if names]
        if said:
            raise WeightUpdateError(f"the weights don't fit the model; {'; '.join(said)}")


def _some(names: list[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def describe(tensors: Mapping[str, WeightTensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type by name, as :meth:`Manifest.check` takes them."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        WeightUpdateError: There are none.
    """
    root = Path(directory)
    files = sorted(root.glob("*.safetensors"))
    if not files:
        what = "holds no *.safetensors" if root.is_dir() else "does not exist"
        raise WeightUpdateError(
            f"the directory {root} {what}; name one that save_pretrained wrote", source=str(root)
        )
    return files
