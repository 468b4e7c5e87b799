"""Instruction following that a program can check: length, words, case, form, ending.

A row brings ``constraints``, a list of ``{kind, ...}``. Each kind is one function of the reply below;
none of them asks a model.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from gymrl.gym.embedded.base import RefusedRequest, ServerSettings
from gymrl.gym.embedded.resources import ResourcesServer, Verdict

if TYPE_CHECKING:
    from gymrl.gym.embedded.reply import Reply

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
# Each goes over a reply once, whatever is in it: no two of their repetitions take the same characters.
_BULLET = re.compile(r"^[^\S\n]*[*-] +\S", re.MULTILINE)
_PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
_FENCE = re.compile(r"```(?:json)?[^\S\n]*\n(.*)\n```", re.DOTALL)


class Constraint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Something that a reply keeps or breaks."""

    def is_kept(self, reply: str) -> bool:
        """Whether `reply`, stripped of white space at its ends, keeps it."""
        raise NotImplementedError


class WordCount(Constraint, frozen=True, forbid_unknown_fields=True, tag="word_count"):
    """At least `least` words and at most `most`, where they are given."""

    least: int | None = None
    most: int | None = None

    def is_kept(self, reply: str) -> bool:
        """See the class."""
        count = len(_WORD.findall(reply))
        return (self.least is None or count >= self.least) and (
            self.most is None or count <= self.most
        )


class Includes(Constraint, frozen=True, forbid_unknown_fields=True, tag="includes"):
    """`word` stands in the reply at least `times` times, as a whole word, in any case."""

    word: str
    times: int = 1

    def is_kept(self, reply: str) -> bool:
        """See the class."""
        return _occurrences(reply, self.word) >= self.times


class Avoids(Constraint, frozen=True, forbid_unknown_fields=True, tag="avoids"):
    """`word` does not stand in the reply, as a whole word, in any case."""

    word: str

    def is_kept(self, reply: str) -> bool:
        """See the class."""
        return bool(reply) and not _occurrences(reply, self.word)


class Case(Constraint, frozen=True, forbid_unknown_fields=True, tag="case"):
    """Every letter is lower case, or every letter is upper case."""

    case: Literal["lower", "upper"]

    def is_kept(self, reply: str) -> bool:
        """See the class."""
        return reply.islower() if self.case == "lower" else reply.isupper()


class NoCommas(Constraint, frozen=True, forbid_unknown_fields=True, tag="no_commas"):
    """No comma in the reply."""

    def is_kept(self, reply: str) -> bool:
        """See the class."""
        return bool(reply) and "," not in reply


class Bullets(Constraint, frozen=True, forbid_unknown_fields=True, tag="bullets"):
    """Exactly `count` lines that begin with ``*`` or ``-`` and a space."""

    count: int

    def is_kept(self, reply: str) -> bool:
        """See the class."""
        return len(_BULLET.findall(reply)) == self.count


class Paragraphs(Constraint, frozen=True, forbid_unknown_fields=True, tag="paragraphs"):
    """Exactly `count` paragraphs, with empty lines between them."""

    count: int

    def is_kept(self, reply: str) -> bool:
        """See the class."""
        return bool(reply) and len(_PARAGRAPH_BREAK.split(reply)) == self.count


class JsonObject(Constraint, frozen=True, forbid_unknown_fields=True, tag="json_object"):
    """The whole reply is one JSON object with `keys`; a code fence around it is no fault."""

    keys: tuple[str, ...] = ()

    def is_kept(self, reply: str) -> bool:
        """See the class."""
        fenced = _FENCE.fullmatch(reply)
        try:
            value = json.loads(fenced[1] if fenced else reply)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and value.keys() >= set(self.keys)


class EndsWith(Constraint, frozen=True, forbid_unknown_fields=True, tag="ends_with"):
    """The reply ends with `text`, in any case."""

    text: str

    def is_kept(self, reply: str) -> bool:
        """See the class."""
        return reply.casefold().endswith(self.text.casefold())


AnyConstraint = (
    WordCount | Includes | Avoids | Case | NoCommas | Bullets | Paragraphs | JsonObject | EndsWith
)


def _occurrences(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def read_constraints(value: object) -> list[AnyConstraint]:
    """A row's constraints as structs.

    Raises:
        msgspec.ValidationError: A kind is unknown, or its fields are not those of the kind.
        ValueError: There is none: every reply would be right.
    """
    constraints: list[AnyConstraint] = msgspec.convert(value, list[AnyConstraint])
    if not constraints:
        raise ValueError("there is no constraint, so every reply would be right")
    return constraints


class InstructionSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings.

    Attributes:
        scoring: ``all``: 1 when every constraint is kept, else 0. ``share``: the share that is.
    """

    scoring: Literal["all", "share"] = "all"


class InstructionServer(ResourcesServer):
    """See the module. The verdict lists, in ``kept``, which of the row's constraints were."""

    Settings: ClassVar[type[ServerSettings]] = InstructionSettings

    async def seed_session(self, row: dict[str, Any]) -> None:
        """Check the row.

        Raises:
            RefusedRequest: Its constraints cannot be checked.
        """
        _constraints_of(row)

    async def verify(self, row: dict[str, Any], reply: Reply, state: None) -> Verdict:
        """Check every constraint on the reply's text."""
        text = reply.text.strip()
        kept = [constraint.is_kept(text) for constraint in _constraints_of(row)]
        share = sum(kept) / len(kept)
        reward = share if self.settings.scoring == "share" else float(all(kept))
        return Verdict(reward=reward, extras={"kept": kept})


def _constraints_of(row: dict[str, Any]) -> list[AnyConstraint]:
    try:
        return read_constraints(row.get("constraints"))
    except (msgspec.ValidationError, ValueError) as error:
        raise RefusedRequest(f"the row's constraints cannot be checked: {error}") from error
