"""Single steps of native rollouts under NeMo RL's names: generate for a batch, score a batch.

For loops of one's own; :mod:`gymrl.compat.nemo_rl.native` has whole rollouts.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gymrl.compat.nemo_rl.message_media import (
    VLLM_MEDIA_KEYS,
    PackedTensor,
    add_multimodal_generation_payload,
)
from gymrl.compat.nemo_rl.routed_experts import (
    add_r3_fallback_metrics,
    attach_routed_experts_to_message_log_prefix,
)
from gymrl.concurrency import closing_stream, gather_bounded, refuse_running_loop
from gymrl.environments.base import EnvironmentReturn
from gymrl.environments.local import open_environment
from gymrl.errors import (
    ContextOverflowError,
    EnvironmentContractError,
    GenerationError,
    RowValueError,
    UnsupportedOptionError,
)
from gymrl.numbers import reward_number
from gymrl.routed_experts import MISSING

if TYPE_CHECKING:
    from gymrl.compat.nemo_rl.settings import TokenizerType

Responses = tuple[Any, list[torch.Tensor], dict[str, Any]]


def generate_responses(
    policy_generation: Any,
    generation_input_data: Mapping[str, Any],
    batch: MutableMapping[str, Any],
    tokenizer: TokenizerType,
    input_lengths: torch.Tensor,
    include_logprobs: bool = True,
    greedy: bool = False,
) -> Responses:
    """Generate for every sample and append the answers to its message log, in place. Blocks.

    Args:
        policy_generation: Anything with the batch face of
            :class:`gymrl.generation.batch.BatchGenerator`: ``generate(data, greedy=...)``.
        generation_input_data: ``input_ids`` and ``input_lengths``, and media where the samples have
            any (:func:`~gymrl.compat.nemo_rl.message_media.add_multimodal_generation_payload`); not
            changed.
        batch: Its ``message_log`` gets one ``assistant`` message a sample: ``content``,
            ``token_ids`` and ``generation_logprobs``. Its ``stop_strings`` are used where it has
            them. Where the policy returns routes, every message gets those of this call,
            ``routed_experts``.
        tokenizer: Decodes.
        input_lengths: Tokens of each prompt, ``[B]``.
        include_logprobs: Give messages their log-probabilities.
        greedy: Take the likeliest token always.

    Returns:
        `batch` itself; the sampled ids of each sample; and ``mean_generation_length``,
        ``total_generated_tokens`` and, where the policy tells, ``_response_truncated`` (bool
        ``[B]``: the token limit ended it) and ``r3/...``
        (:func:`~gymrl.compat.nemo_rl.routed_experts.add_r3_fallback_metrics`).

    Raises:
        GenerationError: The answer does not fit the batch. Nothing was appended.
        GymrlError: What the policy raises.
    """
    data = _with_stop_strings(generation_input_data, batch, len(input_lengths))
    outputs = policy_generation.generate(data, greedy=greedy)
    return _appended(outputs, batch, tokenizer, input_lengths, include_logprobs)


async def generate_responses_async(
    policy_generation: Any,
    generation_input_data: Mapping[str, Any],
    batch: MutableMapping[str, Any],
    tokenizer: TokenizerType,
    input_lengths: torch.Tensor,
    include_logprobs: bool = True,
    greedy: bool = False,
) -> Responses:
    """As :func:`generate_responses`, through the policy's ``generate_async``.

    Cancelling it closes the policy's stream, which aborts what runs; nothing was appended then.

    Args:
        policy_generation: Has ``generate_async(data, greedy=...)``, which yields each sample's
            place and its answer as a batch of one.
        generation_input_data: As there, like all that is not named here.
        batch: As there.
        tokenizer: As there.
        input_lengths: As there.
        include_logprobs: As there.
        greedy: As there.

    Raises:
        UnsupportedOptionError: The policy has no ``generate_async``.
        GenerationError: A sample did not come, or came twice.
        GymrlError: As there.
    """
    if not hasattr(policy_generation, "generate_async"):
        raise UnsupportedOptionError(
            f"{type(policy_generation).__name__} has no generate_async; use generate_responses",
            setting="policy_generation",
        )
    count = len(input_lengths)
    data = _with_stop_strings(generation_input_data, batch, count)
    found: dict[int, Mapping[str, Any]] = {}
    async with closing_stream(policy_generation.generate_async(data, greedy=greedy)) as answers:
        async for sample, output in answers:
            if not 0 <= sample < count or sample in found:
                raise GenerationError(
                    f"the policy's stream gave sample {sample} "
                    f"{'twice' if sample in found else f'of a batch of {count}'}"
                )
            found[sample] = output
    if len(found) != count:
        missing = sorted(set(range(count)) - set(found))
        raise GenerationError(f"the policy's stream ended without the samples {missing}")
    outputs = _joined([found[sample] for sample in range(count)])
    return _appended(outputs, batch, tokenizer, input_lengths, include_logprobs)


async def async_generate_response_for_sample_turn(
    policy_generation: Any,
    sample_message_log: list[dict[str, Any]],
    sample_stop_strings: list[str] | None,
    tokenizer: TokenizerType,
    max_seq_len: int,
    greedy: bool = False,
    *,
    sample_multimodal_data: dict[str, Any] | None = None,
    deduplicate_multimodal_data: bool = False,
) -> tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor, dict[str, Any]]:
    """One answer of one sample, appended to its message log in place.

    Args:
        policy_generation: As for :func:`generate_responses_async`.
        sample_message_log: Messages with ``token_ids``.
        sample_stop_strings: Texts that end the generation.
        tokenizer: Decodes.
        max_seq_len: Tokens of the sample. A :class:`gymrl.generation.batch.BatchGenerator` samples
            no more than what this leaves; another policy has its own limit.
        greedy: Take the likeliest token always.
        sample_multimodal_data: The sample's vLLM-ready media (``vllm_images``, ``vllm_content``,
            ...), sent to the policy.
        deduplicate_multimodal_data: Leave the policy-ready media of the message log out, where the
            policy's backend is vLLM and the sample has vLLM-ready ones.

    Returns:
        The message log itself, the sampled ids, the prompt's length ``[1]``, and metrics as
        :func:`generate_responses` has them.

    Raises:
        ContextOverflowError: The conversation leaves no room for a token.
        UnsupportedOptionError: `sample_multimodal_data` has a name that is no vLLM-ready medium's,
            or the policy has no ``generate_async``.
        GymrlError: As :func:`generate_responses_async`.
    """
    input_ids = torch.cat([torch.as_tensor(message["token_ids"]) for message in sample_message_log])
    room = max_seq_len - len(input_ids)
    if room <= 0:
        raise ContextOverflowError(
            f"the conversation of {len(input_ids)} tokens leaves no room to generate within "
            f"max_seq_len={max_seq_len}; end the sample, or raise max_seq_len",
            prompt_tokens=len(input_ids),
            max_model_len=max_seq_len,
        )
    input_lengths = torch.tensor([len(input_ids)])
    data = {
        "input_ids": input_ids.unsqueeze(0),
        "input_lengths": input_lengths,
        "max_new_tokens": [room],
    }
    add_multimodal_generation_payload(
        data,
        _policy_ready(sample_message_log),
        _vllm_ready(sample_multimodal_data),
        policy_generation,
        deduplicate_multimodal_data=deduplicate_multimodal_data,
    )
    batch, generated_ids, metrics = await generate_responses_async(
        policy_generation,
        data,
        {"message_log": [sample_message_log], "stop_strings": [sample_stop_strings]},
        tokenizer,
        input_lengths,
        greedy=greedy,
    )
    return batch["message_log"][0], generated_ids[0], input_lengths, metrics


def _vllm_ready(media: Mapping[str, Any] | None) -> dict[str, list[Any]]:
    """A sample's media as columns of a batch of one."""
    unknown = sorted(set(media or {}) - set(VLLM_MEDIA_KEYS))
    if unknown:
        raise UnsupportedOptionError(
            f"sample_multimodal_data has {', '.join(unknown)}; it takes "
            f"{', '.join(VLLM_MEDIA_KEYS)}",
            setting="sample_multimodal_data",
        )
    return {name: [value] for name, value in (media or {}).items()}


def _policy_ready(log: Sequence[Mapping[str, Any]]) -> dict[str, PackedTensor]:
    """The policy-ready media of all messages, one after the other."""
    found: dict[str, list[PackedTensor]] = {}
    for message in log:
        for name, value in message.items():
            if isinstance(value, PackedTensor):
                found.setdefault(name, []).append(value)
    return {name: PackedTensor.concat(parts) for name, parts in found.items()}


def calculate_rewards(
    batch: Mapping[str, Any], task_to_env: Mapping[str, Any]
) -> EnvironmentReturn:
    """One step of every sample's environment, all environments at once. Blocks.

    Where an event loop runs, call it in a thread (``asyncio.to_thread``). An environment in worker
    processes belongs to the loop that started it and can't be stepped from here.

    Args:
        batch: ``message_log``, ``task_name``, and where it is there ``extra_env_info``; not
            changed. Environments see each message's ``role`` and ``content``.
        task_to_env: Environments by task name, blocking ones or async ones.

    Returns:
        In the order of the batch. ``rewards`` is float32 ``[B]``, or ``[B, K]`` where the
        environments give K named components; ``terminateds`` is bool ``[B]``.

    Raises:
        RuntimeError: An event loop runs in this thread.
        RowValueError: A task has no environment, or the columns differ in length.
        RewardContractError: A reward is no finite number, with its sample.
        EnvironmentContractError: An environment's answer is not what the protocol says, or some
            samples have components and others not, or other ones.
        Exception: What an environment raised.
    """
    refuse_running_loop("asyncio.to_thread(calculate_rewards, ...)")
    logs, names = list(batch["message_log"]), list(batch["task_name"])
    given = batch.get("extra_env_info")
    metadata = [None] * len(logs) if given is None else list(given)
    if not len(logs) == len(names) == len(metadata):
        raise RowValueError(
            f"the batch has {len(logs)} message logs, {len(names)} task names and "
            f"{len(metadata)} entries of extra_env_info"
        )
    places: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if name not in task_to_env:
            raise RowValueError(
                f"row {row}: there is no environment for task {name!r}; there are "
                f"{sorted(task_to_env)}",
                row=row,
            )
        places.setdefault(name, []).append(row)

    async def step(name: str) -> EnvironmentReturn:
        environment = open_environment(task_to_env[name], name=name)
        return await environment.step(
            [_plain_log(logs[row]) for row in places[name]], [metadata[row] for row in places[name]]
        )

    async def steps() -> list[EnvironmentReturn]:
        return await gather_bounded(step, places)

    return _in_order(asyncio.run(steps()), list(places.values()), len(logs))


def _plain_log(log: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": message["content"]} for message in log]


def _in_order(
    answers: Sequence[EnvironmentReturn], places: Sequence[Sequence[int]], count: int
) -> EnvironmentReturn:
    def column(name: str) -> list[Any]:
        values: list[Any] = [None] * count
        for answer, rows in zip(answers, places, strict=True):
            for row, value in zip(rows, getattr(answer, name) or [None] * len(rows), strict=True):
                values[row] = value
        return values

    return EnvironmentReturn(
        observations=column("observations"),
        metadata=column("metadata"),
        next_stop_strings=column("next_stop_strings"),
        rewards=_reward_tensor(column("rewards")),
        terminateds=torch.tensor(column("terminateds"), dtype=torch.bool),
        answers=column("answers"),
    )


def _reward_tensor(rewards: list[Any]) -> torch.Tensor:
    kinds = {frozenset(reward) if isinstance(reward, dict) else None for reward in rewards}
    if len(kinds) > 1:
        raise EnvironmentContractError(
            "the samples' rewards differ in kind: some have no components, or other ones; score "
            "such tasks in batches of their own"
        )
    components = list(rewards[0]) if rewards and isinstance(rewards[0], dict) else None
    if components is None:
        values: list[Any] = [
            reward_number(reward, f"row {row}: reward") for row, reward in enumerate(rewards)
        ]
    else:
        values = [
            [reward_number(reward[name], f"row {row}: reward/{name}") for name in components]
            for row, reward in enumerate(rewards)
        ]
    return torch.tensor(values, dtype=torch.float32)


def _with_stop_strings(data: Mapping[str, Any], batch: Mapping[str, Any], count: int) -> Any:
    """A copy, of the same type, with the batch's stop texts."""
    copied: Any = copy.copy(data)
    stops = batch.get("stop_strings")
    if stops is not None:
        copied["stop_strings"] = stops
    elif copied.get("stop_strings") is None:
        copied["stop_strings"] = [None] * count
    return copied


def _joined(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Batches of one as one batch; rows are as long as they are, padding is not looked at."""
    joined: dict[str, Any] = {
        name: [output[name][0] for output in outputs]
        for name in ("output_ids", "logprobs")
        if all(name in output for output in outputs)
    }
    for name in ("generation_lengths", "unpadded_sequence_lengths", "truncated"):
        if outputs and all(output.get(name) is not None for output in outputs):
            joined[name] = torch.cat([torch.as_tensor(output[name]) for output in outputs])
    return joined | _joined_routes(outputs)


_ROUTE_COUNTS = tuple(
    f"r3_routed_experts_{name}_routes" for name in ("expected", "missing", "actual")
)


def _joined_routes(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Routes of batches of one; a sample that came without them has none of those it should."""
    known = [output["routed_experts"] for output in outputs if "routed_experts" in output]
    if not known:
        return {}
    routes: list[torch.Tensor] = []
    counts: dict[str, list[int]] = {name: [] for name in _ROUTE_COUNTS}
    for output in outputs:
        total = int(output["unpadded_sequence_lengths"][0])
        if "routed_experts" in output:
            routes.append(output["routed_experts"][0])
        else:
            routes.append(known[0].new_full((total, *known[0].shape[2:]), MISSING))
        absent = (max(total - 1, 0), max(total - 1, 0), 0)
        for name, count in zip(_ROUTE_COUNTS, absent, strict=True):
            counts[name].append(int(output[name][0]) if name in output else count)
    return {"routed_experts": routes} | {n: torch.tensor(c) for n, c in counts.items()}


def _appended(
    outputs: Mapping[str, Any],
    batch: MutableMapping[str, Any],
    tokenizer: TokenizerType,
    input_lengths: torch.Tensor,
    include_logprobs: bool,
) -> Responses:
    logs = batch["message_log"]
    totals = [int(total) for total in outputs["unpadded_sequence_lengths"]]
    starts = [int(length) for length in input_lengths]
    if not len(logs) == len(totals) == len(starts):
        raise GenerationError(
            f"the policy answered {len(totals)} samples of {len(logs)} message logs and "
            f"{len(starts)} prompts"
        )
    for sample, (start, end) in enumerate(zip(starts, totals, strict=True)):
        if not start <= end <= len(outputs["output_ids"][sample]):
            raise GenerationError(
                f"sample {sample} of the batch: the policy says {end} tokens in all, for a prompt "
                f"of {start} and {len(outputs['output_ids'][sample])} ids"
            )
    generated_ids = [
        outputs["output_ids"][sample][start:end]
        for sample, (start, end) in enumerate(zip(starts, totals, strict=True))
    ]
    messages: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "content": tokenizer.decode(ids.tolist(), skip_special_tokens=True),
            "token_ids": ids,
        }
        for ids in generated_ids
    ]
    if include_logprobs and outputs.get("logprobs") is not None:
        for sample, message in enumerate(messages):
            own = outputs["logprobs"][sample][starts[sample] : totals[sample]]
            message["generation_logprobs"] = own
    if outputs.get("routed_experts") is not None:
        for sample, (log, message) in enumerate(zip(logs, messages, strict=True)):
            routes = outputs["routed_experts"][sample][: totals[sample]]
            _attach_routes(sample, log, message, routes)
    for log, message in zip(logs, messages, strict=True):
        log.append(message)
    return batch, generated_ids, _metrics(outputs, generated_ids)


def _attach_routes(
    sample: int, log: Sequence[MutableMapping[str, Any]], message: dict[str, Any], routes: Any
) -> None:
    start = attach_routed_experts_to_message_log_prefix(log, routes)
    sampled = len(message["token_ids"])
    if start + sampled != len(routes):
        raise GenerationError(
            f"sample {sample} of the batch: {len(routes)} rows of routes for {start} tokens of the "
            f"message log and {sampled} sampled ones"
        )
    message["routed_experts"] = routes[start:]


def _metrics(outputs: Mapping[str, Any], generated_ids: Sequence[torch.Tensor]) -> dict[str, Any]:
    lengths = [len(ids) for ids in generated_ids]
    metrics: dict[str, Any] = {
        "mean_generation_length": sum(lengths) / len(lengths) if lengths else 0.0,
        "total_generated_tokens": sum(lengths),
    }
    if outputs.get("truncated") is not None:
        metrics["_response_truncated"] = torch.as_tensor(outputs["truncated"])
    add_r3_fallback_metrics(metrics, outputs)
    return metrics
