"""One row as the page shows it: decoded whole, told without its arrays; and those in spans."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gymrl.errors import RowValueError
from gymrl.media import reference_digest
from gymrl.records.schema import RowRecord, SamplingRecord, SideTrajectoryRecord, TrajectoryRecord
from gymrl.routed_experts import RouteFormatError, decode_routes
from gymrl.types import Failure, ImageRef, Reward, Turn, WeightVersionSpan
from gymrl.viewer.conversation import Conversation, Item, Text, conversation_of

if TYPE_CHECKING:
    from gymrl.records import MediaFolder
    from gymrl.types import Float32Array, Int32Array, RoutesArray
    from gymrl.viewer.token_text import TokenTexts

MAX_SPAN = 4096
"""Tokens of one answer."""
_IMAGE_KINDS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
_decoder = msgspec.json.Decoder(RowRecord)


class LedgerLine(msgspec.Struct, frozen=True):
    """One step of a reward: the rule, its total, and what it changed."""

    rule: str
    value: float
    change: float | None


class TurnImage(msgspec.Struct, frozen=True):
    """An image that a turn's prompt added: its number among the row's images, and its size."""

    number: int
    width: int
    height: int


class TurnView(msgspec.Struct, frozen=True, kw_only=True):
    """A turn: its spans, its texts, and how sure the model was.

    Attributes:
        mean_logprob: Over sampled tokens; None where there are none.
        min_logprob: The least likely one's.
        min_at: Its position in the trajectory.
        images: That its prompt added.
    """

    start: int
    generation_start: int
    end: int
    prompt: Text | None
    generation: Text | None
    is_invalid_tool_call: bool
    has_malformed_thinking: bool
    mean_logprob: float | None
    min_logprob: float | None
    min_at: int | None
    images: list[TurnImage]


class SequenceView(msgspec.Struct, frozen=True):
    """A token sequence: the main conversation's, or a side trajectory's.

    Attributes:
        experts: Layers, and experts a token in each, where the routes of its tokens are known.
    """

    num_tokens: int
    num_generated: int
    turns: list[TurnView]
    experts: tuple[int, int] | None


class RowView(msgspec.Struct, frozen=True, kw_only=True):
    """A row without its arrays.

    Attributes:
        sequences: The main conversation first, then side trajectories; none for a failure.
        images: How many there are.
    """

    line: int
    size: int
    index: int
    task_index: int
    rollout_index: int
    route: str
    agent: str
    rollout_id: str
    benchmark: str
    task_id: str
    task_digest: str
    sampling: SamplingRecord
    reward: Reward | None
    total: float | None
    ledger: list[LedgerLine]
    incomplete_reason: str | None
    mask_sample: bool
    placeholder: bool
    truncated_prefix: bool
    notes: dict[str, int]
    weight_versions: tuple[WeightVersionSpan, ...]
    sequences: list[SequenceView]
    failure: Failure | None
    metrics: dict[str, float]
    timings: dict[str, float] | None
    conversation: tuple[Item, ...]
    images: int


class TokenSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens ``[start, start + len(ids))`` of one sequence.

    Attributes:
        texts: One a token, empty where a later token completes the character; None without a
            tokenizer.
    """

    start: int
    ids: list[int]
    logprobs: list[float]
    texts: list[str] | None


class DecodedRow:
    """One line, decoded.

    Args:
        line: Its number in the file.
        data: Its bytes.
        folder: Has the images that the line refers to.

    Raises:
        RowValueError: It is no record of a row in full; the line and the field are named.
    """

    def __init__(self, line: int, data: bytes, folder: MediaFolder | None = None) -> None:
        self.line, self.size = line, len(data)
        self._folder = folder
        try:
            self.record = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RowValueError(f"line {line} is no record of a row: {error}") from error
        trajectory = self.record.trajectory
        self._parts: list[TrajectoryRecord | SideTrajectoryRecord] = (
            [] if trajectory is None else [trajectory, *trajectory.side_trajectories]
        )
        self._arrays = [self._arrays_of(part) for part in self._parts]
        self._routes = [self._routes_of(part) for part in self._parts]
        self.conversation: Conversation = self._conversation()
        self._images = list(self.conversation.images)
        self._turn_images = self._place_images(() if trajectory is None else trajectory.images)
        self._drop_lists()

    def _conversation(self) -> Conversation:
        record = self.record
        result = record.trajectory.result if record.trajectory is not None else b"{}"
        return conversation_of(msgspec.json.decode(record.task), msgspec.json.decode(result))

    def _arrays_of(
        self, part: TrajectoryRecord | SideTrajectoryRecord
    ) -> tuple[Int32Array, Float32Array]:
        try:
            ids = np.array(part.token_ids, np.int32)
        except OverflowError as error:
            raise RowValueError(f"line {self.line}: token_ids: {error}") from error
        if len(ids) != len(part.logprobs):
            raise RowValueError(
                f"line {self.line}: {len(ids)} token ids and {len(part.logprobs)} logprobs"
            )
        return ids, np.array(part.logprobs, np.float32)

    def _routes_of(self, part: TrajectoryRecord | SideTrajectoryRecord) -> RoutesArray | None:
        try:
            return None if part.routed_experts is None else decode_routes(part.routed_experts)
        except RouteFormatError as error:
            raise RowValueError(f"line {self.line}: routed_experts: {error}") from error

    def _place_images(self, turns: tuple[tuple[ImageRef, ...], ...]) -> list[list[TurnImage]]:
        """Number each turn's images; those that the conversation shows too have one number."""
        places = {reference_digest(source): place for place, source in enumerate(self._images)}
        placed = []
        for turn in turns:
            here = []
            for image in turn:
                if image.digest not in places:
                    places[image.digest] = len(self._images)
                    source = f"gymrl-image:{image.digest}:data:{image.media_type};base64,"
                    self._images.append(source)
                here.append(TurnImage(places[image.digest], image.width, image.height))
            placed.append(here)
        return placed

    def _drop_lists(self) -> None:
        """Keep tokens and routes as arrays alone: as they were they take ten times the memory."""
        replace = msgspec.structs.replace
        bare: dict[str, Any] = {"token_ids": [], "logprobs": [], "routed_experts": None}
        self._parts = [replace(part, **bare) for part in self._parts]
        if self.record.trajectory is not None:
            alone = replace(self.record.trajectory, **bare, side_trajectories=())
            self.record = replace(self.record, trajectory=alone, task=msgspec.Raw(b"{}"))

    def arrays(self, sequence: int = 0) -> tuple[Int32Array, Float32Array]:
        """Token ids and log-probabilities of a sequence.

        Raises:
            RowValueError: There is no such sequence.
        """
        if not 0 <= sequence < len(self._arrays):
            raise RowValueError(f"line {self.line} has no sequence {sequence}")
        return self._arrays[sequence]

    def view(self) -> RowView:
        """The row as the page shows it."""
        record, trajectory = self.record, self.record.trajectory
        failure = record.failure
        shared: dict[str, Any] = {
            name: getattr(record, name)
            for name in (
                *("index", "task_index", "rollout_index", "route", "rollout_id", "task_digest"),
                *("benchmark", "task_id", "sampling", "failure", "metrics", "timings"),
            )
        }
        reward = None if trajectory is None else trajectory.reward
        return RowView(
            **shared,
            line=self.line,
            size=self.size,
            agent=trajectory.agent
            if trajectory is not None
            else (failure.agent if failure is not None else None) or record.route,
            reward=reward,
            total=None if reward is None else reward.total,
            ledger=[] if reward is None else ledger_lines(reward),
            incomplete_reason=None if trajectory is None else trajectory.incomplete_reason,
            mask_sample=trajectory is not None and trajectory.mask_sample,
            placeholder=trajectory is not None and trajectory.placeholder,
            truncated_prefix=trajectory is not None and trajectory.truncated_prefix,
            notes={} if trajectory is None else trajectory.notes,
            weight_versions=() if trajectory is None else trajectory.weight_versions,
            sequences=[self._sequence(place) for place in range(len(self._parts))],
            conversation=self.conversation.items,
            images=len(self._images),
        )

    def _sequence(self, place: int) -> SequenceView:
        logprobs, routes = self._arrays[place][1], self._routes[place]
        turns = self._parts[place].turns
        images = self._turn_images if place == 0 else []
        return SequenceView(
            num_tokens=len(logprobs),
            num_generated=sum(turn.end - turn.generation_start for turn in turns),
            turns=[
                _turn_view(turn, logprobs, images[number] if number < len(images) else [])
                for number, turn in enumerate(turns)
            ],
            experts=None if routes is None else (routes.shape[1], routes.shape[2]),
        )

    def tokens(
        self, start: int, end: int, sequence: int = 0, texts: TokenTexts | None = None
    ) -> TokenSpan:
        """A span of a sequence, cut to what there is.

        Raises:
            RowValueError: There is no such sequence, or the span is longer than :data:`MAX_SPAN`.
        """
        ids, logprobs = self.arrays(sequence)
        if end - start > MAX_SPAN:
            raise RowValueError(f"at most {MAX_SPAN} tokens at a time")
        start = min(max(start, 0), len(ids))
        return TokenSpan(
            start=start,
            ids=ids[start:end].tolist(),
            logprobs=logprobs[start:end].tolist(),
            texts=None if texts is None else texts.of(ids, start, min(end, len(ids))),
        )

    def experts(self, position: int, sequence: int = 0) -> list[list[int]]:
        """The experts that a token went through: for each layer those of the token, -1 unknown.

        Raises:
            RowValueError: There is no such sequence, its routes are not known, or it is shorter.
        """
        self.arrays(sequence)
        routes = self._routes[sequence]
        if routes is None or not 0 <= position < len(routes):
            raise RowValueError(f"line {self.line} has no routes of token {position}")
        return [[int(expert) for expert in layer] for layer in routes[position]]

    def image(self, number: int) -> tuple[str, bytes]:
        """The media type and the bytes of an image of the row. One call at a time.

        Raises:
            RowValueError: There is none, it is no PNG, JPEG, GIF or WebP, or it is not in the
                folder beside the file.
        """
        if not 0 <= number < len(self._images):
            raise RowValueError(f"line {self.line} has no image {number}")
        digest = reference_digest(self._images[number])
        if digest is None:
            return decode_image(self._images[number])
        data = self._folder.read([digest]).get(digest) if self._folder is not None else None
        if data is None:
            raise RowValueError(f"line {self.line}: image {digest} is not beside the file")
        return kind_of(data), data


def decode_image(source: str) -> tuple[str, bytes]:
    """Media type and bytes of base64 text, with or without ``data:...,`` before it.

    The type is what the bytes say. SVG is not shown: it may hold scripts.

    Raises:
        RowValueError: It is no base64, or of no kind that is shown.
    """
    encoded = source.partition(",")[2] if source.startswith("data:") else source
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowValueError(f"the image is no base64: {error}") from error
    return kind_of(data), data


def kind_of(data: bytes) -> str:
    """The media type that an image's bytes say.

    Raises:
        RowValueError: It is of no kind that is shown.
    """
    for magic, kind in _IMAGE_KINDS.items():
        if data.startswith(magic):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    raise RowValueError("the image is no PNG, JPEG, GIF or WebP")


def ledger_lines(reward: Reward) -> list[LedgerLine]:
    """The reward step by step, what the verifier said first."""
    lines = [LedgerLine("verifier", reward.verifier, None)]
    for entry in reward.adjustments:
        lines.append(LedgerLine(entry.rule, entry.value, entry.value - lines[-1].value))
    return lines


def first_difference(left: Int32Array, right: Int32Array) -> int | None:
    """The first position where two sequences differ; None where they are the same.

    Where one is the other's beginning, it is the end of the shorter one.
    """
    shared = min(len(left), len(right))
    different = np.flatnonzero(left[:shared] != right[:shared])
    if len(different):
        return int(different[0])
    return None if len(left) == len(right) else shared


def _turn_view(turn: Turn, logprobs: Float32Array, images: list[TurnImage]) -> TurnView:
    sampled = logprobs[turn.generation_start : turn.end]
    worst = int(np.argmin(sampled)) if len(sampled) else None
    return TurnView(
        start=turn.start,
        generation_start=turn.generation_start,
        end=turn.end,
        prompt=None if turn.prompt_text is None else Text.of(turn.prompt_text),
        generation=None if turn.generation_text is None else Text.of(turn.generation_text),
        is_invalid_tool_call=turn.is_invalid_tool_call,
        has_malformed_thinking=turn.has_malformed_thinking,
        mean_logprob=float(sampled.mean()) if len(sampled) else None,
        min_logprob=None if worst is None else float(sampled[worst]),
        min_at=None if worst is None else turn.generation_start + worst,
        images=images,
    )
