"""NeMo RL's names for rollouts through Gym, and for native ones.

Import from here what was imported from ``nemo_rl.environments.nemo_gym`` and
``nemo_rl.experience.rollouts``; ``docs/from-nemo-rl.md`` has every name of the two, what stands
for it here, and what differs. There is no Ray: an environment is an object, not an actor's handle,
and errors are of :mod:`gymrl.errors`, each of them also of the type that NeMo RL documents.

::

    environment = spinup_nemo_gym_actor(config["env"], base_urls, "policy", tokenizer=tokenizer,
        enable_router_replay=False, routed_experts_dtype="int16", use_fastokens=False)
    result = run_nemo_gym_rollout_sync(policy, batch, tokenizer, {"nemo_gym": environment},
        config["policy"]["generation"], False, num_generations_per_prompt=8)
"""

from gymrl.extras import optional_imports

with optional_imports():
    from gymrl.compat.nemo_rl.environment import NemoGym, spinup_nemo_gym_actor
    from gymrl.compat.nemo_rl.generation import (
        async_generate_response_for_sample_turn,
        calculate_rewards,
        generate_responses,
        generate_responses_async,
    )
    from gymrl.compat.nemo_rl.media import (
        attach_initial_nemo_gym_image_payloads,
        get_pad_dynamic_image_shapes,
    )
    from gymrl.compat.nemo_rl.message_media import PackedTensor, attach_static_multimodal_payload
    from gymrl.compat.nemo_rl.native import (
        run_async_multi_turn_rollout,
        run_async_multi_turn_rollout_groups,
        run_multi_turn_rollout,
        run_sample_multi_turn_rollout,
    )
    from gymrl.compat.nemo_rl.results import NemoGymRolloutResult, RolloutGroupResult
    from gymrl.compat.nemo_rl.rewards import (
        apply_reward_penalties,
        build_reward_component_columns,
        compute_reward_penalty_metrics,
        extract_reward_components,
        nemo_gym_rollout_hit_max_tokens,
        resolve_reward_penalty_config,
        validate_reward_components_match_scalar,
    )
    from gymrl.compat.nemo_rl.rollouts import run_async_nemo_gym_rollout, run_nemo_gym_rollout_sync
    from gymrl.compat.nemo_rl.routed_experts import backfill_missing_routed_experts
    from gymrl.compat.nemo_rl.settings import (
        DEFAULT_INVALID_TOOL_CALL_PATTERNS,
        DEFAULT_THINKING_TAGS,
        EffortLevelsConfig,
        NemoGymCompatibleConfig,
        NemoGymConfig,
        TokenizerType,
        get_effort_config,
        get_nemo_gym_thinking_tags,
        get_nemo_gym_uv_cache_dir,
        get_nemo_gym_venv_dir,
        setup_nemo_gym_config,
        should_mask_flagged_samples,
        should_use_nemo_gym,
    )
    from gymrl.generation.batch_spec import (
        GenerationDatumSpec,
        GenerationOutputSpec,
        verify_right_padding,
    )

__all__ = [
    "DEFAULT_INVALID_TOOL_CALL_PATTERNS",
    "DEFAULT_THINKING_TAGS",
    "EffortLevelsConfig",
    "GenerationDatumSpec",
    "GenerationOutputSpec",
    "NemoGym",
    "NemoGymCompatibleConfig",
    "NemoGymConfig",
    "NemoGymRolloutResult",
    "PackedTensor",
    "RolloutGroupResult",
    "TokenizerType",
    "apply_reward_penalties",
    "async_generate_response_for_sample_turn",
    "attach_initial_nemo_gym_image_payloads",
    "attach_static_multimodal_payload",
    "backfill_missing_routed_experts",
    "build_reward_component_columns",
    "calculate_rewards",
    "compute_reward_penalty_metrics",
    "extract_reward_components",
    "generate_responses",
    "generate_responses_async",
    "get_effort_config",
    "get_nemo_gym_thinking_tags",
    "get_nemo_gym_uv_cache_dir",
    "get_nemo_gym_venv_dir",
    "get_pad_dynamic_image_shapes",
    "nemo_gym_rollout_hit_max_tokens",
    "resolve_reward_penalty_config",
    "run_async_multi_turn_rollout",
    "run_async_multi_turn_rollout_groups",
    "run_async_nemo_gym_rollout",
    "run_multi_turn_rollout",
    "run_nemo_gym_rollout_sync",
    "run_sample_multi_turn_rollout",
    "setup_nemo_gym_config",
    "should_mask_flagged_samples",
    "should_use_nemo_gym",
    "spinup_nemo_gym_actor",
    "validate_reward_components_match_scalar",
    "verify_right_padding",
]
