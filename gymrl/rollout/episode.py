"""One native episode as a state machine: generate, step, repeat.

The machine does no I/O and knows no scheduler. Whoever drives it asks for the next request, hands
the generation in, steps the environment and hands that in::

    while (request := episode.next_request()) is not None:
        episode.take_generation(await generator.generate(request.prompt_ids, request.sampling))
        step = await environment.step(episode.message_log(), episode.metadata)
        episode.take_step(step, await read_images(step.observation))
    trajectory = episode.trajectory()

Every rule of the loop is in here and nowhere else:

* A response cut at a token limit makes the sample *truncated*; the environment still sees it and
  gives its reward; then the episode ends.
* An observation that does not fit is cut to what fits, the sample is truncated, the episode ends.
  An image that does not fit whole is left out. No request has a budget below one token.
* *Terminated naturally*: the environment said so and nothing was truncated. *Max turns reached*:
  all turns are used, and neither.
* Stop texts: a list replaces, None keeps. Metadata: None keeps.
* Component rewards add up by name; the total is their sum. Mixing them with plain numbers is
  refused.

An observation after the last answer trains nothing and is no part of the trajectory's tokens; the
result keeps it, with its tokens.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gymrl.config import SamplingParams
from gymrl.errors import (
    EnvironmentContractError,
    NoGenerationError,
    RolloutInfraFailure,
    RoutedExpertsError,
)
from gymrl.generation.images import PromptImages
from gymrl.media.parts import content_text, copied
from gymrl.numbers import exact_sum, reward_number
from gymrl.rollout.native_answers import (
    check_generated,
    has_broken_tool_call,
    has_malformed_thinking,
)
from gymrl.rollout.native_images import (
    EpisodeImages,
    PromptSegment,
    format_of,
    lifted,
    recorded_message,
)
from gymrl.rollout.native_result import EpisodeFacts, encode_result, sound_message, sound_text
from gymrl.routed_experts import TURNS_WITHOUT_ROUTES, RouteFormatError, RouteSequence
from gymrl.types import Reward, Trajectory, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.environments.base import Message, MessageLog, Step
    from gymrl.generation.base import Generated
    from gymrl.generation.images import ConversationImage
    from gymrl.media import EncodedImage
    from gymrl.rollout.native_rows import NativeSample
    from gymrl.rollout.native_text import TextCodec


class EpisodeRules(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that all episodes of a run share.

    Attributes:
        max_seq_len: Tokens of a sample, prompts and answers together; at most the generator's
            context.
        max_turns: Generations of an episode; None: no limit but the tokens.
        sampling: Of every call. Its stop texts come on top of the episode's own.
        require_routed_experts: An answer without routes fails the episode.
    """

    max_seq_len: int
    max_turns: int | None = None
    sampling: SamplingParams = SamplingParams()
    require_routed_experts: bool = False


class GenerationRequest(msgspec.Struct, frozen=True):
    """One call to make; `images` are those that the prompt shows, None without any."""

    prompt_ids: list[int]
    sampling: SamplingParams
    images: PromptImages | None = None


class Episode:
    """The state of one attempt; a second attempt is a second episode.

    Args:
        sample: What to attempt; its messages and metadata are copied.
        rules: The run's limits.
        codec: Text to tokens and back.

    Raises:
        NoGenerationError: The prompt leaves no room for one token within `max_seq_len`.
    """

    def __init__(self, sample: NativeSample, rules: EpisodeRules, codec: TextCodec) -> None:
        self.sample = sample
        self.metadata: Any = copy.deepcopy(sample.metadata)
        self.turn = 0
        self._rules = rules
        self._codec = codec
        self._log: MessageLog = [copied(message) for message in sample.messages]
        self._format = format_of(codec)
        self._images = EpisodeImages(self._format)
        self._shown: dict[int, list[EncodedImage]] = {}
        self._stops = tuple(sample.stop_strings or ())
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._turns: list[Turn] = []
        self._turn_start = 0
        self._routes = RouteSequence()
        self._append(sample.prompt, sample.prompt_text)
        self._rewards: list[float] = []
        self._components: dict[str, float] | None = None
        self._facts = EpisodeFacts(task_name=sample.task_name, prompt_tokens=len(self._token_ids))
        self._notes: dict[str, int] = {}
        self._final_observation: tuple[Message, PromptSegment] | None = None
        self._done = False
        if self._room <= 0:
            raise NoGenerationError(
                f"the prompt of {len(self._token_ids)} tokens leaves no room to generate within "
                f"max_seq_len={rules.max_seq_len}; shorten the prompt or raise max_seq_len",
                prompt_length=len(self._token_ids),
            )

    @property
    def num_images(self) -> int:
        """Images among its tokens."""
        return self._images.count

    @property
    def _room(self) -> int:
        return self._rules.max_seq_len - len(self._token_ids)

    @property
    def is_done(self) -> bool:
        """Whether there is no further call to make."""
        return self._done

    def next_request(self) -> GenerationRequest | None:
        """The next call to make, None when the episode is over. Its budget is at least 1."""
        if self._done:
            return None
        profile = self._rules.sampling
        limit = self._room if profile.max_tokens is None else min(profile.max_tokens, self._room)
        stops = tuple(dict.fromkeys((*profile.stop, *self._stops)))
        seed = self.sample.seed
        return GenerationRequest(
            list(self._token_ids),
            msgspec.structs.replace(
                profile,
                max_tokens=limit,
                stop=stops,
                # Turns differ in their prompts, but must not draw the same numbers.
                seed=None if seed is None else (seed + self.turn) & 0x7FFF_FFFF,
            ),
            self._images.shown(),
        )

    def take_generation(self, generated: Generated) -> None:
        """Append an answer, token by token as it was sampled.

        Raises:
            BadLogprobsError: Log-probabilities are too few, missing or not finite.
            GenerationError: There are more tokens than were asked for.
            MediaError: There are tokens of images among them.
            RolloutInfraFailure: The generator gave up on the call.
            RoutedExpertsError: Its routes do not fit the tokens, or it has none and must.
        """
        if generated.finish_reason == "abort":
            raise RolloutInfraFailure("the generator was closed during the call", turn=self.turn)
        check_generated(generated, self._room, self.turn)
        self._images.end_turn(generated.token_ids, self.turn)
        start = len(self._token_ids)
        self._take_routes(generated, start - self._turn_start)
        self._token_ids += generated.token_ids
        self._logprobs += generated.logprobs
        text = sound_text(self._codec.decode(generated.token_ids), self._notes)
        self._log.append({"role": "assistant", "content": text})
        self._turns.append(
            Turn(
                start=self._turn_start,
                generation_start=start,
                end=len(self._token_ids),
                prompt_text=self._prompt_text,
                generation_text=text,
                is_invalid_tool_call=has_broken_tool_call(text),
                has_malformed_thinking=has_malformed_thinking(text),
            )
        )
        self._turn_start = len(self._token_ids)
        self._facts.truncated = generated.finish_reason == "length"
        if not generated.token_ids:
            self._notes["empty_generations"] = self._notes.get("empty_generations", 0) + 1

    def _take_routes(self, generated: Generated, num_added: int) -> None:
        routes = generated.routed_experts
        if routes is None and generated.token_ids and self._rules.require_routed_experts:
            raise RoutedExpertsError(
                f"turn {self.turn}: the generator gave no routes, which require_routed_experts "
                "asks for; set return_routed_experts where it is configured (the model must be a "
                "mixture of experts)",
                turn=self.turn,
            )
        try:
            self._routes.add(routes, num_added, len(generated.token_ids))
        except RouteFormatError as error:
            raise RoutedExpertsError(f"turn {self.turn}: {error}", turn=self.turn) from error

    def message_log(self) -> MessageLog:
        """The conversation so far, as copies that the environment may keep."""
        return [copied(message) for message in self._log]

    def take_step(self, step: Step, images: Sequence[ConversationImage] = ()) -> None:
        """Take what the environment said about the newest answer.

        Args:
            step: What it said.
            images: Those that its observation shows, in order.

        Raises:
            MediaError: The observation's tokens do not show its images.
            RewardContractError: The reward is no finite number; the sample can't be scored.
            EnvironmentContractError: Component rewards and plain ones are mixed in one episode.
        """
        self._add_reward(step.reward)
        if step.metadata is not None:
            self.metadata = step.metadata
        if step.next_stop_strings is not None:
            self._stops = tuple(step.next_stop_strings)
        if step.answer is not None:
            self._facts.answer = sound_text(str(step.answer), self._notes)
        self.turn += 1
        self._facts.terminated = step.terminated
        is_last = self.turn == self._rules.max_turns
        ends = step.terminated or self._facts.truncated or is_last
        self._observe(step.observation, images, ends=ends)
        if self._facts.truncated or step.terminated or is_last:
            self._done = True
        self._facts.max_turns_reached = (
            is_last and not step.terminated and not self._facts.truncated
        )

    def _add_reward(self, reward: float | dict[str, float | None] | None) -> None:
        has_parts = isinstance(reward, dict)
        if self._rewards and has_parts != (self._components is not None):
            raise EnvironmentContractError(
                f"environment {self.sample.task_name!r} gave a number on one turn and reward "
                "components on another; give every turn the same kind",
                task_name=self.sample.task_name,
            )
        if isinstance(reward, dict):
            self._components = self._components or {}
            parts = {name: reward_number(v, f"reward/{name}") for name, v in reward.items()}
            for name, value in parts.items():
                self._components[name] = self._components.get(name, 0.0) + value
            self._rewards.append(exact_sum(parts.values()))
        else:
            self._rewards.append(reward_number(reward))

    def _observe(
        self, observation: Message, images: Sequence[ConversationImage], *, ends: bool
    ) -> None:
        """Append the observation, cut to what fits; going on needs room for a token after it."""
        message = sound_message(observation, self._notes)
        sampled = self._token_ids[self._turns[-1].generation_start : self._turns[-1].end]
        ids = self._codec.encode_observation(message, sampled)
        segment = PromptSegment.written(ids, images, self._format)
        length = len(segment.token_ids)
        if length > self._room:
            segment = segment.cut(self._room)
            self._facts.truncated = True
        elif length == self._room and not ends:
            self._facts.truncated = True
        self._facts.env_tokens += len(segment.token_ids)
        self._shown[len(self._log)] = [image.encoded for image in images]
        self._log.append(message)
        if ends or self._facts.truncated:
            self._final_observation = (message, segment)
            return
        self._append(segment, content_text(message["content"]))

    def _append(self, segment: PromptSegment, text: str) -> None:
        """Add to the prompt of the next turn."""
        self._images.add(segment, len(self._token_ids))
        self._token_ids += segment.token_ids
        self._logprobs += [0.0] * len(segment.token_ids)
        self._prompt_text = text

    def trajectory(self, worker: int = 0) -> Trajectory:
        """The finished episode.

        Args:
            worker: Which generator answered it.
        """
        facts = self._facts
        facts.num_turns = self.turn
        facts.worker = worker
        turns, tokens = self._trainable_turns()
        reason = "max_output_tokens" if facts.truncated else None
        reward = Reward(
            verifier=reward_number(exact_sum(self._rewards)),
            components=dict(self._components) if self._components is not None else None,
        )
        result, media = self._encoded_result(reward)
        placeholder = all(turn.generation_start == turn.end for turn in turns)
        routes = self._routes.array()
        if routes is not None and self._routes.missing_turns:
            self._notes[TURNS_WITHOUT_ROUTES] = len(self._routes.missing_turns)
        return Trajectory(
            agent=self.sample.task_name,
            token_ids=np.array(self._token_ids[:tokens], dtype=np.int32),
            logprobs=np.array(self._logprobs[:tokens], dtype=np.float32),
            turns=turns,
            reward=reward,
            incomplete_reason=reason,
            mask_sample=placeholder,
            placeholder=placeholder,
            result=result,
            notes=dict(self._notes),
            routed_experts=None if routes is None else routes[:tokens],
            images=self._images.refs(len(turns)),
            media={**media, **self._images.media(len(turns))},
        )

    def _encoded_result(self, reward: Reward) -> tuple[bytes, dict[str, bytes]]:
        """The record, and the images that it refers to."""
        start = len(self.sample.messages)
        places = range(start, len(self._log))
        messages = [recorded_message(self._log[i], self._shown.get(i, ())) for i in places]
        final = self._final_observation
        if final is not None:
            final = (messages[-1], final[1])
        result = encode_result(self._facts, reward, messages, final, self.metadata, self._notes)
        return lifted(result, [image for shown in self._shown.values() for image in shown])

    def _trainable_turns(self) -> tuple[tuple[Turn, ...], int]:
        """All turns but empty ones at the end, which add nothing to train on; one at least."""
        turns = list(self._turns)
        while len(turns) > 1 and turns[-1].generation_start == turns[-1].end:
            turns.pop()
        return tuple(turns), turns[-1].end
