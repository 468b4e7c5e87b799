"""The nouns of gymrl. Start here: everything else moves these from one stage to the next.

A *row* is one attempt to be made. A *trajectory* is what one attempt gave: flat token arrays and the
*turns* that cut them up. A *group* is all attempts at one prompt. Records are frozen; a changed
record is a new one (:func:`msgspec.structs.replace`). Arrays inside them are not to be written to.

Token arrays are ``int32`` and log-probabilities ``float32``, one-dimensional, C-contiguous. Routes
(:mod:`gymrl.routed_experts`) are ``int8``, ``int16`` or ``int32``, ``[T, layers, experts a token]``.
"""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gymrl.numbers import exact_sum

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
RoutesArray = npt.NDArray[np.signedinteger[Any]]


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One attempt to be made, prepared and checked by the driver.

    A batch may have a hundred thousand of them and none can be part of a cycle, so the collector
    does not look at them.

    Attributes:
        index: Position in the whole batch (the seed's ``_rowidx``), from 0.
        task_index: The prompt's number; rows of one prompt share it.
        rollout_index: Place among the rows of the prompt, from 0.
        route: The instance that serves it: ``agent_ref.name``, else ``task_source``; of a materialized
            task ``taskset:`` and its taskset.
        rollout_id: Unique per attempt, ``[A-Za-z0-9][A-Za-z0-9._-]*``.
        body: The JSON body of the ``/run`` call, encoded once on the driver. Images in it stand as
            references to `media`; :func:`gymrl.media.restore_images` puts them back.
        media: Encoded images of the body, by SHA-256. Rows share the bytes.
    """

    index: int
    task_index: int
    rollout_index: int
    route: str
    rollout_id: str
    body: bytes
    media: dict[str, bytes] = {}


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One model call, as spans of the trajectory's flat arrays.

    ``token_ids[start:generation_start]`` is what the prompt added since the turn before (the first
    prompt, a tool's answer); ``token_ids[generation_start:end]`` is what the model sampled.

    Attributes:
        prompt_text: The added prompt decoded, when the worker was asked for text.
        generation_text: The sampled tokens decoded, when the worker was asked for text.
        is_invalid_tool_call: A tool call was spelled out in text instead of made.
        has_malformed_thinking: A thinking tag is where none may be.
    """

    start: int
    generation_start: int
    end: int
    prompt_text: str | None = None
    generation_text: str | None = None
    is_invalid_tool_call: bool = False
    has_malformed_thinking: bool = False


class ImageRef(msgspec.Struct, frozen=True):
    """An image that a model was shown; its bytes are in the trajectory's `media`.

    Attributes:
        digest: SHA-256 of the encoded bytes, hexadecimal.
        media_type: ``image/png``, ...
        width: In pixels, upright.
        height: In pixels, upright.
    """

    digest: str
    media_type: str
    width: int
    height: int


class SideTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Model calls of an attempt that its main conversation does not continue.

    A summary, a sub-agent, an answer that the agent threw away. They share the attempt's reward
    and have none of their own.

    Attributes:
        token_ids: int32 ``[T]``.
        logprobs: float32 ``[T]``: of the sampling distribution at sampled tokens, 0 elsewhere.
        turns: Spans over the arrays, as a trajectory's. Calls that the main conversation holds
            already are prompt here, so that no sampled token is in two places.
        routed_experts: ``[T, L, K]`` or None, as a trajectory's.
        images: For each turn the images of its prompt, as a trajectory's; their bytes are in the
            trajectory's `media`.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    turns: tuple[Turn, ...]
    routed_experts: RoutesArray | None = None
    images: tuple[tuple[ImageRef, ...], ...] = ()


class WeightVersionSpan(msgspec.Struct, frozen=True):
    """Sampled tokens ``[start, end)`` of a trajectory that one version of the weights gave."""

    version: str
    start: int
    end: int


class Adjustment(msgspec.Struct, frozen=True):
    """One entry of the reward ledger: the rule that spoke, and the total after it."""

    rule: str
    value: float


class Reward(msgspec.Struct, frozen=True):
    """A reward as a ledger: the verifier's value is never lost, rules append.

    Attributes:
        verifier: What the verifier said.
        components: Its parts by name, when it gave some; their sum is `verifier`.
        adjustments: What rules made of it, in order.
    """

    verifier: float
    components: dict[str, float] | None = None
    adjustments: tuple[Adjustment, ...] = ()

    @property
    def total(self) -> float:
        """The value after the last rule."""
        return self.adjustments[-1].value if self.adjustments else self.verifier

    def is_sum_of_components(self) -> bool:
        """Whether `verifier` is the sum of `components`, within 1e-5 relative or 1e-6 absolute.

        True without components.
        """
        if not self.components:
            return True
        total = exact_sum(self.components.values())
        return math.isclose(self.verifier, total, rel_tol=1e-5, abs_tol=1e-6)

    def adjusted(self, rule: str, value: float) -> Reward:
        """A ledger with one entry more."""
        return Reward(self.verifier, self.components, (*self.adjustments, Adjustment(rule, value)))


class FailureKind(enum.StrEnum):
    """Whose fault an ended attempt is, and so what happens next."""

    INFRA = "infra"
    DATA = "data"


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """An attempt that ended without a trajectory, as plain data. Never a reward of 0.

    Attributes:
        error: The error's type name, as in :mod:`gymrl.errors`.
        message: Its text.
        traceback: Where it was raised, formatted on the raising side.
        fields: Its facts (turn, position, ...), so that it can be rebuilt.
    """

    kind: FailureKind
    error: str
    message: str
    row: int | None = None
    turn: int | None = None
    agent: str | None = None
    instance: str | None = None
    url: str | None = None
    status: int | None = None
    attempts: int = 1
    traceback: str = ""
    fields: dict[str, Any] = {}


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, tag="trajectory"):
    """What one attempt gave.

    Attributes:
        agent: The agent instance that made it.
        token_ids: int32 ``[T]``: prompts and generations in order, each token once.
        logprobs: float32 ``[T]``: of the sampling distribution at sampled tokens, 0 elsewhere.
        turns: Spans over the arrays, ascending, without gaps: ``turns[0].start == 0`` and
            ``turns[k].end == turns[k + 1].start``.
        reward: The ledger.
        incomplete_reason: ``response.incomplete_details.reason`` of the final response, if any.
        mask_sample: The environment asks to leave this sample out of the loss.
        placeholder: No token of it was sampled; it only keeps its place in the group.
        truncated_prefix: Later turns were left out because the prefix broke (opt-in).
        result: The server's answer as JSON, token fields taken out, all else as it came; but where
            images are read, they stand as references to `media`.
        notes: Counted incidents on the way (``scorer_error``, ``replaced_surrogates``, ...).
        side_trajectories: Calls beside the main conversation, where they are kept
            (``GymConfig.side_calls``).
        weight_versions: Which weights gave which sampled tokens; empty where nobody said.
        routed_experts: ``[T, L, K]``: the experts that each token went through, -1 where that is
            not known (:mod:`gymrl.routed_experts`); None where no call said.
        images: For each turn the images that its prompt added, in order; empty where images are
            not read (``GymConfig.media``).
        media: Encoded images by SHA-256: those of `images`, and those that `result` refers to.
            Trajectories of a group share the bytes.
    """

    agent: str
    token_ids: Int32Array
    logprobs: Float32Array
    turns: tuple[Turn, ...]
    reward: Reward
    incomplete_reason: str | None = None
    mask_sample: bool = False
    placeholder: bool = False
    truncated_prefix: bool = False
    result: bytes = b"{}"
    notes: dict[str, int] = {}
    side_trajectories: tuple[SideTrajectory, ...] = ()
    weight_versions: tuple[WeightVersionSpan, ...] = ()
    routed_experts: RoutesArray | None = None
    images: tuple[tuple[ImageRef, ...], ...] = ()
    media: dict[str, bytes] = {}

    @property
    def num_tokens(self) -> int:
        """All tokens, prompts included."""
        return int(self.token_ids.shape[0])

    @property
    def num_generated(self) -> int:
        """Sampled tokens."""
        return sum(turn.end - turn.generation_start for turn in self.turns)

    def token_mask(self) -> npt.NDArray[np.bool_]:
        """Bool ``[T]``: true on sampled tokens only."""
        mask = np.zeros(self.token_ids.shape[0], dtype=np.bool_)
        for turn in self.turns:
            mask[turn.generation_start : turn.end] = True
        return mask

    def token_versions(self) -> npt.NDArray[np.int64]:
        """Int64 ``[T]``: the number of the weights that each token was sampled from.

        -1 where nothing was sampled, where nobody said, and where the version is no number.
        """
        versions = np.full(self.token_ids.shape[0], -1, dtype=np.int64)
        for span in self.weight_versions:
            if span.version.isdecimal():
                versions[span.start : span.end] = int(span.version)
        return versions


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker streams for each row: its outcome, and on its last row the timings.

    Attributes:
        index: The row's batch-global index.
        agent: The agent instance that served it.
        outcome: The trajectory, or why there is none.
        timings: Seconds by metric name (shares in percent for ``*_pct``); None but on the
            worker's last row of the call.
    """

    index: int
    agent: str
    outcome: Trajectory | Failure
    timings: dict[str, float] | None = None


class RolloutGroup(msgspec.Struct, frozen=True, kw_only=True):
    """All attempts at one prompt, in row order.

    Attributes:
        index: Position of the group in the batch, from 0.
        task_index: The prompt's number.
        rows: The rows as prepared.
        samples: For each row its trajectory, or the failure in its place.
        metrics: Numbers about this group.
        timings: On the stream's last group: timings of every instance, merged.
    """

    index: int
    task_index: int
    rows: tuple[Row, ...]
    samples: tuple[Trajectory | Failure, ...]
    metrics: dict[str, float] = {}
    timings: dict[str, float] | None = None

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The samples that gave one, in row order."""
        return tuple(s for s in self.samples if isinstance(s, Trajectory))

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The samples that failed, in row order."""
        return tuple(s for s in self.samples if isinstance(s, Failure))
