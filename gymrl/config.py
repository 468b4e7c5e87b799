"""Typed configuration: frozen structs that are checked when they are built.

Nothing reads a raw dictionary after loading. A contradiction raises
:class:`~gymrl.errors.ConfigError` that names the field, the value and the remedy.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec

from gymrl.errors import ConfigError
from gymrl.settings import Config, load, read_mapping, require

__all__ = [
    "Config",
    "FailurePolicy",
    "GenerationConfig",
    "GymConfig",
    "LogprobsMode",
    "MediaConfig",
    "RolloutConfig",
    "RoutesDtype",
    "SamplingParams",
    "ShardConfig",
    "VllmConfig",
    "load",
    "read_mapping",
    "require",
    "require_urls",
]


class SamplingParams(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are sampled.

    Attributes:
        temperature: 0 is greedy; log-probabilities are then those of temperature 1.
        top_p: Nucleus: the smallest set of tokens whose mass reaches it. 1 is off.
        top_k: Only the k likeliest tokens. None is off.
        max_tokens: At most this many sampled tokens a call; None fills the context.
        stop: Texts that end the generation.
        stop_token_ids: Tokens that end it, beside the model's own end of turn.
        seed: Makes the call repeatable whatever else is in the batch, up to the last bits of
            a logit.
        ignore_eos: Sample on to `max_tokens` (for benchmarks).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "must be a finite number, 0 or more",
        )
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")
        require(self.top_k is None or self.top_k > 0, "top_k", self.top_k, "must be positive")
        require(
            self.max_tokens is None or self.max_tokens > 0,
            "max_tokens",
            self.max_tokens,
            "must be positive, or left out",
        )
        require(all(self.stop), "stop", self.stop, "an empty text would end every call at once")


class MediaConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where images may come from, and how large they may be.

    Nothing is fetched and no file is read unless it is asked for here.

    Attributes:
        schemes: What a source may begin with: ``data``, ``http``, ``https``, ``file``.
        allowed_hosts: Hosts that may be fetched from, by name or address; ``*.example.com`` stands
            for every host below that name. Redirects must stay among them.
        private_hosts: Those of `allowed_hosts` that may be at a private or loopback address.
        allowed_roots: Directories that files may lie in, after links are resolved.
        max_image_bytes: Of one image, encoded.
        max_image_pixels: Of one image, width times height, checked before it is decoded.
        max_images_per_row: Of one attempt, prompt and tools together.
        fetch_timeout_s: Deadline of one download, redirects included.
        max_redirects: Of one download.
    """

    schemes: tuple[Literal["data", "http", "https", "file"], ...] = ("data",)
    allowed_hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    allowed_roots: tuple[str, ...] = ()
    max_image_bytes: int = 20 << 20
    max_image_pixels: int = 40_000_000
    max_images_per_row: int = 64
    fetch_timeout_s: float = 20.0
    max_redirects: int = 3

    def __post_init__(self) -> None:
        fetches = "http" in self.schemes or "https" in self.schemes
        require(
            fetches == bool(self.allowed_hosts),
            "media.allowed_hosts",
            self.allowed_hosts,
            "name the hosts that images may be fetched from together with http or https in schemes",
        )
        require(
            ("file" in self.schemes) == bool(self.allowed_roots),
            "media.allowed_roots",
            self.allowed_roots,
            "name the directories that images may be read from together with file in schemes",
        )
        require(
            set(self.private_hosts) <= set(self.allowed_hosts),
            "media.private_hosts",
            self.private_hosts,
            "each must be one of allowed_hosts",
        )
        # Above it Pillow warns and then refuses by itself.
        require(
            0 < self.max_image_pixels <= 89_478_485,
            "media.max_image_pixels",
            self.max_image_pixels,
            "must be positive and at most 89478485",
        )
        for setting in ("max_image_bytes", "max_images_per_row", "fetch_timeout_s"):
            value = getattr(self, setting)
            require(value > 0, f"media.{setting}", value, "must be positive")
        require(
            self.max_redirects >= 0, "media.max_redirects", self.max_redirects, "must be 0 or more"
        )


LogprobsMode = Literal["processed", "raw"]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _require_variable(setting: str, name: str | None) -> None:
    if name is not None and not _VARIABLE.fullmatch(name):
        # Not shown: it may be the key.
        raise ConfigError(
            f"{setting} holds something else than the name of an environment variable; "
            "put the key into a variable and name that",
            setting=setting,
        )


_URL = re.compile(r"https?://[^/\s]+(/\S*)?", re.IGNORECASE)


def require_urls(setting: str, urls: tuple[str, ...]) -> None:
    """Refuse what is no address of a server, and addresses that hold a password.

    Raises:
        ConfigError: Names the setting, and shows no password.
    """
    for url in urls:
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ConfigError(
                f"{setting} holds a user's name or a key in an address (before its '@'): addresses are in "
                "records, logs and what registries give out. Put the key into an environment variable "
                "and name that in api_key_env",
                setting=setting,
            )
        require(
            _URL.fullmatch(url) is not None,
            setting,
            url,
            "is no address of a server; write it with http:// or https:// and a host",
        )


RoutesDtype = Literal["int8", "int16", "int32"]


class VllmConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM behind a generator: an engine of this process, or servers that run elsewhere.

    Attributes:
        base_urls: vLLM servers, with or without ``/v1``; calls go to the one with the fewest in
            flight. Empty: an engine is started in this process.
        rank: Place among the engines of this node, from 0. Without `devices`, rank r takes GPUs
            ``r * tensor_parallel_size`` and following.
        tensor_parallel_size: GPUs an engine.
        devices: GPUs by index, of those the process may see; empty: chosen by `rank`.
        kv_cache_bytes: Memory of the key-value cache. None: 256 MiB on a CPU, vLLM's own choice
            on a GPU.
        enforce_eager: No compilation, no CUDA graphs. None: only on a CPU.
        engine_args: Further fields of vLLM's ``AsyncEngineArgs``, as they are.
        request_timeout_s: Deadline of one call to a server; None: none.
        probe_interval_s: Seconds between two looks at a server that is out.
        api_key_env: The environment variable, of the process that calls the servers, which holds
            the key that they ask for; it is sent as ``Authorization: Bearer``. The key itself is
            in no configuration, record or log. None: no key.
        update_servers: ``update_weights`` may exchange the weights of the servers in `base_urls`,
            for everybody who calls them; they must run with ``VLLM_SERVER_DEV_MODE=1``.
        update_timeout_s: Deadline of loading weights in one of them, of each step of a transfer to
            one, which is then left out, and of what an engine of this process does together with a
            trainer that sends weights; the engine is ended then.
    """

    base_urls: tuple[str, ...] = ()
    rank: int = 0
    tensor_parallel_size: int = 1
    devices: tuple[int, ...] = ()
    kv_cache_bytes: int | None = None
    enforce_eager: bool | None = None
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    request_timeout_s: float | None = None
    probe_interval_s: float = 5.0
    api_key_env: str | None = None
    update_servers: bool = False
    update_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _require_variable("vllm.api_key_env", self.api_key_env)
        require_urls("vllm.base_urls", self.base_urls)
        require(self.rank >= 0, "vllm.rank", self.rank, "must be 0 or more")
        require(
            self.tensor_parallel_size > 0,
            "vllm.tensor_parallel_size",
            self.tensor_parallel_size,
            "must be positive",
        )
        require(
            len(self.devices) in (0, self.tensor_parallel_size),
            "vllm.devices",
            self.devices,
            f"name as many as tensor_parallel_size={self.tensor_parallel_size}, or none",
        )
        require(
            self.kv_cache_bytes is None or self.kv_cache_bytes > 0,
            "vllm.kv_cache_bytes",
            self.kv_cache_bytes,
            "must be positive, or left out",
        )
        require(
            self.request_timeout_s is None or self.request_timeout_s > 0,
            "vllm.request_timeout_s",
            self.request_timeout_s,
            "must be positive, or left out",
        )
        require(
            self.probe_interval_s > 0,
            "vllm.probe_interval_s",
            self.probe_interval_s,
            "must be positive",
        )
        require(
            self.update_timeout_s > 0,
            "vllm.update_timeout_s",
            self.update_timeout_s,
            "must be positive",
        )
        require(
            not self.update_servers or bool(self.base_urls),
            "vllm.update_servers",
            self.update_servers,
            "is for servers named by vllm.base_urls; an engine of this process always takes weights",
        )


class GenerationConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One embedded generator and the HTTP server in front of it.

    Attributes:
        model: A directory, a hub id, or ``smollm2``.
        backend: ``transformers``, or ``vllm`` where it is installed.
        vllm: Settings of that backend.
        defer_loading: Give out the URL at once and load the model behind it; until it is there,
            ``/health`` and calls get HTTP 503.
        served_model_name: What ``/v1/models`` says and requests may name.
        dtype: Of the weights: ``float32``, ``bfloat16``, ``float16``; ``auto`` is the checkpoint's.
        device: ``auto`` takes a GPU when there is one.
        max_batch_size: Sequences decoded together. 1 makes tokens independent of load.
        max_model_len: Context in tokens; None is the model's own.
        num_threads: Torch's intra-op threads; None is torch's default.
        logprobs_mode: ``processed``: of the sampling distribution (after temperature and top-p,
            top-k). ``raw``: of the model's own, at temperature 1.
        tool_parser: ``hermes``, ``llama_json``, ``none``, or the name of a tool parser of vLLM's where
            that is installed; ``auto`` reads it off the template.
        reasoning_parser: ``think``, ``none``, or the name of a reasoning parser of vLLM's; ``auto``
            reads it off the template.
        on_rewrite: When the template rewrites history: ``error``, or start a new ``segment``.
        host: Address the server listens on.
        port: 0 takes a free one.
        max_body_bytes: Larger request bodies get HTTP 413.
        media: Where images of requests may come from, and how large and how many they may be.
        ledger_max_bytes: Memory for what was served to rollouts that name themselves; the one that
            was quiet the longest is evicted first. 0 keeps nothing.
        ledger_max_age_s: A rollout that was quiet for so long is evicted.
        return_routed_experts: Of a mixture-of-experts model, return with every call the experts
            that each token went through (:mod:`gymrl.routed_experts`).
    """

    model: str
    backend: Literal["transformers", "vllm"] = "transformers"
    vllm: VllmConfig = VllmConfig()
    defer_loading: bool = False
    served_model_name: str = "policy"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_batch_size: int = 16
    max_model_len: int | None = None
    num_threads: int | None = None
    logprobs_mode: LogprobsMode = "processed"
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    on_rewrite: Literal["error", "segment"] = "error"
    host: str = "127.0.0.1"
    port: int = 0
    max_body_bytes: int = 256 << 20
    media: MediaConfig = MediaConfig()
    ledger_max_bytes: int = 256 << 20
    ledger_max_age_s: float = 7200.0
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        require(self.ledger_max_bytes >= 0, "ledger_max_bytes", self.ledger_max_bytes, "0 or more")
        require(
            self.ledger_max_age_s > 0, "ledger_max_age_s", self.ledger_max_age_s, "must be positive"
        )
        require(bool(self.model), "model", self.model, "name a directory, a hub id or smollm2")
        require(self.max_batch_size > 0, "max_batch_size", self.max_batch_size, "must be positive")
        require(
            self.max_model_len is None or self.max_model_len > 0,
            "max_model_len",
            self.max_model_len,
            "must be positive, or left out",
        )
        require(
            self.num_threads is None or self.num_threads > 0,
            "num_threads",
            self.num_threads,
            "must be positive, or left out",
        )
        require(0 <= self.port < 65536, "port", self.port, "must be a port, or 0 for a free one")


class GymConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One Gym worker: the servers it runs or talks to, and how it reads their answers.

    Attributes:
        servers: Server instances in Gym's own shape,
            ``{instance: {type: {impl: {entrypoint, ...}}}}``. An ``entrypoint`` of the form
            ``package.module:Class`` is one of ours and is started by the worker.
        gym_python: The interpreter that has NeMo Gym. An ``entrypoint`` that is a script
            (``app.py``) is then started in it as a process, and ``config_paths`` and the like are
            read by Gym's own rules. None: scripts are servers that somebody else runs.
        gym_pythons: Interpreters of single instances, by name, where one for all will not do. An
            environment that ``gym env start`` made for a server is found by itself.
        gym_roots: Folders in Gym's layout that have servers and configurations of yours; before
            those of ``NEMO_GYM_EXTRA_ROOTS``.
        log_dir: Gets what each real server writes, as ``<instance>.log``, beside the log.
        registry_url: Address of a registry (head) server that someone else runs. Then `servers`
            must be empty.
        base_urls: OpenAI-compatible policy servers, with ``/v1``; servers take turns.
        api_key_env: The environment variable, of the worker's process, which holds the key that the
            policy servers ask for. A relay of the worker sends it as ``Authorization: Bearer``;
            agents ask the relay. The key itself is in no configuration, agent, record or log. None:
            no key.
        model_name: The model the agents ask for.
        tokenizer: Directory or hub id of the tokenizer that decodes text; None: no text.
        decode_text: Keep each turn's text beside its tokens.
        host: Address that the servers listen on.
        port_range_low: First port to try; None takes free ones.
        port_range_high: Last port to try.
        max_connections: Concurrent connections of the worker; 0 is no limit.
        row_timeout_s: Deadline of one ``/run`` call.
        spinup_timeout_s: Deadline for all servers to become ready.
        on_broken_prefix: When a turn's prompt does not begin with the tokens so far: ``error``
            fails the row, ``truncate`` keeps the turns before it.
        invalid_tool_call_patterns: Texts that, in an answer, mean a tool call was not made.
        thinking_tags: The opening and the closing tag of reasoning.
        token_source: Where the tokens of a trajectory come from. ``messages``: the agent's answer
            carries them. ``ledger``: the policy server kept them, by rollout id. ``both``: from the
            answer, and the row fails where the server's differ, in tokens or in images.
        require_tokens: An answer without a sampled token, or of a server that returns no token ids,
            fails the row, unless a token limit explains it. False: it is a placeholder with its
            reward, which is enough for an evaluation.
        side_calls: Model calls that the main conversation does not continue, in a trajectory that
            comes from the ledger: ``drop`` counts them in the notes, ``keep`` makes side
            trajectories of them.
        media: What images of prompts and tools may be. None: images are not read; agents and
            models see them all the same, trajectories don't. They come from where `token_source`
            has the tokens: the agent's answer, or what the policy server says that it showed.
        processor: Directory or hub id of the model's processor. It says how many tokens an image
            is, and each row's tokens are checked against its images.
        require_routed_experts: A turn that came without the experts its tokens went through fails
            the row. Without it such turns are left to the trainer's own router.
        routed_experts_dtype: In which trajectories hold them; None keeps what came. See
            :func:`~gymrl.routed_experts.experts.routes_dtype`.
    """

    servers: dict[str, Any] = msgspec.field(default_factory=dict)
    gym_python: str | None = None
    gym_pythons: dict[str, str] = msgspec.field(default_factory=dict)
    gym_roots: tuple[str, ...] = ()
    log_dir: str | None = None
    registry_url: str | None = None
    base_urls: tuple[str, ...] = ()
    api_key_env: str | None = None
    model_name: str = "policy"
    tokenizer: str | None = None
    decode_text: bool = True
    host: str = "127.0.0.1"
    port_range_low: int | None = None
    port_range_high: int | None = None
    max_connections: int = 0
    row_timeout_s: float = 1800.0
    spinup_timeout_s: float = 120.0
    on_broken_prefix: Literal["error", "truncate"] = "error"
    invalid_tool_call_patterns: tuple[str, ...] = (
        "<tool_call>",
        "</tool_call>",
        "<function_call>",
        "</function_call>",
    )
    thinking_tags: tuple[str, str] = ("<think>", "</think>")
    token_source: Literal["messages", "ledger", "both"] = "messages"
    require_tokens: bool = True
    side_calls: Literal["drop", "keep"] = "drop"
    media: MediaConfig | None = None
    processor: str | None = None
    require_routed_experts: bool = False
    routed_experts_dtype: RoutesDtype | None = None

    def __post_init__(self) -> None:
        require(
            not (self.servers and self.registry_url),
            "registry_url",
            self.registry_url,
            "give either servers to start or the registry of servers that run, not both",
        )
        _require_variable("gym.api_key_env", self.api_key_env)
        require_urls("gym.base_urls", self.base_urls)
        require_urls("gym.registry_url", (self.registry_url,) if self.registry_url else ())
        require(
            not (self.require_routed_experts and self.on_broken_prefix == "truncate"),
            "on_broken_prefix",
            self.on_broken_prefix,
            "router replay needs every turn; use 'error', or leave require_routed_experts out",
        )
        require(
            self.processor is None or self.media is not None,
            "processor",
            self.processor,
            "set media too: without it no image is read",
        )
        require(self.row_timeout_s > 0, "row_timeout_s", self.row_timeout_s, "must be positive")
        require(
            self.spinup_timeout_s > 0, "spinup_timeout_s", self.spinup_timeout_s, "must be positive"
        )
        require(
            self.max_connections >= 0,
            "max_connections",
            self.max_connections,
            "must be 0, for no limit, or more",
        )
        low, high = self.port_range_low, self.port_range_high
        require(
            (low is None) == (high is None)
            and (low is None or high is None or 0 < low <= high < 65536),
            "port_range_low",
            (low, high),
            "give both ends of the port range, low first and below 65536, or neither",
        )


FailurePolicy = Literal["raise", "mask", "drop_group"]


class ShardConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named slice of the Gym servers that has workers of its own.

    Attributes:
        servers: Instances of `gym.servers` that live here. Model servers need not be listed:
            every shard has its own copy of them.
        replicas: Workers that each run the slice; whole groups take turns over them.
    """

    servers: tuple[str, ...]
    replicas: int = 1

    def __post_init__(self) -> None:
        require(bool(self.servers), "servers", self.servers, "a shard needs at least one server")
        require(self.replicas > 0, "replicas", self.replicas, "must be positive")


class RolloutConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rollout engine: who generates, how many Gym workers, what a failed row means.

    Attributes:
        generation: The embedded generator; None when `gym.base_urls` names servers, or
            `gym.registry_url` names Gym servers that know their policy.
        gym: Every Gym worker's configuration.
        num_workers: Gym workers (replicas); whole groups take turns over them.
        shards: Slices of `gym.servers` by name, each with its own workers. Empty: one slice,
            `num_workers` replicas.
        in_process: Everything in this process, so that breakpoints stop.
        sampling: Of training rollouts; a call may pass another.
        failure_policy: ``raise`` ends the run at the first failed row; ``mask`` keeps the failure
            in its group's place; ``drop_group`` leaves the group out and counts it.
        seed: Row seeds derive from it, the task index and the rollout index; None: unseeded.
        start_timeout_s: Deadline for workers and servers to be ready, all together.
        no_progress_timeout_s: Longest silence of the whole stream; None: no watchdog.
        group_timeout_s: Deadline of a group, from the moment the stream begins, the consumer's own
            time not counted. Then the group's unfinished rows are timeouts and `failure_policy`
            decides. None: none.
        max_infra_attempts: Dispatches of a row whose failures are the fleet's, the first included;
            a row that spends them ends the run. Connections that were refused have as many of
            their own.
        max_data_attempts: Dispatches of a row whose failures are its own, the first included;
            then `failure_policy` decides.
        retry_delay_s: Pause before a row that failed by the fleet's fault is dispatched again;
            doubles each time up to 30 s, jittered. A server's ``Retry-After`` makes it longer.
        worker_restarts: Deaths of worker processes that are answered with a restart. Workers that
            die together cost one, and a restarted worker that finishes a row gives back what its
            deaths have cost. 0: the first death ends the run.
        heartbeat_timeout_s: A worker process that lives, but whose event loop shows nothing for so
            long (it is stopped, or stuck in a call that blocks), is killed and counts as dead. One
            that computes is given four times as long. None: it is waited for.
    """

    generation: GenerationConfig | None = None
    gym: GymConfig
    num_workers: int = 1
    shards: dict[str, ShardConfig] = msgspec.field(default_factory=dict)
    in_process: bool = False
    sampling: SamplingParams = SamplingParams()
    failure_policy: FailurePolicy = "raise"
    seed: int | None = None
    start_timeout_s: float = 300.0
    no_progress_timeout_s: float | None = None
    group_timeout_s: float | None = None
    max_infra_attempts: int = 5
    max_data_attempts: int = 2
    retry_delay_s: float = 0.5
    worker_restarts: int = 3
    heartbeat_timeout_s: float | None = 300.0

    def __post_init__(self) -> None:
        require(self.num_workers > 0, "num_workers", self.num_workers, "must be positive")
        require(
            (self.generation is None) == bool(self.gym.base_urls)
            or (self.generation is None and self.gym.registry_url is not None),
            "generation",
            self.generation,
            "give either a generation block or gym.base_urls of servers that run",
        )
        require(
            self.gym.api_key_env is None or bool(self.gym.base_urls),
            "gym.api_key_env",
            self.gym.api_key_env,
            "is for the policy servers of gym.base_urls; servers behind a generation block have "
            "generation.vllm.api_key_env",
        )
        if self.generation is not None:
            _check_router_replay(self.generation, self.gym)
        require(
            not (self.in_process and self.num_workers > 1),
            "in_process",
            self.in_process,
            "one process has one worker: set num_workers to 1",
        )
        require(
            self.start_timeout_s > 0, "start_timeout_s", self.start_timeout_s, "must be positive"
        )
        require(
            not self.shards or self.num_workers == 1,
            "num_workers",
            self.num_workers,
            "with shards, set each shard's replicas instead",
        )
        require(
            not (self.in_process and sum(s.replicas for s in self.shards.values()) > 1),
            "in_process",
            self.in_process,
            "one process has one worker: use one shard with one replica",
        )
        for setting in ("no_progress_timeout_s", "group_timeout_s", "heartbeat_timeout_s"):
            seconds = getattr(self, setting)
            require(
                seconds is None or seconds > 0, setting, seconds, "must be positive, or left out"
            )
        require(
            self.worker_restarts >= 0,
            "worker_restarts",
            self.worker_restarts,
            "must not be negative; 0 restarts nothing",
        )
        require(
            self.retry_delay_s >= 0, "retry_delay_s", self.retry_delay_s, "must not be negative"
        )
        for setting in ("max_infra_attempts", "max_data_attempts"):
            value = getattr(self, setting)
            require(value > 0, setting, value, "must be positive; 1 never dispatches again")


def _check_router_replay(generation: GenerationConfig, gym: GymConfig) -> None:
    require(
        generation.return_routed_experts or not gym.require_routed_experts,
        "generation.return_routed_experts",
        generation.return_routed_experts,
        "gym.require_routed_experts needs it: set it to true",
    )
    require(
        not (generation.return_routed_experts and gym.on_broken_prefix == "truncate"),
        "gym.on_broken_prefix",
        gym.on_broken_prefix,
        "router replay needs every turn; use 'error', or leave "
        "generation.return_routed_experts out",
    )
