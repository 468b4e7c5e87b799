"""What an evaluation is asked with, in two halves.

:class:`EvaluationSettings` decides what a row gives and is part of the plan. :class:`RunOptions` only
places and paces a run, and may change whenever one is continued.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from gymrl.config import Config, SamplingParams, require
from gymrl.errors import ConfigError


class PolicySettings(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who answers, as far as it decides what is answered.

    Attributes:
        model: Loaded for the run: a directory, a hub id, or ``smollm2``. None: servers that run.
        name: What requests ask for; None: ``policy`` where the model is loaded here, else what
            the server serves.
        weights: Fingerprint of a model directory; set when the plan is made. A directory may then
            move, but not change.
        backend: What runs a loaded model.
        dtype: Of its weights.
        max_model_len: Its context in tokens; None: the model's own.
        engine_args: Further fields of vLLM's ``AsyncEngineArgs``.
    """

    model: str | None = None
    name: str | None = None
    weights: str | None = None
    backend: Literal["transformers", "vllm"] = "transformers"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    max_model_len: int | None = None
    engine_args: dict[str, Any] = {}  # noqa: RUF012 - every instance gets one of its own


class SamplingSettings(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are sampled; None leaves it to the task, and then to the defaults.

    Attributes:
        temperature: Default 1. 0 is greedy.
        top_p: Default 1, which is off.
        max_output_tokens: Sampled tokens of a model call, at most. Default: what the context holds.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None

    def __post_init__(self) -> None:
        self.of({})

    def of(self, params: dict[str, Any]) -> SamplingParams:
        """The profile for a task's ``responses_create_params``.

        Raises:
            ConfigError: A number is out of range, in the task or here.
        """
        given = {
            "temperature": _first(self.temperature, params.get("temperature"), 1.0),
            "top_p": _first(self.top_p, params.get("top_p"), 1.0),
            "max_tokens": self.max_output_tokens,
        }
        return SamplingParams.from_dict(given)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


class EvaluationSettings(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides a row's result beside its task and its benchmark's servers.

    Attributes:
        policy: Who answers.
        sampling: How.
        seed: Every row's sampling seed derives from it, the task's digest and the repeat, so a
            row's seed is the same whatever other tasks are in the plan.
    """

    policy: PolicySettings = PolicySettings()
    sampling: SamplingSettings = SamplingSettings()
    seed: int = 0


class RunOptions(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where and how fast a run goes; nothing of it decides a result.

    Attributes:
        base_urls: Policy servers with OpenAI's Responses API, with ``/v1``, where no model is
            loaded. Tokens are recorded where they return them.
        api_key: For `base_urls`, as a bearer token. It is written nowhere, and no agent sees it.
        registry_url: Registry of Gym servers that run already, instead of starting the plan's.
            With it and without `base_urls` they know their policy.
        gym_python: The interpreter that has the NeMo Gym of the plan, where servers of its own are
            started; None: what :func:`~gymrl.benchmark.installed_gym.find_gym` finds.
        gym_roots: Folders in Gym's layout that have servers of yours.
        tokenizer: Decodes the text kept beside the tokens; None: the loaded model's own.
        workers: Gym worker processes.
        in_process: Everything in this process, so that breakpoints stop.
        batch_size: Sequences that a loaded model decodes together; None: as many as
            :class:`~gymrl.config.GenerationConfig` has. With 1, tokens depend on nothing that else
            is running; with more, the last bits of a logit do. Not for vLLM, which would not keep
            to it.
        num_threads: Torch's threads for a loaded model; None: torch's default.
        concurrency: Rows under way at a time.
        max_tries: Times that a row may fail, over all runs, before it stays failed. Tries whose
            connection was refused are not counted.
        max_outages: Rows that failed by the fleet's fault, one after the other with none between
            that gave a result, that end the run.
        row_timeout_s: Deadline of one attempt.
        start_timeout_s: Deadline for the model and all servers to be ready.
    """

    base_urls: tuple[str, ...] = ()
    api_key: str | None = None
    registry_url: str | None = None
    gym_python: str | None = None
    gym_roots: tuple[str, ...] = ()
    tokenizer: str | None = None
    workers: int = 1
    in_process: bool = False
    batch_size: int | None = None
    num_threads: int | None = None
    concurrency: int = 128
    max_tries: int = 3
    max_outages: int = 8
    row_timeout_s: float = 1800.0
    start_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for setting in ("workers", "batch_size", "concurrency", "max_tries", "max_outages"):
            value = getattr(self, setting)
            require(value is None or value > 0, setting, value, "must be positive")
        for setting in ("row_timeout_s", "start_timeout_s"):
            seconds = getattr(self, setting)
            require(
                seconds > 0 and math.isfinite(seconds), setting, seconds, "must be seconds above 0"
            )


def check_policy(policy: PolicySettings, options: RunOptions) -> None:
    """Refuse a run without a policy, or with two.

    Raises:
        ConfigError: Says what to give.
    """
    if policy.model is not None and options.base_urls:
        raise ConfigError(
            f"the plan loads the model {policy.model!r}, and base_urls names servers as well: "
            "give one of them",
            setting="base_urls",
        )
    if policy.model is not None and options.registry_url is not None:
        raise ConfigError(
            f"the plan loads the model {policy.model!r}, but the servers of a registry know their "
            "policy: leave one of them out",
            setting="registry_url",
        )
    if policy.model is not None and policy.backend == "vllm" and options.batch_size is not None:
        raise ConfigError(
            f"batch_size={options.batch_size} is the embedded generator's, and the plan has vLLM, which "
            "decodes as many sequences as its memory takes: leave it out, or plan with "
            f"engine_args={{'max_num_seqs': {options.batch_size}}}",
            setting="batch_size",
        )
    if policy.model is None and not options.base_urls and options.registry_url is None:
        raise ConfigError(
            "no model: name one to load (a directory, a hub id or smollm2), or base_urls of a "
            "server with OpenAI's Responses API",
            setting="model",
        )
