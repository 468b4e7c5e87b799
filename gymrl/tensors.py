"""Groups of rollouts as one batch of torch tensors.

Axes in names: B samples (rows of the batch, groups one after the other, each in row order), T tokens
of the longest sample, P tokens of the longest first prompt, N all tokens without padding.

Token ids are int64, log-probabilities float32. Everything is padded on the right.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from gymrl.errors import RewardContractError, RowValueError
from gymrl.extras import optional_imports
from gymrl.media.batches import BatchImages
from gymrl.numbers import is_reward
from gymrl.routed_experts import MISSING, RouteFormatError, routes_or_missing, unknown_routes
from gymrl.scoring import env_reward, hit_max_tokens
from gymrl.scoring.length_penalty.apply import PREFIX
from gymrl.types import Failure, Trajectory

with optional_imports():
    import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from gymrl.media.processing import ImageProcessor
    from gymrl.types import RolloutGroup, Row


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """All samples end to end, without padding.

    Attributes:
        token_ids: int64 ``[N]``.
        token_mask: bool ``[N]``: true on sampled tokens that may be trained on.
        generation_logprobs: float32 ``[N]``: 0 where nothing was sampled.
        weight_versions: int64 ``[N]``: see :class:`RolloutBatch`.
        cu_seqlens: int32 ``[B + 1]``: sample b is ``[cu_seqlens[b], cu_seqlens[b + 1])``.
        max_seqlen: The longest sample.
        routed_experts: ``[N, L, K]`` or None, as the batch's.
    """

    token_ids: torch.Tensor
    token_mask: torch.Tensor
    generation_logprobs: torch.Tensor
    weight_versions: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    routed_experts: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutBatch:
    """One batch, in row order.

    `final_batch` has the columns that trainers of NeMo RL's shape read, one entry a sample:

    =================== ============================================================================
    ``agent_ref``       ``{"type": "responses_api_agents", "name": ...}``
    ``message_log``     messages, ``user`` and ``assistant`` in turn (see :func:`message_log`)
    ``length``          int64 ``[B]``: tokens of the first prompt
    ``loss_multiplier`` float32 ``[B]``: 1, but 0 for a failed row
    ``total_reward``    float32 ``[B]``: after the last rule; 0 where `reward_valid` is false
    ``env_reward``      float32 ``[B]``: before the length penalty, where there is one
    ``truncated``       bool ``[B]``: a token limit cut the rollout off
    ``mask_sample``     bool ``[B]``: leave the sample out of the loss
    ``reward/<name>``   float32 ``[B]``: the verifier's component, 0 where a sample has none
    ``reward_valid``    bool ``[B]``: the reward was given; false for a failed row
    =================== ============================================================================

    Attributes:
        final_batch: The columns above.
        input_ids: int64 ``[B, P]``: the first prompts.
        token_ids: int64 ``[B, T]``.
        token_mask: bool ``[B, T]``: true on sampled tokens only, nowhere in a failed row.
        generation_logprobs: float32 ``[B, T]``: of the sampling distribution, 0 elsewhere.
        weight_versions: int64 ``[B, T]``: which weights each token was sampled from, by the number
            of their version; -1 where nothing was sampled, or nobody said which. A generation that
            an update of the weights interrupted has two numbers.
        lengths: int64 ``[B]``: tokens of each sample.
        group_index: int64 ``[B]``: which group of the call a sample belongs to, from 0.
        pad_token_id: What `token_ids` and `input_ids` are padded with.
        routed_experts: int8, int16 or int32 ``[B, T, L, K]``: the experts that each token went
            through, -1 where that is not known and in the padding; None where no sample has any.
        missing_routes: int64 ``[B]``: tokens of each sample that a loss may depend on and whose
            route is not known; None without routes.
        media_inputs: Model inputs of all images, packed in the order of the samples and of their
            tokens (``pixel_values``, ``image_grid_thw``, ...), and, where the model takes it, which
            of `token_ids` are images (``mm_token_type_ids`` ``[B, T]``); empty without images.
    """

    final_batch: dict[str, Any]
    input_ids: torch.Tensor
    token_ids: torch.Tensor
    token_mask: torch.Tensor
    generation_logprobs: torch.Tensor
    weight_versions: torch.Tensor
    lengths: torch.Tensor
    group_index: torch.Tensor
    pad_token_id: int
    routed_experts: torch.Tensor | None = None
    missing_routes: torch.Tensor | None = None
    media_inputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def reward_valid(self) -> torch.Tensor:
        """Bool ``[B]``: false for failed rows, whose reward is to be left out everywhere."""
        column: torch.Tensor = self.final_batch["reward_valid"]
        return column

    def packed(self) -> PackedBatch:
        """The same tokens without padding."""
        real_BT = torch.arange(self.token_ids.shape[1]) < self.lengths[:, None]
        cu_seqlens = torch.zeros(len(self) + 1, dtype=torch.int32)
        cu_seqlens[1:] = self.lengths.cumsum(0)
        return PackedBatch(
            token_ids=self.token_ids[real_BT],
            token_mask=self.token_mask[real_BT],
            generation_logprobs=self.generation_logprobs[real_BT],
            weight_versions=self.weight_versions[real_BT],
            cu_seqlens=cu_seqlens,
            max_seqlen=int(self.lengths.max()),
            routed_experts=None if self.routed_experts is None else self.routed_experts[real_BT],
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """One row as tensors, whatever became of it."""

    row: Row
    group: int
    trajectory: Trajectory | None
    token_ids: torch.Tensor
    token_mask: torch.Tensor
    logprobs: torch.Tensor
    weight_versions: torch.Tensor
    messages: list[dict[str, Any]]

    @property
    def agent(self) -> str:
        return self.trajectory.agent if self.trajectory is not None else self.row.route


def to_batch(  # noqa: PLR0913 - what a batch is like is said in one place
    groups: Iterable[RolloutGroup],
    *,
    pad_token_id: int,
    max_total_tokens: int | None = None,
    mask_flagged_samples: bool = True,
    pad_to_multiple: int = 1,
    with_env_reward: bool | None = None,
    images: ImageProcessor | None = None,
) -> RolloutBatch:
    """Make one batch of groups, in the order given.

    A failure that was kept in its group becomes a placeholder that trains nothing: one pad token,
    `token_mask` false, `loss_multiplier` 0, `mask_sample` true, `reward_valid` false.

    Args:
        groups: At least one.
        pad_token_id: Fills `token_ids` and `input_ids` on the right.
        max_total_tokens: The generator's context; a sample that reaches it counts as truncated.
        mask_flagged_samples: Carry ``mask_sample``. False leaves the column out, for environments
            whose flags are too coarse; failed rows train nothing either way.
        pad_to_multiple: T is rounded up to a multiple of it.
        with_env_reward: Whether there is a column `env_reward`; None: if a length rule spoke.
        images: Makes model inputs of the samples' images: the user message of each turn gets those
            of the turn's images, `media_inputs` those of all. Needed where samples have images.

    Raises:
        MediaError: An image is broken, or the processor refuses it.
        RowValueError: There is no group, a sample's model was shown images that would not be in
            the batch, `pad_to_multiple` is not positive, or samples have routes
            of different models.
        RewardContractError: A trajectory's reward is not finite.
    """
    samples = [
        _sample(row, outcome, number, pad_token_id)
        for number, group in enumerate(groups)
        for row, outcome in zip(group.rows, group.samples, strict=True)
    ]
    if not samples:
        raise RowValueError("no rows to make a batch of: give at least one group")
    if pad_to_multiple <= 0:
        raise RowValueError(f"pad_to_multiple={pad_to_multiple}: must be positive")
    routes = _attached_routes(samples)
    lengths_B = torch.tensor([sample.token_ids.shape[0] for sample in samples])
    width = -(-int(lengths_B.max()) // pad_to_multiple) * pad_to_multiple
    columns = {
        "agent_ref": [{"type": "responses_api_agents", "name": s.agent} for s in samples],
        "message_log": [sample.messages for sample in samples],
        "length": torch.tensor([s.messages[0]["token_ids"].shape[0] for s in samples]),
        "loss_multiplier": _floats(float(s.trajectory is not None) for s in samples),
        **_reward_columns(samples, with_env_reward),
        "truncated": torch.tensor(
            [
                s.trajectory is not None and hit_max_tokens(s.trajectory, max_total_tokens)
                for s in samples
            ]
        ),
    }
    if mask_flagged_samples:
        columns["mask_sample"] = torch.tensor(
            [s.trajectory is None or s.trajectory.mask_sample for s in samples]
        )
    media_inputs = _attached_images(samples, images)
    token_ids_BT = _pad([sample.token_ids for sample in samples], width, pad_token_id)
    if images is not None and media_inputs:
        media_inputs |= images.token_types(token_ids_BT)
    first_prompts = [sample.messages[0]["token_ids"] for sample in samples]
    longest_prompt = max(prompt.shape[0] for prompt in first_prompts)
    return RolloutBatch(
        final_batch=columns,
        input_ids=_pad(first_prompts, longest_prompt, pad_token_id),
        token_ids=token_ids_BT,
        token_mask=_pad([sample.token_mask for sample in samples], width, False),
        generation_logprobs=_pad([sample.logprobs for sample in samples], width, 0.0),
        weight_versions=_pad([sample.weight_versions for sample in samples], width, -1),
        lengths=lengths_B,
        group_index=torch.tensor([sample.group for sample in samples]),
        pad_token_id=pad_token_id,
        routed_experts=None if routes is None else _pad(routes, width, MISSING),
        missing_routes=None if routes is None else _num_missing(samples, routes),
        media_inputs=media_inputs,
    )


def _attached_images(
    samples: Sequence[_Sample], processor: ImageProcessor | None
) -> dict[str, torch.Tensor]:
    """Model inputs of all images, and on the user messages that show them."""
    inputs = None if processor is None else BatchImages(processor)
    for sample in samples:
        trajectory = sample.trajectory
        if trajectory is None:
            continue
        unread = trajectory.notes.get("images_not_read", 0)
        if unread:
            raise RowValueError(
                f"row {sample.row.index}: the model was shown {unread} images that were not read, "
                "so that its log-probabilities can't be had again; set gym.media",
                row=sample.row.index,
            )
        if inputs is not None:
            inputs.attach(trajectory, sample.messages)
        elif any(trajectory.images):
            raise RowValueError(
                f"row {sample.row.index} has {sum(map(len, trajectory.images))} images, which "
                "would not be in the batch; give to_batch the model's ImageProcessor as images",
                row=sample.row.index,
            )
    return {} if inputs is None else inputs.packed()


def _attached_routes(samples: Sequence[_Sample]) -> list[torch.Tensor] | None:
    """Routes of every sample, and on every message; None where no sample has any."""
    given = [None if s.trajectory is None else s.trajectory.routed_experts for s in samples]
    try:
        arrays = routes_or_missing(given, [s.token_ids.shape[0] for s in samples])
    except RouteFormatError as error:
        raise RowValueError(f"routed_experts of the batch: {error}") from error
    if arrays is None:
        return None
    routes = [_shared(array) for array in arrays]
    for sample, tensor in zip(samples, routes, strict=True):
        _attach_routes(sample.messages, tensor)
    return routes


def _attach_routes(messages: list[dict[str, Any]], routes: torch.Tensor) -> None:
    start = 0
    for message in messages:
        end = start + message["token_ids"].shape[0]
        message["routed_experts"] = routes[start:end]
        start = end


def _num_missing(samples: Sequence[_Sample], routes: Sequence[torch.Tensor]) -> torch.Tensor:
    turns = [() if s.trajectory is None else s.trajectory.turns for s in samples]
    return torch.tensor(
        [
            unknown_routes(tensor.numpy(), [(turn.generation_start, turn.end) for turn in each])
            for tensor, each in zip(routes, turns, strict=True)
        ]
    )


def message_log(trajectory: Trajectory) -> list[dict[str, Any]]:
    """A trajectory as messages: for each turn what the prompt added, then what was sampled.

    Each message has ``role`` (``user``: whatever the model did not sample, tool answers too;
    ``assistant``), ``content`` (text, "" where the worker kept none), ``token_ids`` (int64 ``[L]``)
    and ``token_loss_mask`` (bool ``[L]``). An assistant message also has ``generation_logprobs``
    (float32 ``[L]``), ``is_invalid_tool_call`` and ``has_malformed_thinking``. The messages' tokens
    in order are the trajectory's; they share memory with each other's neighbours. Where the
    trajectory has routes, each message has its slice of them, ``routed_experts``; in a batch where
    some sample has routes, every message has them, -1 where they are not known.
    """
    messages = _messages(
        trajectory, _token_tensor(trajectory.token_ids), _shared(trajectory.logprobs)
    )
    if trajectory.routed_experts is not None:
        _attach_routes(messages, _shared(trajectory.routed_experts))
    return messages


def _messages(
    trajectory: Trajectory, token_ids: torch.Tensor, logprobs: torch.Tensor
) -> list[dict[str, Any]]:
    mask = _shared(trajectory.token_mask())
    messages: list[dict[str, Any]] = []
    for turn in trajectory.turns:
        prompt = slice(turn.start, turn.generation_start)
        generation = slice(turn.generation_start, turn.end)
        messages += [
            {
                "role": "user",
                "content": turn.prompt_text or "",
                "token_ids": token_ids[prompt],
                "token_loss_mask": mask[prompt],
            },
            {
                "role": "assistant",
                "content": turn.generation_text or "",
                "token_ids": token_ids[generation],
                "token_loss_mask": mask[generation],
                "generation_logprobs": logprobs[generation],
                "is_invalid_tool_call": turn.is_invalid_tool_call,
                "has_malformed_thinking": turn.has_malformed_thinking,
            },
        ]
    return messages


def _sample(row: Row, outcome: Trajectory | Failure, group: int, pad_token_id: int) -> _Sample:
    if isinstance(outcome, Failure):
        return _placeholder(row, group, pad_token_id)
    total = outcome.reward.total
    if not is_reward(total):
        raise RewardContractError(
            f"row {row.index} (agent {outcome.agent!r}) has the reward {total}; "
            "a number that is finite as float32 is needed",
            row=row.index,
            agent=outcome.agent,
        )
    token_ids = _token_tensor(outcome.token_ids)
    logprobs = _shared(outcome.logprobs)
    return _Sample(
        row=row,
        group=group,
        trajectory=outcome,
        token_ids=token_ids,
        token_mask=_shared(outcome.token_mask()),
        logprobs=logprobs,
        weight_versions=torch.from_numpy(outcome.token_versions()),
        messages=_messages(outcome, token_ids, logprobs),
    )


def _placeholder(row: Row, group: int, pad_token_id: int) -> _Sample:
    """A row without a trajectory: one pad token of prompt, nothing sampled."""
    pad = torch.tensor([pad_token_id])
    off = torch.zeros(1, dtype=torch.bool)
    prompt = {"role": "user", "content": "", "token_ids": pad, "token_loss_mask": off}
    nothing = {
        "role": "assistant",
        "content": "",
        "token_ids": pad[:0],
        "token_loss_mask": off[:0],
        "generation_logprobs": torch.zeros(0),
        "is_invalid_tool_call": False,
        "has_malformed_thinking": False,
    }
    return _Sample(
        row=row,
        group=group,
        trajectory=None,
        token_ids=pad,
        token_mask=off,
        logprobs=torch.zeros(1),
        weight_versions=torch.tensor([-1]),
        messages=[prompt, nothing],
    )


def _reward_columns(
    samples: Sequence[_Sample], with_env_reward: bool | None
) -> dict[str, torch.Tensor]:
    rewards = [None if s.trajectory is None else s.trajectory.reward for s in samples]
    columns = {"total_reward": _floats(0.0 if r is None else r.total for r in rewards)}
    given = [reward for reward in rewards if reward is not None]
    if with_env_reward is None:
        with_env_reward = any(
            entry.rule.startswith(PREFIX) for reward in given for entry in reward.adjustments
        )
    if with_env_reward:
        columns["env_reward"] = _floats(0.0 if r is None else env_reward(r) for r in rewards)
    for name in sorted({name for reward in given for name in reward.components or {}}):
        columns[f"reward/{name}"] = _floats(
            0.0 if r is None else (r.components or {}).get(name, 0.0) for r in rewards
        )
    columns["reward_valid"] = torch.tensor([reward is not None for reward in rewards])
    return columns


def _token_tensor(token_ids: npt.NDArray[np.int32]) -> torch.Tensor:
    """int64, as losses and embeddings want it; the one conversion of a trajectory."""
    return torch.from_numpy(token_ids.astype("int64"))


def _shared(array: npt.NDArray[Any]) -> torch.Tensor:
    """The array's own memory; a copy where it may not be written to, as torch has no such tensor."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _floats(values: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float32)


def _pad(tensors: Sequence[torch.Tensor], width: int, fill: float) -> torch.Tensor:
    shape = (len(tensors), width, *tensors[0].shape[1:])
    padded = torch.full(shape, fill, dtype=tensors[0].dtype)
    for index, tensor in enumerate(tensors):
        padded[index, : tensor.shape[0]] = tensor
    return padded
