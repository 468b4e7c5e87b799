"""From the bytes of a ``/run`` answer to a trajectory. Pure: no event loop, no I/O.

An output item with token fields is a *turn*: one model call. Its ``prompt_token_ids`` must begin
with everything seen so far, or the tokens that a trainer would see are not those the model was
given; :class:`~gymrl.gym.tokens.TokenSequence` proves it turn by turn in time linear in the bytes.
No text is ever encoded to tokens here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from gymrl.config import RoutesDtype
from gymrl.errors import (
    BadLogprobsError,
    GymSchemaError,
    NoGenerationError,
    NonContiguousTokensError,
    RewardContractError,
    RolloutFailure,
)
from gymrl.gym.conduct import DEFAULT_INVALID_TOOL_CALL_PATTERNS, DEFAULT_THINKING_TAGS, flags_of
from gymrl.gym.ledger_episode import EpisodeTokens, confirmed, read_ledger
from gymrl.gym.rewards import raise_reported_failure, read_mask, read_reward
from gymrl.gym.routes import TurnRoutes, require_routes, routes_notes
from gymrl.gym.schema import (
    LENGTH_REASONS,
    DecodedAnswer,
    OutputItem,
    Response,
    decode_answer,
    is_null,
    is_turn,
    plain,
)
from gymrl.gym.splice import without_token_fields
from gymrl.gym.tokens import (
    BrokenPrefixError,
    TokenListError,
    TokenSequence,
    parse_ids,
    parse_logprobs,
)
from gymrl.types import Float32Array, Int32Array, Reward, Trajectory, Turn

if TYPE_CHECKING:
    from gymrl.config import GymConfig
    from gymrl.gym.images import ImageBins
    from gymrl.token_ledger import LedgerFrame

DecodeFunction = Callable[[list[list[int]]], list[str]]
"""Token id lists to texts, in one batch."""

PLACEHOLDER_TOKEN = 0
"""The one token of a placeholder whose prompt is unknown. No loss is ever taken on it."""


class EpisodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How answers are read; the fields of the same names in :class:`~gymrl.config.GymConfig`."""

    on_broken_prefix: Literal["error", "truncate"] = "error"
    invalid_tool_call_patterns: tuple[str, ...] = DEFAULT_INVALID_TOOL_CALL_PATTERNS
    thinking_tags: tuple[str, ...] = DEFAULT_THINKING_TAGS
    token_source: Literal["messages", "ledger", "both"] = "messages"
    require_tokens: bool = True
    side_calls: Literal["drop", "keep"] = "drop"
    require_routed_experts: bool = False
    routed_experts_dtype: RoutesDtype | None = None

    @classmethod
    def of(cls, config: GymConfig) -> EpisodeOptions:
        """The options inside a worker's configuration."""
        return cls(
            on_broken_prefix=config.on_broken_prefix,
            invalid_tool_call_patterns=config.invalid_tool_call_patterns,
            thinking_tags=config.thinking_tags,
            token_source=config.token_source,
            require_tokens=config.require_tokens,
            side_calls=config.side_calls,
            require_routed_experts=config.require_routed_experts,
            routed_experts_dtype=config.routed_experts_dtype,
        )


def read_episode(  # noqa: PLR0913 - all but the body are optional, and of this row alone
    body: bytes,
    *,
    agent: str,
    row: int | None = None,
    options: EpisodeOptions | None = None,
    decode: DecodeFunction | None = None,
    ledger: LedgerFrame | None = None,
    images: ImageBins | None = None,
) -> Trajectory:
    """Make the trajectory of one ``/run`` answer.

    Turns count from 0 over the items that were sampled; an item whose ``generation_token_ids``
    are absent, null or empty is no turn. When there is no turn at all and the response was cut by
    a token limit, a placeholder keeps the row's place (one turn with nothing sampled over the
    known prompt, or one token where the prompt is unknown).

    With ``token_source="ledger"`` the tokens come from `ledger` and the answer gives reward and
    result alone; it need not have a response then.

    Args:
        body: The body as it came.
        agent: The agent instance that answered.
        row: The row's index, for error messages.
        options: How to read; None takes the defaults.
        decode: Fills the turns' texts; called once, with every span of the trajectory. None
            leaves them out.
        ledger: What the policy server says it served; None: no call reached it. Read when
            `options.token_source` asks for it.
        images: Holds the request's images; afterwards its `turns` are those of the trajectory's
            turns, and its `served` what `ledger` says of them. None: images are not looked for.

    Raises:
        LedgerMismatchError: `options.token_source` is ``both``, and answer and ledger differ.
        GymSchemaError: The answer is not what the protocol says.
        RewardContractError: The reward is no finite number, or not the sum of its components.
        NonContiguousTokensError: A prompt does not begin with the tokens so far, and
            `options.on_broken_prefix` is ``error``.
        BadLogprobsError: Log-probabilities are absent, too few or many, null or not finite.
        NoGenerationError: Nothing was sampled, no token limit explains it, and
            `options.require_tokens` is on.
        RoutedExpertsError: Routes are malformed or too few for the call's tokens; or a turn has
            none, and `options.require_routed_experts` is set.
        MediaError: A part that says it is an image names none.
        RolloutDataFailure, RolloutInfraFailure: The environment itself reports a failure.
    """
    options = options or EpisodeOptions()
    try:
        return _trajectory(decode_answer(body), agent, options, decode, _Beside(ledger, images))
    except RolloutFailure as failure:
        raise _located(failure, agent, row) from failure.__cause__
    except RecursionError as error:
        too_deep = GymSchemaError("a field of the answer nests too deeply to be read", path="$")
        raise _located(too_deep, agent, row) from error


class _Beside(NamedTuple):
    """What is known of an attempt beside its answer."""

    ledger: LedgerFrame | None
    images: ImageBins | None


def _located(failure: RolloutFailure, agent: str, row: int | None) -> RolloutFailure:
    where = f"agent {agent!r}" if row is None else f"row {row} (agent {agent!r})"
    turn = "" if failure.turn is None else f", turn {failure.turn}"
    fields = {**failure.fields, "agent": agent, "row": row}
    return type(failure)(f"{where}{turn}: {failure.message}", **fields)


def _trajectory(
    decoded: DecodedAnswer,
    agent: str,
    options: EpisodeOptions,
    decode: DecodeFunction | None,
    beside: _Beside,
) -> Trajectory:
    answer = decoded.answer
    raise_reported_failure(answer)
    reward = _reading_nonfinite(decoded)
    mask = read_mask(answer)
    notes = dict(decoded.notes)
    if not is_null(answer.scorer_error):
        notes["scorer_error"] = 1
    response = answer.response
    incomplete = None if response is None else _incomplete_reason(response)
    made = _tokens(response, incomplete, options, beside)
    tokens, turns = made.token_ids, made.turns
    return Trajectory(
        agent=agent,
        token_ids=tokens,
        logprobs=made.logprobs,
        turns=_with_text(turns, tokens, decode) if decode else turns,
        reward=reward,
        incomplete_reason=incomplete,
        mask_sample=mask,
        placeholder=made.is_placeholder,
        truncated_prefix=made.is_truncated,
        result=decoded.body if response is None else without_token_fields(decoded.body, response),
        notes=notes | made.notes,
        side_trajectories=made.sides,
        weight_versions=made.weight_versions,
        routed_experts=made.routed_experts,
    )


def _tokens(
    response: Response | None,
    incomplete: str | None,
    options: EpisodeOptions,
    beside: _Beside,
) -> EpisodeTokens:
    if options.token_source == "ledger":
        told = read_ledger(beside.ledger, options)
        if beside.images is not None:
            beside.images.take_served(told.served, are_turns=True)
        if options.require_routed_experts:
            require_routes(told.missing_routes)
        return told if told.turns else _unanswered_in_ledger(told, incomplete)
    if response is None:
        raise GymSchemaError("response is missing or null", path="$.response")
    reader = _TurnReader(options, beside.images)
    reader.read(response.output or [])
    made = reader.made(incomplete)
    if options.token_source == "both":
        made = confirmed(made, beside.ledger, options)
        if beside.images is not None:
            beside.images.take_served(made.served, are_turns=False)
    if options.require_routed_experts:
        require_routes(made.missing_routes)
    return made


def _unanswered_in_ledger(told: EpisodeTokens, incomplete: str | None) -> EpisodeTokens:
    """A placeholder over the prompt that got no answer, where a token limit explains it."""
    prompt = told.token_ids
    if incomplete not in LENGTH_REASONS:
        raise NoGenerationError(
            "the policy server recorded no sampled token under this rollout's id: no call came "
            "under /ng-rollout/<_ng_rollout_id>/v1 (the agent must use the rollout's own base "
            "URL, or send x-gymrl-rollout-id), or none was answered",
            prompt_length=len(prompt) or None,
        )
    if not len(prompt):
        prompt = np.array([PLACEHOLDER_TOKEN], dtype=np.int32)
    turn = Turn(start=0, generation_start=len(prompt), end=len(prompt))
    return msgspec.structs.replace(
        told,
        token_ids=prompt,
        logprobs=np.zeros(len(prompt), dtype=np.float32),
        turns=(turn,),
        is_placeholder=True,
    )


def _reading_nonfinite(decoded: DecodedAnswer) -> Reward:
    try:
        return read_reward(decoded.answer)
    except RewardContractError as error:
        count = decoded.notes.get("replaced_nonfinite")
        if not count:
            raise
        raise RewardContractError(
            f"{error.message} (NaN and Infinity, of which the body has {count}, read as null)",
            **error.fields,
        ) from error


def _incomplete_reason(response: Response) -> str | None:
    details = plain(response.incomplete_details)
    reason = details.get("reason") if isinstance(details, dict) else None
    return reason if isinstance(reason, str) else None


class _TurnReader:
    """Walks the output items and collects turns."""

    def __init__(self, options: EpisodeOptions, images: ImageBins | None = None) -> None:
        self._options = options
        self._images = images
        self._sequence = TokenSequence()
        self._logprobs: list[Float32Array] = []
        self._routes = TurnRoutes(options.routed_experts_dtype)
        self.turns: list[Turn] = []
        self.truncated = False
        self.empty_generations = 0
        self._unanswered_prompt: Int32Array | None = None

    def read(self, items: list[OutputItem]) -> None:
        for item in items:
            if not is_turn(item):
                self._pass_over(item)
            elif not self._add(item):
                return
            elif self._images is not None:
                self._images.flush()

    def _pass_over(self, item: OutputItem) -> None:
        """An item that is no turn: what the environment put in, or a call without an answer."""
        if not is_null(item.generation_token_ids):
            self.empty_generations += 1
            if self._unanswered_prompt is None and not is_null(item.prompt_token_ids):
                try:
                    self._unanswered_prompt = parse_ids(bytes(item.prompt_token_ids))
                except TokenListError as error:
                    raise self._schema_error("prompt_token_ids", error) from error
                if self._images is not None:
                    self._images.mark_unanswered()
        if self._images is not None:
            self._images.add(item)

    def _add(self, item: OutputItem) -> bool:
        """Add a turn; false when the prefix broke and later turns are to be left out."""
        turn = len(self.turns)
        if is_null(item.prompt_token_ids):
            raise GymSchemaError(
                "generation_token_ids came without prompt_token_ids; the model server must "
                "return both",
                turn=turn,
                path="$.response.output",
            )
        start = self._sequence.length
        prompt, generation = bytes(item.prompt_token_ids), bytes(item.generation_token_ids)
        try:
            added, sampled = self._sequence.extend(prompt, generation)
        except BrokenPrefixError as error:
            if self._options.on_broken_prefix == "truncate":
                self.truncated = True
                return False
            raise _broken(error, turn) from error
        except TokenListError as error:
            raise self._schema_error("token ids", error) from error
        try:
            logprobs = parse_logprobs(bytes(item.generation_log_probs), sampled)
        except TokenListError as error:
            raise BadLogprobsError(
                f"generation_log_probs: {error}", turn=turn, position=error.position
            ) from error
        self._routes.add(item.routed_experts, added, sampled)
        self._logprobs += [np.zeros(added, dtype=np.float32), logprobs]
        invalid, malformed = flags_of(
            item, self._options.invalid_tool_call_patterns, self._options.thinking_tags
        )
        self.turns.append(
            Turn(
                start=start,
                generation_start=start + added,
                end=start + added + sampled,
                is_invalid_tool_call=invalid,
                has_malformed_thinking=malformed,
            )
        )
        return True

    def made(self, incomplete: str | None) -> EpisodeTokens:
        """What was read; a placeholder where nothing was sampled."""
        tokens, logprobs, turns = self.arrays(incomplete)
        routes, missing = self._routes.array(), self._routes.missing_turns
        empty = {"empty_generations": self.empty_generations} if self.empty_generations else {}
        return EpisodeTokens(
            token_ids=tokens,
            logprobs=logprobs,
            turns=turns,
            is_placeholder=not self.turns,
            is_truncated=self.truncated,
            notes={**empty, **routes_notes(routes, missing)},
            routed_experts=routes,
            missing_routes=missing,
        )

    def _schema_error(self, what: str, error: TokenListError) -> GymSchemaError:
        return GymSchemaError(f"{what}: {error}", turn=len(self.turns), path="$.response.output")

    def arrays(self, incomplete: str | None) -> tuple[Int32Array, Float32Array, tuple[Turn, ...]]:
        """Tokens, log-probabilities and turns; a placeholder's where nothing was sampled."""
        if self.turns:
            return self._sequence.array(), np.concatenate(self._logprobs), tuple(self.turns)
        prompt = self._unanswered_prompt
        known = prompt is not None and len(prompt) > 0
        if self._options.require_tokens and incomplete not in LENGTH_REASONS:
            raise _no_generation(None if prompt is None else len(prompt))
        if prompt is None or not known:
            prompt = np.array([PLACEHOLDER_TOKEN], dtype=np.int32)
        if self._images is not None:
            self._images.settle_placeholder(has_prompt=known)
        count = len(prompt)
        turn = Turn(start=0, generation_start=count, end=count)
        return prompt, np.zeros(count, dtype=np.float32), (turn,)


def _broken(error: BrokenPrefixError, turn: int) -> NonContiguousTokensError:
    return NonContiguousTokensError(
        f"the prompt does not begin with the tokens so far: at position {error.position} the "
        f"sequence has {error.expected} and the prompt {error.received}. The agent or the chat "
        "template rewrote history, or text was tokenised again; on_broken_prefix='truncate' "
        "keeps the turns before",
        turn=turn,
        position=error.position,
        expected=error.expected,
        received=error.received,
    )


def _no_generation(prompt_length: int | None) -> NoGenerationError:
    prompt = "unknown" if prompt_length is None else f"{prompt_length} tokens"
    return NoGenerationError(
        f"no output item holds sampled tokens (prompt length: {prompt}). Either the prompt left "
        "no room in the model's context (raise the context length, or shorten the row), or the "
        "model server returned no token ids (a Gym model server needs "
        "return_token_id_information: true, and the agent must pass the fields on)",
        prompt_length=prompt_length,
    )


def _with_text(
    turns: tuple[Turn, ...], tokens: Int32Array, decode: DecodeFunction
) -> tuple[Turn, ...]:
    spans = [
        tokens[start:end].tolist()
        for turn in turns
        for start, end in ((turn.start, turn.generation_start), (turn.generation_start, turn.end))
    ]
    texts = decode(spans)
    return tuple(
        msgspec.structs.replace(turn, prompt_text=prompt, generation_text=generation)
        for turn, prompt, generation in zip(turns, texts[::2], texts[1::2], strict=True)
    )
