"""What a plan and the run's options make the rollout engine do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gymrl.benchmark.installed_gym import GYM_PYTHON_VARIABLE, find_gym
from gymrl.benchmark.keys import with_keys
from gymrl.benchmark.roots import search_roots
from gymrl.benchmark.settings import environment_file
from gymrl.config import GenerationConfig, GymConfig, RolloutConfig, VllmConfig
from gymrl.errors import ConfigError
from gymrl.evaluation.planning import with_fingerprint
from gymrl.evaluation.settings import check_policy
from gymrl.generation.models import resolve_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gymrl.evaluation.plan import EvaluationPlan
    from gymrl.evaluation.settings import PolicySettings, RunOptions

DEFAULT_MODEL_NAME = "policy"


def completed_plan(plan: EvaluationPlan, options: RunOptions) -> EvaluationPlan:
    """The plan with its policy named, ready to run; blocks while a model directory is looked at.

    Raises:
        ConfigError: There is no policy, or two; servers' model is not named; or the model
            directory is not the one that was planned with.
    """
    policy = plan.settings.policy
    check_policy(policy, options)
    if policy.model is None and options.base_urls and policy.name is None:
        raise ConfigError(
            "base_urls names servers, but not what to ask them for: set the policy's name",
            setting="name",
        )
    settings = with_fingerprint(plan.settings)
    found = settings.policy.weights
    if policy.weights is not None and found not in (None, policy.weights):
        raise ConfigError(
            f"the model at {policy.model!r} is not the one that was planned with: its weights were "
            f"{policy.weights}, now {found}; make a new plan, or put the model back",
            setting="model",
        )
    return plan if settings == plan.settings else plan.with_settings(settings)


def with_gym(plan: EvaluationPlan, options: RunOptions) -> RunOptions:
    """The options with the interpreter for servers of NeMo Gym's, None where the run starts none.

    Blocks while an interpreter is asked.

    Raises:
        ConfigError: There is no NeMo Gym, or another one than the plan was made with.
    """
    gyms = [each for each in plan.benchmarks if each.gym_version is not None]
    if not gyms or options.registry_url is not None:
        return msgspec.structs.replace(options, gym_python=None)
    found = find_gym(options.gym_python)
    if found is None:
        raise ConfigError(
            f"benchmark {gyms[0].label!r} is graded by servers of NeMo Gym's own: name the "
            f"interpreter that has it (gym_python, or {GYM_PYTHON_VARIABLE}), or the registry of such "
            "servers that run (registry_url)",
            setting="gym_python",
        )
    for benchmark in gyms:
        if benchmark.gym_version != found.version:
            raise ConfigError(
                f"benchmark {benchmark.label!r} was planned with NeMo Gym {benchmark.gym_version}, and "
                f"{found.python} has {found.version}: name an interpreter with the former, or make a "
                "new plan",
                setting="gym_python",
            )
    return msgspec.structs.replace(options, gym_python=found.python)


def engine_config(
    plan: EvaluationPlan, options: RunOptions, servers: Mapping[str, Any]
) -> RolloutConfig:
    """The engine's configuration; fetches a shipped model the first time.

    A conversation whose history the chat template rewrites is scored all the same: its tokens are
    recorded up to there. So is one of a server that returns no token ids, without tokens.

    Raises:
        ConfigError: A setting cannot work, or a key that servers need is not there.
    """
    policy = plan.settings.policy
    name = policy.name or DEFAULT_MODEL_NAME
    generation = _generation(policy, options, name)
    tokenizer = options.tokenizer
    if tokenizer is None and policy.model is not None:
        directory = resolve_model(policy.model)
        tokenizer = directory if Path(directory, "tokenizer.json").is_file() else None
    if options.registry_url:
        servers = {}
    elif options.gym_python is None:  # where there is one, NeMo Gym looks the keys up
        servers = with_keys(servers, environment_file(search_roots(options.gym_roots)))
    gym = GymConfig(
        servers=dict(servers),
        gym_python=options.gym_python,
        gym_roots=options.gym_roots,
        registry_url=options.registry_url,
        base_urls=options.base_urls,
        model_name=name,
        tokenizer=tokenizer,
        on_broken_prefix="truncate",
        require_tokens=False,
        row_timeout_s=options.row_timeout_s,
        spinup_timeout_s=options.start_timeout_s,
    )
    return RolloutConfig(
        generation=generation,
        gym=gym,
        num_workers=options.workers,
        in_process=options.in_process,
        failure_policy="mask",
        start_timeout_s=options.start_timeout_s,
    )


def _generation(policy: PolicySettings, options: RunOptions, name: str) -> GenerationConfig | None:
    if policy.model is None:
        return None
    generation = GenerationConfig(
        model=policy.model,
        backend=policy.backend,
        vllm=msgspec.structs.replace(VllmConfig(), engine_args=policy.engine_args),
        served_model_name=name,
        dtype=policy.dtype,
        max_model_len=policy.max_model_len,
        num_threads=options.num_threads,
        on_rewrite="segment",
    )
    if options.batch_size is None:
        return generation
    return msgspec.structs.replace(generation, max_batch_size=options.batch_size)
