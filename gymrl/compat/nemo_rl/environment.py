"""``NemoGym``: the Gym workers as one object with NeMo RL's methods."""

from __future__ import annotations

import atexit
import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from gymrl.compat.nemo_rl.media import has_image_processor, omit_initial_media, pack_media
from gymrl.compat.nemo_rl.settings import refuse_option, rollout_config
from gymrl.concurrency import closing_stream, stream_across
from gymrl.errors import ConfigError, RowTypeError, ServerError
from gymrl.gym.shards import row_route
from gymrl.media import ImageLifter, MediaExchange, restore_images
from gymrl.media.batches import BatchImages
from gymrl.media.processing import ImageProcessor
from gymrl.rollout.encode import encode_body
from gymrl.rollout.engine import RolloutEngine
from gymrl.rollout.fleet import Fleet
from gymrl.rollout.merge import merge_streams
from gymrl.rollout.retry import error_of
from gymrl.tensors import message_log
from gymrl.types import Failure, Row, RowResult, Trajectory

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from gymrl.compat.nemo_rl.settings import NemoGymConfig, TokenizerType
    from gymrl.config import RolloutConfig
    from gymrl.gym.shards import ShardSet
    from gymrl.rollout.instance import Instance
    from gymrl.scoring import ScoringConfig


class BorrowedFleet(Fleet):
    """The processes of a :class:`NemoGym` for an engine that neither starts nor ends them.

    Args:
        owner: Whose they are.
        config: As the owner's.
        max_model_len: The policy's context in tokens, which only the caller knows.
    """

    def __init__(self, owner: Fleet, config: RolloutConfig, max_model_len: int | None) -> None:
        super().__init__(config)
        self._owner = owner
        self._limit = max_model_len

    @property
    def shards(self) -> ShardSet[Instance]:
        """The owner's."""
        return self._owner.shards

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The owner's."""
        return self._owner.instances

    @property
    def max_model_len(self) -> int | None:
        """As given."""
        return self._limit

    async def start(self) -> None:
        """Nothing: the owner has done so."""

    async def close(self) -> None:
        """Nothing: the owner will do so."""


class NemoGym:
    """Gym's servers, and the workers that roll out through them.

    Building one is cheap; :meth:`_spinup` starts processes, :meth:`shutdown` ends them, and
    ``with`` does the latter. Calls may come from any thread and any event loop; the methods that
    are not async block until they are done.

    Args:
        cfg: See :class:`NemoGymConfig`.

    Raises:
        ConfigError: A setting is missing or wrong.
        UnsupportedOptionError: A setting asks for what this road does not have.
    """

    def __init__(self, cfg: NemoGymConfig) -> None:
        self.cfg = cfg
        rollout_config(cfg)  # refuses what can't work, before any process
        self._tokenizer: str | None = None
        self._processor: str | None = None
        self._images: ImageProcessor | None = None
        self._stack: contextlib.ExitStack | None = None
        self._files = contextlib.ExitStack()
        self._portal: BlockingPortal | None = None
        self._fleet: Fleet | None = None
        self._config: RolloutConfig | None = None
        self._engine: tuple[tuple[Any, ...], RolloutEngine] | None = None

    def set_tokenizer(self, tokenizer: TokenizerType | str) -> None:
        """Name the tokenizer that decodes texts; every worker loads it once, when it starts.

        Args:
            tokenizer: A fast tokenizer of transformers, or a directory or hub id. Where it is a
                processor that reads images, rollouts have their images, and each worker loads it
                to hold tokens and images to each other.

        Raises:
            ServerError: The workers run already; call it before :meth:`_spinup`.
            ConfigError: The tokenizer has no ``tokenizer.json`` form (it is a slow one).
            UnsupportedOptionError: It is a processor that can't be used for images.
        """
        if self._stack is not None:
            raise ServerError(
                "the workers have started with their tokenizer; call set_tokenizer before _spinup"
            )
        if isinstance(tokenizer, str):
            self._tokenizer = tokenizer
            return
        inner = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one inside
        backend = getattr(inner, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"a {type(tokenizer).__name__} has no tokenizer.json form; use a fast tokenizer, "
                "or name a directory that holds tokenizer.json",
                setting="tokenizer",
            )
        folder = self._files.enter_context(tempfile.TemporaryDirectory(prefix="gymrl-tokenizer-"))
        path = Path(folder) / "tokenizer.json"
        backend.save(str(path))
        self._tokenizer = str(path)
        if has_image_processor(tokenizer):
            pads = bool(self.cfg.get("pad_dynamic_image_shapes"))
            self._images = ImageProcessor(tokenizer, pad_dynamic_image_shapes=pads)
            self._processor = str(Path(folder) / "processor")
            tokenizer.save_pretrained(self._processor)

    def _spinup(self) -> None:
        """Start the workers and their servers, or find the servers of ``head_server``.

        Blocks; from async code run it in a thread.

        Raises:
            DeadlineExceeded: Not all was ready in time; names what was not.
            GymrlError: What failed to start.
        """
        if self._stack is not None:
            raise ServerError("this environment is spun up already; shut it down first")
        config = rollout_config(self.cfg, self._tokenizer, self._processor)
        fleet = Fleet(config)
        with contextlib.ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal("asyncio"))
            portal.call(fleet.start)
            _ = stack.callback(portal.call, fleet.close)
            self._portal, self._fleet, self._config = portal, fleet, config
            self._stack = stack.pop_all()
        # A script that ends without shutdown would wait for ever for the thread of the loop.
        _ = atexit.register(self.shutdown)

    def _require_spinup(self) -> tuple[BlockingPortal, Fleet, RolloutConfig]:
        if self._portal is None or self._fleet is None or self._config is None:
            raise ServerError("this environment is not spun up: call _spinup first")
        return self._portal, self._fleet, self._config

    def health_check(self) -> None:
        """Ask every worker whether it and its servers are well. Blocks.

        Raises:
            GymrlError: The first that is not, named; a `RuntimeError`.
            DeadlineExceeded: One did not answer.
        """
        portal, fleet, _ = self._require_spinup()
        portal.call(fleet.health_check)

    def shutdown(self) -> None:
        """End every process that was started. Blocks; safe to call twice."""
        atexit.unregister(self.shutdown)
        stack, self._stack = self._stack, None
        self._portal = self._fleet = self._config = self._engine = None
        try:
            if stack is not None:
                stack.close()
        finally:
            self._files.close()

    def __enter__(self) -> NemoGym:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def run_rollouts(
        self,
        nemo_gym_examples: list[dict[str, Any]],
        timer_prefix: str,
        deduplicate_multimodal_data: bool = False,
    ) -> AsyncGenerator[tuple[int, dict[str, Any], dict[str, float] | None], None]:
        """Roll rows out as they are, all on one worker; results in the order of completion.

        Workers take turns over calls. Nothing is stamped on the rows, nothing is tried again, nothing is scored: that is what
        :func:`run_async_nemo_gym_rollout` does. Leaving early cancels what is under way.

        Args:
            nemo_gym_examples: Rows; ``_rowidx`` says what their results are called, else their
                place in the list does.
            timer_prefix: Put before the timings' names.
            deduplicate_multimodal_data: Leave the media of a prompt's images out of its result,
                which is marked then; :func:`.message_media.reattach_original_multimodal_payloads` puts
                them back. Between processes each image crosses once in any case.

        Yields:
            The row's index; its result (``message_log``, ``input_message_log``, ``full_result``,
            ``agent_ref``); and, on the last row, the timings. Where the tokenizer is a processor,
            user messages have the media of their images.

        Raises:
            RowTypeError, RowValueError: A row is no Gym row, or has no route.
            RolloutFailure: A row failed; a `RuntimeError`.
            ServerError: The environment is not spun up.
        """
        portal, fleet, _ = self._require_spinup()
        shards = fleet.shards
        lifter = ImageLifter()
        rows = [
            _row_as_it_is(example, place, lifter) for place, example in enumerate(nemo_gym_examples)
        ]
        if not rows:
            return
        examples = {row.index: nemo_gym_examples[place] for place, row in enumerate(rows)}
        stream = stream_across(portal, lambda: _row_results(rows, shards, timer_prefix))
        async with closing_stream(stream) as results:
            async for result in results:
                if isinstance(result.outcome, Failure):
                    raise error_of(result.outcome)
                made = row_result(result.outcome, self._images)
                if deduplicate_multimodal_data:
                    omit_initial_media(made, result.outcome, examples[result.index])
                yield result.index, made, result.timings

    def step(self, message_log_batch: Any, metadata: Any) -> Any:
        """Not there: Gym's agents take the steps.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("Gym's agents take the steps; rows go through run_rollouts")

    def global_post_process_and_metrics(self, batch: Any) -> Any:
        """Not there: metrics come with the rollouts.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("metrics come with the rollouts, in rollout_metrics")

    def engine_for(
        self,
        scoring: ScoringConfig,
        encode: Callable[[str], Sequence[int]] | None,
        max_model_len: int | None,
        tokenizer: object,
    ) -> RolloutEngine:
        """An engine over this environment's workers; the one of the last call where nothing changed.

        Args:
            scoring: What becomes of rewards.
            encode: Text to token ids.
            max_model_len: The policy's context.
            tokenizer: What `encode` is made of; another one makes another engine.
        """
        _, fleet, config = self._require_spinup()
        key = (scoring, max_model_len, id(tokenizer))
        if self._engine is None or self._engine[0] != key:
            borrowed = BorrowedFleet(fleet, config, max_model_len)
            engine = RolloutEngine(config, scoring=scoring, encode=encode, fleet=borrowed)
            self._engine = (key, engine)
        return self._engine[1]

    def images_for(self, tokenizer: object) -> ImageProcessor | None:
        """What makes media of the rollouts' images; None where they are of text.

        Args:
            tokenizer: Used where the workers read images (``media``) and have no processor.

        Raises:
            UnsupportedOptionError: It is a processor that can't be used for images.
        """
        reads = self.cfg.get("media") is not None
        if self._images is None and reads and has_image_processor(tokenizer):
            pads = bool(self.cfg.get("pad_dynamic_image_shapes"))
            self._images = ImageProcessor(tokenizer, pad_dynamic_image_shapes=pads)
        return self._images

    @property
    def portal(self) -> BlockingPortal:
        """The loop that the workers are driven from."""
        return self._require_spinup()[0]


def spinup_nemo_gym_actor(
    env_configs: Mapping[str, Any],
    base_urls: list[str],
    model_name: str,
    *,
    tokenizer: TokenizerType | str,
    enable_router_replay: bool,
    routed_experts_dtype: str,
    use_fastokens: bool,
) -> NemoGym:
    """A :class:`NemoGym` that is spun up and has its tokenizer. Blocks.

    Args:
        env_configs: The ``env`` block; its ``nemo_gym`` is Gym's global configuration and the
            detection settings beside it.
        base_urls: The policy's OpenAI-compatible servers, with ``/v1``.
        model_name: What they serve.
        tokenizer: See :meth:`NemoGym.set_tokenizer`.
        enable_router_replay: See ``require_routed_experts`` of :class:`NemoGymConfig`.
        routed_experts_dtype: Of the routes; see there.
        use_fastokens: No effect: ids are decoded by the Rust tokenizer in any case.

    Raises:
        UnsupportedOptionError: ``num_gpu_nodes`` is above 0 (no nodes are reserved here: a server
            with a GPU is started where it should run).
        ConfigError: A setting is missing or wrong.
        GymrlError: Something failed to start; what was started is ended.
    """
    block = dict(env_configs.get("nemo_gym") or {})
    refuse_option(block, "num_gpu_nodes", "no nodes are reserved; start such servers yourself")
    cfg: NemoGymConfig = {
        "model_name": model_name,
        "base_urls": list(base_urls),
        "initial_global_config_dict": block,
        "require_routed_experts": enable_router_replay,
        "routed_experts_dtype": routed_experts_dtype,
        "use_fastokens": use_fastokens,
    }
    for name in _DETECTION:
        if name in block:
            cfg[name] = block.pop(name)  # type: ignore[literal-required]  # keys of the dictionary
    environment = NemoGym(cfg)
    try:
        environment.set_tokenizer(tokenizer)
        environment._spinup()
    except BaseException:
        environment.shutdown()
        raise
    return environment


# Settings of the `env.nemo_gym` block that are the environment's own and not Gym's.
_DETECTION = (
    "invalid_tool_call_patterns",
    "thinking_tags",
    "pad_dynamic_image_shapes",
    "media",
    "port_range_low",
    "port_range_high",
    "tokenizer_config",
    "num_workers",
    "in_process",
)


def row_result(trajectory: Trajectory, images: ImageProcessor | None = None) -> dict[str, Any]:
    """One row's result as NeMo RL's environment hands it over, its token fields tensors.

    Args:
        trajectory: What the row gave.
        images: Makes media of its images, for its user messages; None leaves them out.
    """
    messages = message_log(trajectory)
    if images is not None:
        BatchImages(images).attach(trajectory, messages)
        pack_media([messages], images)
    result = restore_images(trajectory.result, trajectory.media)
    full_result: dict[str, Any] = msgspec.json.decode(result)
    full_result["reward"] = trajectory.reward.total
    return {
        "message_log": messages,
        "input_message_log": messages[:1],
        "full_result": full_result,
        "agent_ref": {"type": "responses_api_agents", "name": trajectory.agent},
    }


def _row_as_it_is(example: dict[str, Any], place: int, lifter: ImageLifter) -> Row:
    params = example.get("responses_create_params")
    if not isinstance(params, dict):
        raise RowTypeError(
            f"row {place}: responses_create_params is a {type(params).__name__}; "
            "a dictionary is needed",
            row=place,
        )
    index = example.get("_rowidx", place)
    if isinstance(index, bool) or not isinstance(index, int):
        raise RowTypeError(f"row {place}: _rowidx={index!r}: an integer is needed", row=place)
    body, media = lifter.lift(encode_body(example, index))
    return Row(
        index=index,
        task_index=0,  # images cross once for the rows of a task: here, of the call
        rollout_index=0,
        route=row_route(example, index),
        rollout_id=str(example.get("_ng_rollout_id") or f"row-{index}"),
        body=body,
        media=media,
    )


async def _row_results(
    rows: list[Row], shards: ShardSet[Instance], timer_prefix: str
) -> AsyncGenerator[RowResult, None]:
    (shard,) = {shards.shard_of(row.route, row.index) for row in rows}
    label, handle = shard.next_instance()
    exchange = MediaExchange(rows)
    stream = handle.stream("run_rollouts", exchange.thin_rows(rows), timer_prefix)
    async with closing_stream(merge_streams([(label, stream)])) as merged:
        async for tagged in merged:
            yield exchange.full_result(tagged.item)
