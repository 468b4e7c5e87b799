"""Rollouts through Gym under NeMo RL's names, over :class:`gymrl.rollout.engine.RolloutEngine`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from gymrl.compat.nemo_rl.environment import NemoGym
from gymrl.compat.nemo_rl.media import share_initial_media
from gymrl.compat.nemo_rl.results import (
    NemoGymRolloutResult,
    gym_result,
    pad_token_of,
)
from gymrl.compat.nemo_rl.rewards import encode_with, penalty_config
from gymrl.compat.nemo_rl.settings import (
    effort_config as effort_block,
)
from gymrl.compat.nemo_rl.settings import (
    model_limit,
    plain_mapping,
    sampling_of,
)
from gymrl.concurrency import closing_stream, refuse_running_loop, stream_across
from gymrl.errors import ConfigError, RowTypeError, RowValueError
from gymrl.rollout.prepare import GroupSizes, refuse_unsupported
from gymrl.scoring import LengthPenaltyConfig, ScoringConfig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from gymrl.compat.nemo_rl.settings import TokenizerType
    from gymrl.rollout.engine import RolloutStream

logger = logging.getLogger(__name__)

_warned_limits: set[tuple[int, int]] = set()


async def run_async_nemo_gym_rollout(
    policy_generation: Any,
    input_batch: Mapping[str, Any],
    tokenizer: TokenizerType,
    task_to_env: Mapping[str, Any],
    generation_config: Any,
    num_generations: int,
    log_full_result_tables: bool,
    max_seq_len: int | None = None,
    max_rollout_turns: int | None = None,
    greedy: bool = False,
    effort_config: Any = None,
    reward_penalty_config: Any = None,
    length_penalty_config: Any = None,
    thinking_tags: list[str] | tuple[str, ...] | None = None,
    mask_env_flagged_samples: bool = True,
    returns_entire_batch: bool = False,
    routing_group_size: int | None = None,
    sampling_params: Any = None,
    deduplicate_multimodal_data: bool = False,
    debug_payload_metrics: bool = False,
    identity_num_generations: int | None = None,
) -> AsyncGenerator[NemoGymRolloutResult, None]:
    """Prompt groups in the order of their completion, each with its rows in input order.

    The input batch and its rows are not changed. Leaving early (``aclose``, or cancellation of the
    consumer) ends what is in flight.

    Args:
        policy_generation: Says the model's context (see :func:`.settings.model_limit`); nothing
            is generated through it, agents call the policy over HTTP.
        input_batch: Its ``extra_env_info`` are the rows, groups contiguous; ``loss_multiplier``
            is carried on.
        tokenizer: Pads, and counts and finds tokens for scoring.
        task_to_env: Its ``nemo_gym`` is a :class:`NemoGym` that is spun up.
        generation_config: The sampling of the train profile.
        num_generations: Rows of one yielded group.
        log_full_result_tables: Keep whole results in the metrics.
        max_seq_len: The policy's limit; one above the model's context is warned of once.
        max_rollout_turns: Must be None: the agent has the limit.
        greedy: Must be False.
        effort_config: Length shaping of low-effort prompts.
        reward_penalty_config: Faults that take the reward away.
        length_penalty_config: Rules on length within a prompt's rows.
        thinking_tags: For the penalties, where their block names none.
        mask_env_flagged_samples: Carry ``mask_sample``.
        returns_entire_batch: The batch is one group, whatever prompts and agents it mixes.
        routing_group_size: Rows that stay on one worker; None: as `num_generations`.
        sampling_params: A profile to use instead of the train profile's temperature and top-p.
        deduplicate_multimodal_data: Prompts whose first user message in the input batch has media
            already (:func:`.media.attach_initial_nemo_gym_image_payloads`) keep these objects in
            their results. Between processes each image crosses once for a group in any case.
        debug_payload_metrics: The last result's metrics have ``media_payload/<count>``; see
            :class:`gymrl.media.MediaPayload`.
        identity_num_generations: Rows that are one prompt; None: as `num_generations`.

    Yields:
        One result a group; the last one has the timings.

    Raises:
        UnsupportedOptionError: An option that this road does not have; an `AssertionError` and a
            `ValueError`.
        RowTypeError: A row is no dictionary with ``responses_create_params``; a `TypeError`.
        RowValueError: Sizes that do not fit, a row that can't be served; a `ValueError`.
        ConfigError: A block is wrong, or there is no :class:`NemoGym`.
        RolloutStreamError: A row failed for good, or the stream broke its rules; a
            `RuntimeError`.
    """
    environment = _environment(task_to_env)
    sampling = sampling_of(generation_config, sampling_params)
    refuse_unsupported(sampling, greedy=greedy, max_rollout_turns=max_rollout_turns)
    rows = _rows(input_batch)
    limit = model_limit(policy_generation)
    _warn_of_limit(max_seq_len, limit)
    sizes = GroupSizes(
        group=num_generations,
        routing=routing_group_size,
        identity=identity_num_generations,
        returns_entire_batch=returns_entire_batch,
    )
    scoring = ScoringConfig(
        effort=effort_block(effort_config),
        penalties=penalty_config(reward_penalty_config, thinking_tags),
        length_penalty=_length_penalty(length_penalty_config),
        should_mask_flagged_samples=mask_env_flagged_samples,
    )
    pad_token_id = pad_token_of(tokenizer)
    engine = environment.engine_for(scoring, encode_with(tokenizer), limit, tokenizer)
    images = environment.images_for(tokenizer)
    started: list[RolloutStream] = []

    def start() -> RolloutStream:
        started.append(engine.stream_repeated(rows, sizes, sampling=sampling))
        return started[-1]

    async with closing_stream(stream_across(environment.portal, start)) as groups:
        async for group in groups:
            result = gym_result(
                group,
                input_batch,
                pad_token_id=pad_token_id,
                max_total_tokens=limit,
                has_length_penalty=scoring.length_penalty is not None,
                mask_env_flagged_samples=mask_env_flagged_samples,
                log_full_result_tables=log_full_result_tables,
                images=images,
            )
            if deduplicate_multimodal_data:
                share_initial_media(group, result.final_batch["message_log"], input_batch)
            if debug_payload_metrics and group.timings is not None:
                result.rollout_metrics.update(started[0].progress.media.metrics())
            yield result


def run_nemo_gym_rollout_sync(
    policy_generation: Any,
    input_batch: Mapping[str, Any],
    tokenizer: TokenizerType,
    task_to_env: Mapping[str, Any],
    generation_config: Any,
    log_full_result_tables: bool,
    *,
    num_generations_per_prompt: int,
    max_seq_len: int | None = None,
    max_rollout_turns: int | None = None,
    greedy: bool = False,
    effort_config: Any = None,
    reward_penalty_config: Any = None,
    length_penalty_config: Any = None,
    thinking_tags: list[str] | tuple[str, ...] | None = None,
    sampling_params: Any = None,
    mask_env_flagged_samples: bool = True,
    deduplicate_multimodal_data: bool = False,
    debug_payload_metrics: bool = False,
) -> NemoGymRolloutResult:
    """The whole batch as one result, in input order; see :func:`run_async_nemo_gym_rollout`.

    Args:
        policy_generation: As there, like all that is not named here.
        input_batch: May mix prompts and agents.
        tokenizer: As there.
        task_to_env: As there.
        generation_config: As there.
        log_full_result_tables: As there.
        num_generations_per_prompt: Contiguous rows of one prompt: they stay on one worker, and
            scoring compares them with each other.
        max_seq_len: As there.
        max_rollout_turns: As there.
        greedy: As there.
        effort_config: As there.
        reward_penalty_config: As there.
        length_penalty_config: As there.
        thinking_tags: As there.
        sampling_params: As there.
        mask_env_flagged_samples: As there.
        deduplicate_multimodal_data: As there.
        debug_payload_metrics: As there.

    Raises:
        RuntimeError: An event loop runs in this thread.
        GymrlError: As there.
    """
    refuse_running_loop("run_async_nemo_gym_rollout")
    num_rows = len(_rows(input_batch))
    results = run_async_nemo_gym_rollout(
        policy_generation,
        input_batch,
        tokenizer,
        task_to_env,
        generation_config,
        num_rows,
        log_full_result_tables,
        max_seq_len=max_seq_len,
        max_rollout_turns=max_rollout_turns,
        greedy=greedy,
        effort_config=effort_config,
        reward_penalty_config=reward_penalty_config,
        length_penalty_config=length_penalty_config,
        thinking_tags=thinking_tags,
        mask_env_flagged_samples=mask_env_flagged_samples,
        returns_entire_batch=True,
        routing_group_size=num_generations_per_prompt,
        sampling_params=sampling_params,
        deduplicate_multimodal_data=deduplicate_multimodal_data,
        debug_payload_metrics=debug_payload_metrics,
        identity_num_generations=num_generations_per_prompt,
    )
    return asyncio.run(_only(results))


async def _only(
    results: AsyncGenerator[NemoGymRolloutResult, None],
) -> NemoGymRolloutResult:
    async with closing_stream(results) as found:
        (result,) = [result async for result in found]
    return result


def _environment(task_to_env: Mapping[str, Any]) -> NemoGym:
    environment = task_to_env.get("nemo_gym")
    if not isinstance(environment, NemoGym):
        raise ConfigError(
            f"task_to_env['nemo_gym'] is a {type(environment).__name__}; "
            "give the NemoGym that spinup_nemo_gym_actor returns",
            setting="task_to_env",
        )
    return environment


def _rows(input_batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = input_batch.get("extra_env_info")
    if rows is None:
        raise RowTypeError("the input batch has no extra_env_info, where Gym's rows are")
    rows = list(rows)
    logs = input_batch.get("message_log")
    if logs is not None and len(logs) != len(rows):
        raise RowValueError(
            f"the input batch has {len(logs)} message logs for {len(rows)} rows in extra_env_info"
        )
    return rows


def _length_penalty(block: Any) -> LengthPenaltyConfig | None:
    if block is None or isinstance(block, LengthPenaltyConfig):
        return block
    return LengthPenaltyConfig.from_dict(plain_mapping(block, "length_penalty_config"))


def _warn_of_limit(max_seq_len: int | None, limit: int | None) -> None:
    if max_seq_len is None or limit is None or max_seq_len <= limit:
        return
    if (max_seq_len, limit) in _warned_limits:
        return
    _warned_limits.add((max_seq_len, limit))
    logger.warning(
        "max_seq_len=%d is above the model's context of %d tokens; the context will end "
        "rollouts first",
        max_seq_len,
        limit,
    )
