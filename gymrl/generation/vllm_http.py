"""vLLM servers that run elsewhere, as one generator.

Calls go to the server with the fewest in flight. A server that can't be reached, or that breaks
off, is left out and looked at from time to time until it answers again. A call moves on to another
server only when it was refused before anything was sampled; one that breaks off later fails, for
sampling it again would favour short answers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.to_thread

from gymrl.concurrency import OwnedTasks, close_within, closing_stream, deadline, gather_bounded
from gymrl.errors import (
    ConfigError,
    DeadlineExceeded,
    GenerationError,
    GenerationRequestError,
    GenerationTransportError,
    WeightUpdateError,
)
from gymrl.generation.balancer import Balancer, Upstream
from gymrl.generation.base import Generated, TokenCallback, check_prompt, token_budget
from gymrl.generation.images import check_regions
from gymrl.generation.vllm_client import (
    RefusedError,
    ServerFacts,
    UnauthorizedError,
    VllmClient,
)
from gymrl.generation.vllm_sampling import generated, with_routes
from gymrl.generation.vllm_updates import ServerFleet
from gymrl.generation.vllm_wire import (
    GENERATE_PATH,
    Choice,
    image_fields,
    request_body,
    sampling_fields,
)
from gymrl.generation.weight_refusal import sender_told

if TYPE_CHECKING:
    from gymrl.config import LogprobsMode, RoutesDtype, SamplingParams, VllmConfig
    from gymrl.generation.images import PromptImages
    from gymrl.generation.weights import PauseMode, WeightSource

logger = logging.getLogger(__name__)

INSPECT_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0


class Sampled:
    """What a call has so far; the call's abort returns it."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.last = Choice()
        self.engine_prompt_ids: list[int] | None = None
        self.routed_experts: str | None = None

    def take(self, choice: Choice, on_token: TokenCallback | None) -> None:
        """One part of the answer."""
        token_ids = choice.token_ids or []
        logprobs = choice.logprobs.values() if choice.logprobs else []
        self.token_ids += token_ids
        self.logprobs += logprobs
        if choice.routed_experts is not None:
            self.routed_experts = choice.routed_experts
        if choice.finish_reason is not None:
            self.last = choice
        if choice.engine_prompt_ids is not None:
            self.engine_prompt_ids = choice.engine_prompt_ids
        if on_token is not None:
            for token_id, logprob in zip(token_ids, logprobs, strict=False):
                on_token(token_id, logprob)

    def aborted(self) -> Generated:
        """What there is, where no more will come."""
        return Generated(token_ids=self.token_ids, logprobs=self.logprobs, finish_reason="abort")


class RemoteVllmGenerator:
    """Samples from vLLM servers. Build it with :meth:`connect`.

    Args:
        config: Names the servers.
        end_ids: Tokens that end a turn.
        logprobs_mode: What the servers' log-probabilities must be.
        routes_dtype: Of the routes that they return; None leaves them out.
        model: Directory of the model that they serve, where it is known; see
            :class:`~gymrl.generation.vllm_updates.ServerFleet`.
        max_model_len: Context in tokens; None is the servers' own.
    """

    def __init__(
        self,
        config: VllmConfig,
        end_ids: Sequence[int],
        logprobs_mode: LogprobsMode,
        routes_dtype: RoutesDtype | None = None,
        model: str | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self._routes_dtype: RoutesDtype | None = routes_dtype
        self._balancer = Balancer([_root(url) for url in config.base_urls])
        self._config = config
        self._end_ids = frozenset(end_ids)
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._facts: dict[str, ServerFacts] = {}
        self._context = 0  # the servers' own
        self._max_model_len = max_model_len or 0
        self._weight_version = "unknown"
        self._closed = False
        self._calls: set[anyio.CancelScope] = set()
        self._tasks = OwnedTasks("vllm-servers")
        self._is_out = anyio.Event()
        self._client = VllmClient(config.api_key_env)
        self._fleet = ServerFleet(self._client, config, model, self._balancer, self._take_out)

    @classmethod
    async def connect(
        cls,
        config: VllmConfig,
        end_ids: Sequence[int],
        logprobs_mode: LogprobsMode = "processed",
        routes_dtype: RoutesDtype | None = None,
        model: str | None = None,
        max_model_len: int | None = None,
    ) -> Self:
        """Look at every server; those that don't answer are out until they do.

        Raises:
            ConfigError: A server gives other log-probabilities than `logprobs_mode`, or servers
                disagree about the context's length, or it is less than `max_model_len`, or a key is
                missing or not accepted.
            GenerationTransportError: None of them answers; the text says why for each.
        """
        generator = cls(config, end_ids, logprobs_mode, routes_dtype, model, max_model_len)
        try:
            await generator._open()
        except BaseException:
            await generator.close()
            raise
        return generator

    async def _open(self) -> None:
        await gather_bounded(self._look_at, self._balancer.upstreams)
        with self._balancer.lease():
            pass
        lengths = {facts.max_model_len for facts in self._facts.values()}
        if len(lengths) > 1:
            raise ConfigError(
                f"vllm.base_urls: the servers' contexts differ, {sorted(lengths)} tokens; start "
                "them with one --max-model-len",
                setting="vllm.base_urls",
            )
        self._context = lengths.pop()
        if self._max_model_len > self._context:
            raise ConfigError(
                f"max_model_len={self._max_model_len}: the servers of vllm.base_urls have a context of "
                f"{self._context} tokens",
                setting="max_model_len",
            )
        self._max_model_len = self._max_model_len or self._context
        self._probe = self._tasks.start(self._look_after(), "probe")

    @property
    def max_model_len(self) -> int:
        """Context in tokens, prompt and generation together."""
        return self._max_model_len

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        return self._end_ids

    @property
    def is_running(self) -> bool:
        """Whether some server takes calls."""
        return self.fault is None

    @property
    def fault(self) -> str | None:
        """Why no server takes calls, or None where one does."""
        if self._closed:
            return "the generator is closed"
        if len(self.out) < len(self._balancer.upstreams):
            return None
        return "no vLLM server takes calls: " + "; ".join(
            f"{u}: {why}" for u, why in self.out.items()
        )

    @property
    def weight_version(self) -> str:
        """Of the latest update; before the first, what the latest answer named."""
        return self._fleet.version or self._weight_version

    @property
    def out(self) -> dict[str, str]:
        """Servers that get no calls, and why."""
        return {u.url: u.out_because or "" for u in self._balancer.out()}

    @property
    def in_flight(self) -> dict[str, int]:
        """Calls by server."""
        return {upstream.url: upstream.in_flight for upstream in self._balancer.upstreams}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.base.Generator.generate`.

        Raises:
            GenerationTransportError: No server takes the call, or the one that took it broke off.
            DeadlineExceeded: It took longer than ``vllm.request_timeout_s``.
        """
        return await self._call(prompt_ids, None, sampling, on_token)

    async def generate_with_images(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages,
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.images.ImageGenerator.generate_with_images`.

        Raises:
            GenerationRequestError: No server has the route that takes tokens and images.
            GenerationTransportError: As for :meth:`generate`.
            DeadlineExceeded: As there.
        """
        return await self._call(prompt_ids, images, sampling, on_token)

    async def _call(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages | None,
        sampling: SamplingParams,
        on_token: TokenCallback | None,
    ) -> Generated:
        if self._closed:
            raise GenerationError("the generator is closed")
        check_prompt(prompt_ids, None)
        budget = token_budget(len(prompt_ids), sampling, self._max_model_len)
        fields = sampling_fields(sampling, budget=budget, end_ids=self._end_ids)
        sampled = Sampled()
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                with deadline(
                    self._config.request_timeout_s,
                    "the answer of a vLLM server",
                    "vllm.request_timeout_s",
                ):
                    await self._dispatch(prompt_ids, images, fields, sampled, on_token)
            finally:
                self._calls.discard(scope)
        if scope.cancelled_caught:  # by close()
            return sampled.aborted()
        if images is not None:
            check_regions(list(prompt_ids), sampled.engine_prompt_ids or [], images)
        last = sampled.last
        spans = self._fleet.renamed(last.spans)
        if spans:
            self._weight_version = spans[-1].version
        answer = generated(
            sampled.token_ids,
            sampled.logprobs,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            sampling=sampling,
            weight_versions=spans,
        )
        return with_routes(answer, sampled.routed_experts, self._routes_dtype, len(prompt_ids))

    async def _dispatch(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages | None,
        fields: dict[str, Any],
        sampled: Sampled,
        on_token: TokenCallback | None,
    ) -> None:
        tried = set() if images is None else self._without_images()
        shown: dict[str, Any] = {}
        if images is not None:
            shown = await anyio.to_thread.run_sync(image_fields, prompt_ids, images)
        while True:
            with self._balancer.lease(tried) as upstream:
                tried.add(upstream.url)
                facts = self._facts[upstream.url]
                body = request_body(
                    facts.path, facts.model, prompt_ids, fields, stream=on_token is not None
                )
                body |= shown
                try:
                    await self._ask(upstream.url, facts.path, body, sampled, on_token)
                except RefusedError as error:
                    if error.status != 429:
                        self._take_out(upstream, str(error))
                    logger.info("%s; trying another server", error)
                except GenerationTransportError as error:
                    if error.status is None:
                        self._take_out(upstream, str(error))
                    else:
                        # One call failed; whether all do is for the server to say.
                        await self._look_again(upstream)
                    raise
                else:
                    if self._fleet.was_restarted(sampled.last.spans):
                        self._take_out(upstream, "it was started again, with its first weights")
                    return

    def _without_images(self) -> set[str]:
        """Servers that take no images with tokens."""
        without = {url for url, facts in self._facts.items() if facts.path != GENERATE_PATH}
        if without and len(without) == len(self._facts):
            raise GenerationRequestError(
                f"{', '.join(sorted(without))}: images need vLLM's {GENERATE_PATH}; start the "
                "server with --enable-scale-out",
                param="vllm.base_urls",
            )
        return without

    async def _ask(
        self,
        url: str,
        path: str,
        body: dict[str, Any],
        sampled: Sampled,
        on_token: TokenCallback | None,
    ) -> None:
        choices = self._client.choices(url, path, body)
        async with closing_stream(choices):
            async for choice in choices:
                sampled.take(choice, on_token)
        if sampled.last.finish_reason is None:
            raise GenerationTransportError(
                f"{url} ended its answer after {len(sampled.token_ids)} tokens, before the "
                "generation was whole",
                url=url,
            )

    async def weight_takers(self) -> list[str]:
        """Servers that a transfer of weights can go to now: a sender is made for so many engines.

        They are those that get calls, and those that are left out but answer that they take
        transfers: with them the sender's weights bring them back.
        """
        return await self._fleet.takers()

    async def update_weights(
        self, source: WeightSource, version: str, *, pause: PauseMode = "keep"
    ) -> None:
        """See :meth:`gymrl.generation.weights.UpdatableGenerator.update_weights`.

        ``vllm.update_servers`` allows it. Every server that gets calls takes the weights, or each
        goes back to those that it had; one that can't is left out. One that is gone meanwhile gets
        them before it gets calls again; when they came from a trainer, with the next update.

        A transfer is for the servers that get calls, in the order of ``vllm.base_urls``, or for those
        of :meth:`weight_takers`: the i-th of them is its engine i.

        Raises:
            WeightUpdateError: They were not taken, or servers are not to be updated. Its `serving`
                is None when no server is left, its `num_engines` says for how many a sender must
                be made.
        """
        try:
            async with sender_told(source):
                self._check_open(source, version)
                brought = await self._fleet.update(source, version, pause)
        finally:
            if self._balancer.out():
                self._is_out.set()
        await gather_bounded(
            self._look_again, [u for u in self._balancer.out() if u.url in brought]
        )

    def _check_open(self, source: WeightSource, version: str) -> None:
        if self._closed:
            raise WeightUpdateError("the generator is closed", version=version, source=str(source))

    async def adopt_weights(self, version: str) -> None:
        """Take servers that name this version for up to date, and leave out the others.

        For a generator that stands in for one that died: the servers still have what a trainer
        sent to that one.

        Raises:
            WeightsLostError: None of them names it.
            WeightUpdateError: They are not to be updated.
        """
        await self._fleet.adopt(version)

    def _take_out(self, upstream: Upstream, reason: str) -> None:
        if upstream.out_because is None:
            logger.warning("leaving out %s: %s", upstream.url, reason)
        upstream.out_because = reason
        self._is_out.set()

    async def _look_after(self) -> None:
        """Put servers back in that are well again."""
        while True:
            await self._is_out.wait()
            await gather_bounded(self._look_again, self._balancer.out())
            if not self._balancer.out():
                self._is_out = anyio.Event()
                continue
            await anyio.sleep(self._config.probe_interval_s)

    async def _look_again(self, upstream: Upstream) -> None:
        try:
            await self._look_at(upstream)
        except ConfigError as error:
            upstream.out_because = str(error)
            logger.warning("leaving out %s: %s", upstream.url, error)
        if upstream.out_because is None:
            logger.info("%s answers again", upstream.url)

    async def _look_at(self, upstream: Upstream) -> None:
        """Take a server in, or out, as it is now.

        Raises:
            ConfigError: It is well, but not what the configuration says, or it does not take the
                key.
        """
        try:
            facts = await self._inspected(upstream.url)
        except UnauthorizedError as error:
            raise ConfigError(str(error), setting="vllm.api_key_env") from error
        except (GenerationError, DeadlineExceeded) as error:
            self._take_out(upstream, str(error))
            return
        if facts.logprobs_mode != self._logprobs_mode:
            raise ConfigError(
                f"{upstream.url} gives {facts.logprobs_mode} log-probabilities where "
                f"logprobs_mode={self._logprobs_mode!r}; start it with "
                f"--logprobs-mode {self._logprobs_mode}_logprobs",
                setting="logprobs_mode",
            )
        if self._context not in (0, facts.max_model_len):
            raise ConfigError(
                f"{upstream.url} has a context of {facts.max_model_len} tokens now, the others "
                f"have {self._context}",
                setting="vllm.base_urls",
            )
        self._facts[upstream.url] = facts
        upstream.out_because = None

    async def _inspected(self, url: str) -> ServerFacts:
        """What a server is, now that it has the weights of the day."""
        while True:
            epoch = self._fleet.epoch
            await self._fleet.catch_up(url)
            with deadline(INSPECT_TIMEOUT_S, f"an answer of {url}"):
                facts = await self._client.inspect(url)
            if epoch == self._fleet.epoch:
                return facts

    async def close(self) -> None:
        """See :meth:`gymrl.generation.base.Generator.close`; the servers run on."""
        self._closed = True
        for scope in self._calls:
            scope.cancel()
        await self._tasks.close()
        await close_within(self._client.close(), CLOSE_TIMEOUT_S, "connections to vLLM servers")
        self._fleet.close()


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
