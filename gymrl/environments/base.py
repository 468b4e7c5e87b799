"""The step protocol: a batch of conversations in, one :class:`EnvironmentReturn` out.

An environment keeps what it knows of an episode in that episode's *metadata*, not in itself: it
may be asked about any episodes in any order, several copies of it may run, and an attempt that is
made again starts from fresh metadata.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from gymrl.errors import EnvironmentContractError
from gymrl.media.parts import content_problem

Message = dict[str, Any]
"""``role`` and ``content``: a text, or a list of parts of text and images.

Parts are ``{"type": "text", "text": ...}`` and ``{"type": "image", "image": <source>}``, or those of
OpenAI's APIs (:mod:`gymrl.media.parts`); a source is an image's data URL, or a URL that
``NativeConfig.media`` lets in. What the model said is a text always.
"""

MessageLog = list[Message]
"""A conversation from its first message on, the model's newest answer last."""


class EnvironmentReturn(msgspec.Struct):
    """What one step said about each of B conversations.

    Attributes:
        observations: B messages that answer the model; they may show images.
        metadata: B values for the next step; None keeps what was there.
        next_stop_strings: B lists of texts that end the next generation; None keeps what was
            there, an empty list clears it.
        rewards: B numbers, or B mappings of component names to numbers (a sample's total is their
            sum), or one mapping of names to B numbers. Arrays and tensors will do. None or NaN
            for a sample says that it could not be scored: that sample fails, it gets no 0.
        terminateds: B booleans: the episode came to its own end.
        answers: B extracted answers, for reports; None where there is none.
    """

    observations: list[Message]
    metadata: list[Any]
    next_stop_strings: list[list[str] | None]
    rewards: Any
    terminateds: Any
    answers: list[str | None] | None = None


@runtime_checkable
class Environment(Protocol):
    """What a rollout steps. `step` may be async; a plain one runs in a thread.

    An environment may also have ``global_post_process_and_metrics`` (see
    :class:`BaseEnvironment`).
    """

    def step(
        self, message_logs: list[MessageLog], metadata: list[Any]
    ) -> EnvironmentReturn | Awaitable[EnvironmentReturn]:
        """Answer each conversation.

        Args:
            message_logs: B conversations; copies, the environment may keep or change them.
            metadata: B values, as the dataset or the step before gave them.
        """
        ...


class BaseEnvironment:
    """A base class with the optional parts of the protocol; deriving from it is not needed."""

    def global_post_process_and_metrics(
        self, batch: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Look at all finished episodes of this environment once, at the end of a run.

        Args:
            batch: Columns of equal length, in row order, failed rows left out: ``text`` (the
                last answer), ``rewards``, ``is_end`` (terminated on its own), ``answers``,
                ``prompt_lengths`` and ``generation_lengths`` (tokens), ``group_index``.

        Returns:
            The columns (changed or as they were), and numbers about them.
        """
        return batch, {}


class Step(msgspec.Struct, frozen=True):
    """What one step said about one conversation, checked.

    Attributes:
        reward: A number, its parts by name, or None for a sample that could not be scored.
    """

    observation: Message
    metadata: Any
    next_stop_strings: list[str] | None
    reward: float | dict[str, float | None] | None
    terminated: bool
    answer: str | None


def settled(answer: Any, count: int, task_name: str) -> EnvironmentReturn:
    """`answer` as plain lists of `count` entries, whatever arrays or tensors it came as.

    Args:
        answer: Anything with the attributes of :class:`EnvironmentReturn`.
        count: Conversations of the step.
        task_name: For errors.

    Raises:
        EnvironmentContractError: A field is missing, has another length or another type, or
            some rewards are numbers and others mappings.
    """
    missing = [
        name for name in EnvironmentReturn.__struct_fields__[:5] if not hasattr(answer, name)
    ]
    if missing:
        raise _broken(
            task_name,
            f"step returned a {type(answer).__name__} without {', '.join(missing)}; "
            "return an EnvironmentReturn",
        )
    given = getattr(answer, "answers", None)
    result = EnvironmentReturn(
        observations=[
            _message(value, task_name)
            for value in _column(answer.observations, count, "observations", task_name)
        ],
        metadata=_column(answer.metadata, count, "metadata", task_name),
        next_stop_strings=[
            _stops(value, task_name)
            for value in _column(answer.next_stop_strings, count, "next_stop_strings", task_name)
        ],
        rewards=_rewards(answer.rewards, count, task_name),
        terminateds=[
            _boolean(value, task_name)
            for value in _column(answer.terminateds, count, "terminateds", task_name)
        ],
        answers=None if given is None else _column(given, count, "answers", task_name),
    )
    kinds = {isinstance(reward, dict) for reward in result.rewards if reward is not None}
    if len(kinds) > 1:
        raise _broken(
            task_name,
            "step returned numbers for some samples and reward components for others; "
            "give every sample the same kind (an empty mapping is a reward without parts)",
        )
    return result


def steps_of(answer: EnvironmentReturn) -> list[Step]:
    """A settled return, sample by sample."""
    answers = answer.answers or [None] * len(answer.observations)
    return [
        Step(*fields)
        for fields in zip(
            answer.observations,
            answer.metadata,
            answer.next_stop_strings,
            answer.rewards,
            answer.terminateds,
            answers,
            strict=True,
        )
    ]


def _broken(task_name: str, problem: str) -> EnvironmentContractError:
    return EnvironmentContractError(f"environment {task_name!r}: {problem}", task_name=task_name)


def _plain(value: Any) -> Any:
    """Arrays, tensors and their scalars as lists and numbers."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _column(values: Any, count: int, name: str, task_name: str) -> list[Any]:
    plain = _plain(values)
    if not isinstance(plain, Sequence) or isinstance(plain, str | bytes):
        raise _broken(
            task_name, f"{name} is a {type(values).__name__}; a list of {count} is needed"
        )
    if len(plain) != count:
        raise _broken(task_name, f"{name} has {len(plain)} entries for {count} conversations")
    return list(plain)


def _message(value: Any, task_name: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise _broken(task_name, f"observation {value!r:.200} needs a role and a content")
    content = value.get("content")
    problem = content_problem(content)
    if problem is not None:
        raise _broken(
            task_name, f"observation {value!r:.200} needs a role and a content: it {problem}"
        )
    return {"role": value["role"], "content": content}


def _stops(value: Any, task_name: str) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise _broken(task_name, f"next_stop_strings {value!r:.200}: a list of texts, or None")
    return list(value)


def _boolean(value: Any, task_name: str) -> bool:
    plain = _plain(value)
    if isinstance(plain, bool) or plain in (0, 1):
        return bool(plain)
    raise _broken(task_name, f"terminateds holds {value!r:.200}; a boolean is needed")


def _rewards(values: Any, count: int, task_name: str) -> list[Any]:
    if isinstance(values, Mapping):
        columns = {
            str(name): [_reward(v) for v in _column(column, count, f"rewards[{name!r}]", task_name)]
            for name, column in values.items()
        }
        return [{name: column[i] for name, column in columns.items()} for i in range(count)]
    return [_reward(value) for value in _column(values, count, "rewards", task_name)]


def _reward(value: Any) -> Any:
    plain = _plain(value)
    if isinstance(plain, Mapping):
        return {str(name): _plain(part) for name, part in plain.items()}
    return plain
