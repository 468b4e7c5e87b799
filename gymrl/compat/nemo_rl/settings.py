"""What NeMo RL's configuration says about Gym, and gymrl's own configuration made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, Protocol, Self, TypeAlias, TypedDict

from gymrl.config import RolloutConfig, SamplingParams
from gymrl.errors import ConfigError, UnsupportedOptionError
from gymrl.gym.conduct import DEFAULT_INVALID_TOOL_CALL_PATTERNS as INVALID_TOOL_CALL_PATTERNS
from gymrl.gym.conduct import DEFAULT_THINKING_TAGS as THINKING_TAGS
from gymrl.gym.registry import read_instances
from gymrl.scoring import EffortConfig

TokenizerType: TypeAlias = Any
"""A tokenizer or a processor of transformers; what is used of it is looked up when it is used."""

DEFAULT_INVALID_TOOL_CALL_PATTERNS: list[str] = list(INVALID_TOOL_CALL_PATTERNS)
DEFAULT_THINKING_TAGS: list[str] = list(THINKING_TAGS)


class NemoGymConfig(TypedDict):
    """Configuration of a :class:`~gymrl.compat.nemo_rl.NemoGym`, a plain dictionary.

    Attributes:
        model_name: The model the agents ask for.
        base_urls: OpenAI-compatible policy servers, with ``/v1``.
        initial_global_config_dict: Gym's global configuration: server instances by name, in Gym's
            own shape. A ``head_server`` with ``host`` and ``port``, and no instance, names the head
            server of a Gym that runs elsewhere.
        port_range_low: First port for servers that are started.
        port_range_high: Last one.
        invalid_tool_call_patterns: None takes :data:`DEFAULT_INVALID_TOOL_CALL_PATTERNS`.
        thinking_tags: None takes :data:`DEFAULT_THINKING_TAGS`.
        require_routed_experts: A turn without the experts that its tokens went through fails the
            row. The policy's servers must return them.
        routed_experts_dtype: Of the routes: ``int8``, ``int16`` or ``int32``; None keeps what
            came. :func:`~gymrl.routed_experts.experts.routes_dtype` says which fits a model.
        use_fastokens: Ignored: ids are decoded by the Rust tokenizer in any case.
        tokenizer_config: Its ``name`` is the tokenizer where :meth:`NemoGym.set_tokenizer` is not
            called.
        pad_dynamic_image_shapes: Pad images of several sizes to one tensor and keep their exact
            sizes; see :class:`gymrl.media.processing.ImageProcessor`.
        media: gymrl's own: where images may come from, a :class:`gymrl.config.MediaConfig` as a
            dictionary. Images are read where it is there, and where the tokenizer is a processor;
            data URLs alone by default.
        num_workers: gymrl's own: worker processes that share the rows, 1 by default.
        in_process: gymrl's own: no worker process, so that breakpoints stop; false by default.
    """

    model_name: str
    base_urls: list[str]
    initial_global_config_dict: dict[str, Any]
    port_range_low: NotRequired[int]
    port_range_high: NotRequired[int]
    invalid_tool_call_patterns: NotRequired[list[str] | None]
    thinking_tags: NotRequired[list[str] | None]
    require_routed_experts: NotRequired[bool]
    routed_experts_dtype: NotRequired[str]
    use_fastokens: NotRequired[bool]
    tokenizer_config: NotRequired[dict[str, Any] | None]
    pad_dynamic_image_shapes: NotRequired[bool]
    media: NotRequired[dict[str, Any] | None]
    num_workers: NotRequired[int]
    in_process: NotRequired[bool]


class NemoGymCompatibleConfig(Protocol):
    """What of a master configuration decides whether Gym rolls out.

    A mapping with these keys will do as well.
    """

    @property
    def env(self) -> dict[str, Any]:
        """The ``env`` block."""
        ...

    @property
    def policy(self) -> Any:
        """The ``policy`` block."""
        ...


class EffortLevelsConfig(EffortConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """:class:`gymrl.scoring.EffortConfig` under its other name; see there for the formula."""

    def validate_length_bound(self) -> Self:
        """The configuration itself; a bound that is not positive was refused when it was built."""
        return self


def should_use_nemo_gym(master_config: NemoGymCompatibleConfig) -> bool:
    """Whether Gym handles rollouts and validation: ``env.should_use_nemo_gym``.

    Raises:
        UnsupportedOptionError: It does, but the policy's vLLM serves no HTTP; an `AssertionError`
            and a `ValueError`.
    """
    if not (section(master_config, "env") or {}).get("should_use_nemo_gym"):
        return False
    generation = section(section(master_config, "policy") or {}, "generation") or {}
    vllm = generation.get("vllm_cfg")
    if isinstance(vllm, Mapping):
        for setting in ("async_engine", "expose_http_server"):
            if not vllm.get(setting):
                raise UnsupportedOptionError(
                    f"policy.generation.vllm_cfg.{setting}={vllm.get(setting)!r}: rollouts through "
                    "Gym call the policy over HTTP; set it to true (setup_nemo_gym_config does)",
                    setting=f"policy.generation.vllm_cfg.{setting}",
                )
    return True


def setup_nemo_gym_config(config: Any, tokenizer: TokenizerType) -> None:
    """Make a master configuration fit for Gym, in place.

    The policy's vLLM gets its HTTP server, stop strings and stop token ids are cleared (they do
    not reach the model through Gym).

    Args:
        config: A mapping, or an object with ``policy``.
        tokenizer: Not used.

    Raises:
        ConfigError: There is no ``policy.generation`` block.
    """
    generation = section(section(config, "policy") or {}, "generation")
    if generation is None:
        raise ConfigError(
            "the configuration has no policy.generation block to set up", setting="policy"
        )
    if generation.get("backend", "vllm") == "vllm":
        vllm = generation.setdefault("vllm_cfg", {})
        vllm["async_engine"] = True
        vllm["expose_http_server"] = True
    generation["stop_strings"] = None
    generation["stop_token_ids"] = None


def get_effort_config(env: dict[str, Any]) -> EffortLevelsConfig | None:
    """The effort block of an ``env`` configuration, its defaults filled in; None without one.

    Read from ``env.effort_levels`` or ``env.nemo_gym.effort_levels``.

    Raises:
        ConfigError: Both are there, or the block is wrong.
    """
    outer = env.get("effort_levels")
    inner = (env.get("nemo_gym") or {}).get("effort_levels")
    if outer is not None and inner is not None:
        raise ConfigError(
            "effort_levels is in env and in env.nemo_gym; leave one", setting="effort_levels"
        )
    return effort_config(inner if outer is None else outer)


def effort_config(block: Any) -> EffortLevelsConfig | None:
    """An effort block, whatever it came as."""
    if block is None or isinstance(block, EffortLevelsConfig):
        return block
    values = plain_mapping(block, "effort_config")
    return EffortLevelsConfig.from_dict(values)


def get_nemo_gym_thinking_tags(env_config: dict[str, Any]) -> list[str]:
    """``nemo_gym.thinking_tags`` of an ``env`` configuration, else the defaults."""
    tags = (env_config.get("nemo_gym") or {}).get("thinking_tags")
    return list(tags or DEFAULT_THINKING_TAGS)


def should_mask_flagged_samples(env_config: dict[str, Any]) -> bool:
    """``should_mask_flagged_samples`` of an ``env`` configuration; absent or null means true.

    Raises:
        ConfigError: It is no boolean.
    """
    value = env_config.get("should_mask_flagged_samples")
    if value is None:
        return True
    if not isinstance(value, bool):
        raise ConfigError(
            f"should_mask_flagged_samples={value!r}: true or false is needed",
            setting="should_mask_flagged_samples",
        )
    return value


def get_nemo_gym_uv_cache_dir() -> str | None:
    """Where uv keeps its cache inside a container (``NRL_CONTAINER=1``); None outside one.

    ``UV_CACHE_DIR``, else ``$XDG_CACHE_HOME/uv``, else ``~/.cache/uv``.
    """
    if os.environ.get("NRL_CONTAINER") != "1":
        return None
    given = os.environ.get("UV_CACHE_DIR")
    if given:
        return given
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(home) / "uv")


def get_nemo_gym_venv_dir() -> str | None:
    """``NEMO_GYM_VENV_DIR``; None where it is not set or empty."""
    return os.environ.get("NEMO_GYM_VENV_DIR") or None


def rollout_config(
    cfg: Mapping[str, Any], tokenizer: str | None = None, processor: str | None = None
) -> RolloutConfig:
    """The configuration of gymrl for what a :class:`NemoGymConfig` asks for.

    Args:
        cfg: The dictionary.
        tokenizer: Directory or hub id; None: `cfg`'s own, or no text.
        processor: Directory of the model's processor, where the model sees images.

    Raises:
        ConfigError: A setting is missing or wrong.
        UnsupportedOptionError: A setting asks for what this road does not have.
    """
    for name in ("model_name", "base_urls", "initial_global_config_dict"):
        if cfg.get(name) is None:
            raise ConfigError(f"the configuration has no {name}", setting=name)
    named = (cfg.get("tokenizer_config") or {}).get("name")
    gym: dict[str, Any] = {
        "base_urls": plain(cfg["base_urls"]),
        "model_name": cfg["model_name"],
        "tokenizer": tokenizer or named,
        **_servers(plain(cfg["initial_global_config_dict"])),
    }
    media = cfg.get("media")
    if media is not None or processor is not None:
        gym |= {"media": plain(media or {}), "processor": processor}
    for name in (
        "port_range_low",
        "port_range_high",
        "invalid_tool_call_patterns",
        "thinking_tags",
        "require_routed_experts",
        "routed_experts_dtype",
    ):
        if cfg.get(name) is not None:
            gym[name] = plain(cfg[name])
    return RolloutConfig.from_dict(
        {
            "gym": gym,
            "num_workers": cfg.get("num_workers", 1),
            "in_process": cfg.get("in_process", False),
        }
    )


def _servers(global_config: dict[str, Any]) -> dict[str, Any]:
    """The server instances of Gym's global configuration, or the head server of others."""
    refuse_option(
        global_config,
        "config_paths",
        "Gym's own files are not read; load them and give what they hold",
    )
    head = global_config.get("head_server")
    if head is None or read_instances(global_config):
        return {"servers": global_config}
    if not isinstance(head, dict) or not {"host", "port"} <= set(head):
        raise ConfigError(f"head_server={head!r}: host and port are needed", setting="head_server")
    return {"registry_url": f"http://{head['host']}:{head['port']}"}


def sampling_of(generation_config: Any, profile: Any = None) -> SamplingParams:
    """The sampling of a generation block, or of a profile over it.

    Args:
        generation_config: ``temperature``, ``top_p``, ``top_k``, ``max_new_tokens``,
            ``stop_strings``, ``stop_token_ids``; a mapping or an object.
        profile: ``temperature``, ``top_p`` and ``top_k`` to be used instead.
    """
    if isinstance(profile, SamplingParams):
        return profile
    source = generation_config if profile is None else profile
    top_k = section(source, "top_k")
    return SamplingParams(
        temperature=_given(section(source, "temperature"), 1.0),
        top_p=_given(section(source, "top_p"), 1.0),
        top_k=None if top_k == -1 else top_k,
        max_tokens=section(generation_config, "max_new_tokens"),
        stop=tuple(section(generation_config, "stop_strings") or ()),
        stop_token_ids=tuple(section(generation_config, "stop_token_ids") or ()),
    )


def _given(value: Any, default: float) -> float:
    return default if value is None else value


def model_limit(policy_generation: Any) -> int | None:
    """The model's context in tokens, as its generation interface knows it; None where it doesn't.

    ``max_model_len`` of the interface itself (gymrl's generators and endpoints have it), else
    ``cfg["vllm_cfg"]["max_model_len"]``, else ``cfg["max_model_len"]``.
    """
    limit = getattr(policy_generation, "max_model_len", None)
    if limit is None:
        cfg = section(policy_generation, "cfg") or {}
        limit = section(section(cfg, "vllm_cfg") or {}, "max_model_len")
        if limit is None:
            limit = section(cfg, "max_model_len")
    return None if limit is None else int(limit)


def section(config: Any, name: str) -> Any:
    """A field of a mapping or of an object; None where there is none."""
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def plain(value: Any) -> Any:
    """Mappings and lists of any kind, OmegaConf's say, as dictionaries and lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def plain_mapping(config: Any, what: str) -> dict[str, Any]:
    """A dictionary of a mapping, a pydantic model or a gymrl configuration.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(config, Mapping):
        return {key: plain(item) for key, item in config.items()}
    for method in ("model_dump", "to_dict"):
        dump = getattr(config, method, None)
        if callable(dump):
            return dict(dump())
    raise ConfigError(f"{what} is a {type(config).__name__}; a mapping is needed", setting=what)


def refuse_option(cfg: Mapping[str, Any], name: str, reason: str) -> None:
    """Refuse a switch that is on.

    Raises:
        UnsupportedOptionError: It is.
    """
    if cfg.get(name):
        raise UnsupportedOptionError(f"{name}={cfg[name]!r}: {reason}; leave it out", setting=name)
