"""What a run of the reference trainer may be told, and its tasks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
import yaml

from gymrl.config import (
    Config,
    GenerationConfig,
    GymConfig,
    RolloutConfig,
    SamplingParams,
    VllmConfig,
    read_mapping,
    require,
)
from gymrl.errors import ConfigError
from gymrl.generation.weight_transfer import Transfer  # noqa: TC001 - read at run time
from gymrl.recipes.loss import Advantage, LossSettings
from gymrl.recipes.tasks import OWN_TASKS, training_task
from gymrl.settings import parse_yaml
from gymrl.torchrun import PerNode, TorchrunConfig

if TYPE_CHECKING:
    from collections.abc import Sequence


PRESETS = {file.stem: file for file in (Path(__file__).parent / "presets").glob("*.yaml")}
"""Files of settings that come with the recipe, by name."""


class GrpoConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides a run.

    Attributes:
        output: Directory of checkpoints and metrics; a run that finds a checkpoint goes on from it.
        benchmark: ``say_word``, ``look_up``, or what :func:`gymrl.load_benchmark` knows.
        benchmark_params: Its own settings, as :func:`gymrl.load_benchmark` takes them.
        num_tasks: Tasks of the benchmark.
        model: A directory, hub id or ``smollm2``; None: the tiny model of the recipe's own tasks.
        backend: What generates.
        vllm: Its engines, where that is vLLM: memory, GPUs.
        steps: Of the run.
        prompts_per_step: Groups of all ranks in a step.
        num_generations: Attempts at each prompt.
        updates_per_step: Optimizer steps over each step's samples.
        learning_rate: Of AdamW, without decay.
        max_grad_norm: Gradients are scaled down to it.
        advantage: See :func:`~gymrl.recipes.loss.group_advantages`.
        loss: See :class:`~gymrl.recipes.loss.LossSettings`.
        kl_coefficient: Of the divergence from the first model; 0 keeps no copy of it.
        max_staleness: Weight updates that generation may be behind; 0 is synchronous.
        micro_batch_tokens: Tokens of one forward pass, padding counted.
        parallel: How several ranks hold the model: ``ddp`` whole, ``fsdp2`` sharded.
        device: Where each rank trains: ``cpu``, ``cuda`` (the GPU of its place on the node), or
            ``auto``.
        sampling: Of training; `max_tokens` matters most.
        validation_sampling: Of validation.
        validate_every: Steps; 0 never.
        validation_prompts: Groups of a validation, one attempt each.
        checkpoint_every: Steps, and after the last one; 0 never.
        seed: Of the untrained model, the data's order and all sampling.
        token_source: Where tokens come from; see :class:`~gymrl.config.GymConfig`. ``both`` proves
            that no agent changed them, and ``both`` and ``ledger`` tell which weights sampled each.
        max_batch_size: Sequences that a generator decodes together, at most 256; None: a step's. 1
            makes tokens independent of what else is in the batch, to the last bit.
        per_node: Workers of each node.
        weight_transfer: How vLLM engines get new weights; see
            :class:`~gymrl.torchrun.config.TorchrunConfig`.
        in_process: Everything in this process, so that breakpoints stop; one rank.
        tensorboard: Write its events.
    """

    output: str = "runs/grpo"
    benchmark: str = "say_word"
    benchmark_params: dict[str, Any] = msgspec.field(default_factory=dict)
    num_tasks: int = 64
    model: str | None = None
    backend: Literal["transformers", "vllm"] = "transformers"
    vllm: VllmConfig = VllmConfig()
    steps: int = 30
    prompts_per_step: int = 8
    num_generations: int = 16
    updates_per_step: int = 2
    learning_rate: float = 2e-3
    max_grad_norm: float = 1.0
    advantage: Advantage = "standardised"
    loss: LossSettings = LossSettings()
    kl_coefficient: float = 0.0
    max_staleness: int = 0
    micro_batch_tokens: int = 4096
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    sampling: SamplingParams = SamplingParams(max_tokens=4)
    validation_sampling: SamplingParams = SamplingParams(max_tokens=4, temperature=0.5)
    validate_every: int = 10
    validation_prompts: int = 8
    checkpoint_every: int = 10
    seed: int = 0
    token_source: Literal["messages", "ledger", "both"] = "both"
    max_batch_size: int | None = None
    per_node: PerNode = PerNode()
    weight_transfer: Transfer | None = None
    in_process: bool = False
    tensorboard: bool = True

    def __post_init__(self) -> None:
        require(self.steps > 0, "steps", self.steps, "must be positive")
        require(
            self.num_generations > 1,
            "num_generations",
            self.num_generations,
            "a group of one has nothing to compare with; use 2 or more",
        )
        require(
            self.model is not None or self.benchmark in OWN_TASKS,
            "model",
            self.model,
            f"name one for the benchmark {self.benchmark!r}",
        )


def own_device(name: str) -> torch.device:
    """What this rank trains on: the GPU of its place on the node, or the CPU.

    Args:
        name: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: There is no GPU for it.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        raise ConfigError(
            f"device={name!r}: local rank {place} would train on GPU {place}, and torch sees "
            f"{count}; start as many ranks as there are GPUs, or use device: cpu",
            setting="device",
        )
    return torch.device("cuda", place)


def rollout_config(config: GrpoConfig, model: str) -> tuple[TorchrunConfig, list[dict[str, Any]]]:
    """The rollouts of a run, and its tasks."""
    rows, servers = training_task(config)
    together = config.max_batch_size or config.prompts_per_step * config.num_generations
    rollout = RolloutConfig(
        generation=GenerationConfig(
            model=model,
            backend=config.backend,
            vllm=config.vllm,
            max_batch_size=min(256, together),
            num_threads=1,
        ),
        gym=GymConfig(servers=servers, decode_text=False, token_source=config.token_source),
        sampling=config.sampling,
        failure_policy="mask",
        seed=config.seed,
        in_process=config.in_process,
    )
    job = TorchrunConfig(
        rollout=rollout, per_node=config.per_node, weight_transfer=config.weight_transfer
    )
    return job, rows


def read_config(arguments: Sequence[str]) -> tuple[GrpoConfig, bool]:
    """The run that a command line asks for, and whether to show it live."""
    parser = argparse.ArgumentParser(prog="gymrl.recipes.grpo", description=__doc__)
    parser.add_argument("file", nargs="?", help="YAML, TOML or JSON with fields of GrpoConfig")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field, over what the file says; a dot goes into a block (sampling.max_tokens=8)",
    )
    parser.add_argument("--in-process", action="store_true", help="everything in this process")
    parser.add_argument("--live", action="store_true", help="show a table, and draw the rewards")
    parser.add_argument(
        "--task", choices=sorted(PRESETS), help="settings that come with the recipe, to begin with"
    )
    given = parser.parse_args(arguments)
    values = read_mapping(PRESETS[given.task]) if given.task else {}
    values |= read_mapping(given.file) if given.file else {}
    for assignment in given.set:
        name, separator, text = assignment.partition("=")
        if not separator:
            parser.error(f"--set {assignment}: write NAME=VALUE")
        block = values
        *blocks, field = name.split(".")
        for part in blocks:
            block = block.setdefault(part, {})
            if not isinstance(block, dict):
                parser.error(f"--set {assignment}: {part} is no block of settings")
        try:
            block[field] = parse_yaml(text)
        except yaml.YAMLError as error:
            parser.error(f"--set {assignment}: the value does not parse: {error}")
    if given.in_process:
        values["in_process"] = True
    return GrpoConfig.from_dict(values), given.live
