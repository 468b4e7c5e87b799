"""Generators and environments as native rollouts use them: several of each, errors as values.

What a generator or an environment raises belongs to the samples of that call and is handed back
in their places. A broken contract (:class:`~gymrl.errors.EnvironmentContractError`) is nobody's
sample and ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from gymrl.concurrency import deadline, gather_bounded
from gymrl.environments.base import Step, steps_of
from gymrl.environments.local import OpenEnvironment, open_environment
from gymrl.errors import (
    ConfigError,
    DeadlineExceeded,
    EnvironmentContractError,
    GenerationError,
    GenerationRequestError,
    RolloutTimeout,
)
from gymrl.generation.images import ImageGenerator

if TYPE_CHECKING:
    from gymrl.config import SamplingParams
    from gymrl.generation.base import Generated, Generator
    from gymrl.generation.images import PromptImages
    from gymrl.rollout.episode import Episode, GenerationRequest


@runtime_checkable
class GeneratesBatches(Protocol):
    """A generator that takes a whole batch in one call; used by the ``batched`` scheduler."""

    async def generate_batch(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]
    ) -> Sequence[Generated | Exception]:
        """One continuation for each prompt, or the error of that prompt alone."""
        ...


@runtime_checkable
class GeneratesImageBatches(Protocol):
    """A generator that takes a whole batch in one call, prompts with images among it."""

    async def generate_batch_with_images(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[PromptImages | None],
        samplings: Sequence[SamplingParams],
    ) -> Sequence[Generated | Exception]:
        """One continuation for each prompt, or the error of that prompt alone."""
        ...


class GeneratorPool:
    """The generators of a run. A sample stays with one, so that its prefix stays cached there.

    Args:
        generators: At least one; they take turns over the rows.
        timeout_s: Deadline of one call; None: none.

    Raises:
        ConfigError: There is none.
    """

    def __init__(self, generators: Sequence[Generator], timeout_s: float | None) -> None:
        if not generators:
            raise ConfigError("give at least one generator", setting="generator")
        self._generators = tuple(generators)
        self._timeout_s = timeout_s

    @property
    def max_model_len(self) -> int:
        """The shortest context of all."""
        return min(generator.max_model_len for generator in self._generators)

    def check_images(self) -> None:
        """Refuse prompts with images where a generator takes none.

        Raises:
            ConfigError: Names its type.
        """
        for generator in self._generators:
            if not isinstance(generator, ImageGenerator):
                raise ConfigError(
                    f"prompts show images, and {type(generator).__name__} samples from tokens "
                    "only; give a generator with generate_with_images",
                    setting="generator",
                )

    def worker_of(self, row: int) -> int:
        """Which generator serves a row."""
        return row % len(self._generators)

    async def generate(self, row: int, request: GenerationRequest) -> Generated | Exception:
        """One call; what it raised is returned."""
        generator = self._generators[self.worker_of(row)]
        try:
            with deadline(self._timeout_s, f"the generation for row {row}", "generation_timeout_s"):
                return await _generate(generator, request)
        except Exception as error:  # noqa: BLE001 - it is the sample's outcome, handed back typed
            return _timeout_as_failure(error)

    async def generate_all(
        self, rows: Sequence[int], requests: Sequence[GenerationRequest]
    ) -> list[Generated | Exception]:
        """One answer for each request, in order, through batch calls where a generator has them."""
        answers: list[Generated | Exception | None] = [None] * len(rows)

        async def serve(worker: int) -> None:
            places = [i for i, row in enumerate(rows) if self.worker_of(row) == worker]
            if not places:
                return
            generator = self._generators[worker]
            together, alone = self._split(generator, places, requests)
            if together:
                found = await self._batch(generator, [requests[i] for i in together])
                for place, answer in zip(together, found, strict=True):
                    answers[place] = answer
            singles = await gather_bounded(lambda i: self.generate(rows[i], requests[i]), alone)
            for place, answer in zip(alone, singles, strict=True):
                answers[place] = answer

        await gather_bounded(serve, range(len(self._generators)))
        return [answer for answer in answers if answer is not None]

    @staticmethod
    def _split(
        generator: Generator, places: list[int], requests: Sequence[GenerationRequest]
    ) -> tuple[list[int], list[int]]:
        """Which requests a generator takes in one call, and which one by one."""
        if isinstance(generator, GeneratesImageBatches):
            return places, []
        if not isinstance(generator, GeneratesBatches):
            return [], places
        together = [place for place in places if requests[place].images is None]
        return together, [place for place in places if requests[place].images is not None]

    async def _batch(
        self, generator: Any, requests: Sequence[GenerationRequest]
    ) -> Sequence[Generated | Exception]:
        prompts = [request.prompt_ids for request in requests]
        samplings = [request.sampling for request in requests]
        images = [request.images for request in requests]
        try:
            with deadline(
                self._timeout_s, f"a batch of {len(requests)} generations", "generation_timeout_s"
            ):
                answers: Sequence[Generated | Exception]
                if isinstance(generator, GeneratesImageBatches) and any(images):
                    answers = await generator.generate_batch_with_images(prompts, images, samplings)
                else:
                    answers = await generator.generate_batch(prompts, samplings)
        except Exception as error:  # noqa: BLE001 - the outcome of every sample in the batch
            return [_timeout_as_failure(error)] * len(requests)
        if len(answers) != len(requests):
            wrong = GenerationError(
                f"generate_batch gave {len(answers)} answers for {len(requests)} prompts"
            )
            return [wrong] * len(requests)
        return answers


async def _generate(generator: Generator, request: GenerationRequest) -> Generated:
    if request.images is None:
        return await generator.generate(request.prompt_ids, request.sampling)
    if not isinstance(generator, ImageGenerator):
        raise GenerationRequestError(
            f"the prompt shows {len(request.images.images)} images, and "
            f"{type(generator).__name__} samples from tokens only"
        )
    return await generator.generate_with_images(
        request.prompt_ids, request.images, request.sampling
    )


class EnvironmentSet:
    """The environments of a run by task name.

    Args:
        environments: By task name; see :func:`gymrl.environments.local.open_environment`.
        timeout_s: Deadline of one step; None: none.
        max_threads: Steps of a blocking environment at a time.
    """

    def __init__(
        self, environments: Mapping[str, Any], timeout_s: float | None, max_threads: int
    ) -> None:
        self._open: dict[str, OpenEnvironment] = {
            name: open_environment(environment, name=name, max_threads=max_threads)
            for name, environment in environments.items()
        }
        self._timeout_s = timeout_s
        self._has_parts: dict[str, bool] = {}

    @property
    def task_names(self) -> list[str]:
        """Names that prompts may use, sorted."""
        return sorted(self._open)

    async def step(self, episodes: Sequence[Episode]) -> list[Step | Exception]:
        """One step of every episode: one call an environment, all environments at once.

        Returns:
            In the order of `episodes` what the environment said, or what its call raised.

        Raises:
            EnvironmentContractError: An answer is not what the protocol says, or an environment
                gives numbers to some samples of the run and reward components to others.
        """
        places: dict[str, list[int]] = {}
        for place, episode in enumerate(episodes):
            places.setdefault(episode.sample.task_name, []).append(place)
        found: list[Step | Exception | None] = [None] * len(episodes)

        async def one(name: str) -> None:
            chosen = [episodes[place] for place in places[name]]
            for place, step in zip(places[name], await self._call(name, chosen), strict=True):
                found[place] = step

        if len(places) == 1:
            await one(next(iter(places)))
        else:
            await gather_bounded(one, places)
        return [step for step in found if step is not None]

    async def _call(self, name: str, episodes: Sequence[Episode]) -> Sequence[Step | Exception]:
        try:
            with deadline(
                self._timeout_s, f"a step of environment {name!r}", "environment_timeout_s"
            ):
                answer = await self._open[name].step(
                    [episode.message_log() for episode in episodes],
                    [episode.metadata for episode in episodes],
                )
        except EnvironmentContractError:
            raise
        except Exception as error:  # noqa: BLE001 - the outcome of the samples in this call
            return [_timeout_as_failure(error)] * len(episodes)
        steps = steps_of(answer)
        for step in steps:
            self._check_kind(name, step)
        return steps

    def _check_kind(self, name: str, step: Step) -> None:
        if step.reward is None:
            return
        has_parts = isinstance(step.reward, dict)
        if self._has_parts.setdefault(name, has_parts) != has_parts:
            raise EnvironmentContractError(
                f"environment {name!r} gave numbers to some samples and reward components to "
                "others; give every sample the same kind",
                task_name=name,
            )

    async def metrics(self, name: str, batch: dict[str, Any]) -> dict[str, float]:
        """What an environment says about all its finished episodes, as ``<task name>/<metric>``."""
        _, found = await self._open[name].global_post_process_and_metrics(batch)
        return {f"{name}/{metric}": value for metric, value in found.items()}


def _timeout_as_failure(error: Exception) -> Exception:
    if not isinstance(error, DeadlineExceeded):
        return error
    failure = RolloutTimeout(error.message, seconds=error.seconds, setting=error.setting)
    failure.__cause__ = error
    return failure
