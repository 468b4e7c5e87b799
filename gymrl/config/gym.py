"""Gym workers: their servers, deadlines and limits."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gymrl.config.checks import require_urls, require_variable
from gymrl.config.generation import RoutesDtype  # noqa: TC001 - msgspec reads annotations
from gymrl.config.media import MediaConfig  # noqa: TC001 - msgspec reads annotations
from gymrl.settings import Config, require


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
        require_variable("gym.api_key_env", self.api_key_env)
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
