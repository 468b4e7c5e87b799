"""Shares with everything that a step must heed, and a step worked out one sample at a time.

Also for tests that run several ranks.
"""

import numpy as np
import torch
import transformers

from gymrl.recipes.grpo import Trainer
from gymrl.recipes.loss import LossSettings
from gymrl.recipes.settings import GrpoConfig
from gymrl.torchrun.shares import Share
from gymrl.types import (
    Failure,
    FailureKind,
    Reward,
    RolloutGroup,
    Row,
    Trajectory,
    Turn,
    WeightVersionSpan,
)

VOCABULARY = 24
VERSION = 5
"""Of the weights that train."""

TEMPERATURE = 0.7
RATE = 0.1


def tiny_model(seed):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config)


def trajectory(number, *, turns, length, reward, version=VERSION, flagged=False):
    """One of the tokens ``number, number + 1, ...``; log-probabilities are roughly the model's."""
    draw = np.random.default_rng(number)
    return Trajectory(
        agent="a",
        token_ids=draw.integers(0, VOCABULARY, length).astype(np.int32),
        logprobs=-draw.uniform(1.0, 5.0, length).astype(np.float32),
        turns=tuple(Turn(start=a, generation_start=b, end=c) for a, b, c in turns),
        reward=Reward(reward),
        mask_sample=flagged,
        weight_versions=tuple(WeightVersionSpan(str(version), b, c) for _, b, c in turns),
    )


def group(index, *samples):
    rows = tuple(
        Row(
            index=number,
            task_index=index,
            rollout_index=number,
            route="r",
            rollout_id=f"{index} {number}",
            body=b"{}",
        )
        for number in range(len(samples))
    )
    return RolloutGroup(index=index, task_index=index, rows=rows, samples=samples)


FAILED = Failure(kind=FailureKind.DATA, error="NoGenerationError", message="nothing")

ALL_FAILED = group(0, FAILED, FAILED)

GROUPS = (
    group(
        0,
        trajectory(1, turns=[(0, 3, 6)], length=6, reward=1.0),
        trajectory(2, turns=[(0, 3, 9), (9, 11, 14)], length=14, reward=0.2, version=VERSION - 2),
        FAILED,
        trajectory(3, turns=[(0, 3, 4)], length=4, reward=0.6, version=VERSION - 1),
    ),
    group(
        1,
        trajectory(4, turns=[(0, 1, 8)], length=8, reward=0.0),
        trajectory(5, turns=[(0, 1, 3)], length=3, reward=2.0, flagged=True),
        trajectory(6, turns=[(0, 1, 5)], length=5, reward=0.5),
    ),
    group(
        2,
        trajectory(7, turns=[(0, 5, 7)], length=7, reward=1.0, version=VERSION - 3),
        trajectory(8, turns=[(0, 5, 12)], length=12, reward=0.0),
    ),
)


def settings(**changes):
    plain = {
        "advantage": "leave_one_out",
        "updates_per_step": 2,
        "max_grad_norm": 1e9,
        "kl_coefficient": 0.3,
        "loss": LossSettings(clip_low=0.1, clip_high=0.3, max_importance_weight=1.5),
        "sampling": {"max_tokens": 16, "temperature": TEMPERATURE},
    }
    return GrpoConfig.from_dict(plain | changes)


def share_of(groups):
    return Share(
        groups=tuple(groups),
        metrics={},
        num_groups=len(GROUPS),
        version=VERSION,
        asked=(VERSION,) * len(groups),
    )


def step(groups, config):
    """What a step makes of the tiny model: its trainer, and the numbers."""
    trainer = Trainer(config, tiny_model(0), tiny_model(1), pad_token_id=0)
    # Each update changes the parameters by its gradient times this, and by nothing else.
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=RATE)
    return trainer, trainer.step(share_of(groups))
