"""Any dataset of the reasoning-gym package as an environment.

A row brings ``dataset`` (its name) and ``entry`` (``question``, ``answer``, ``metadata``). The
package's own scorer judges what an *answer extractor* takes out of the reply, and runs nothing of it
(:mod:`gymrl.answer_scorers`). Needs the extra ``tasks``.
"""

from __future__ import annotations

import logging
import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import anyio.to_thread

from gymrl.answer_scorers import scorer_of
from gymrl.extras import optional_imports
from gymrl.gym.embedded.base import Peers, RefusedRequest, ServerSettings
from gymrl.gym.embedded.resources import ResourcesServer, Verdict

with optional_imports():
    from reasoning_gym.factory import DATASETS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gymrl.gym.embedded.reply import Reply

logger = logging.getLogger(__name__)

AnswerExtractor = Literal["whole", "last_integer", "first_word", "answer_tag"]

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_INTEGER = re.compile(r"-?\d+")


def extract_answer(reply: str, extractor: AnswerExtractor) -> str | None:
    """What of a reply is scored; None when it holds no such thing.

    ``whole``: all of it, stripped. ``last_integer``: its last run of digits, with a minus sign
    before it. ``first_word``: up to the first white space, less punctuation at its ends.
    ``answer_tag``: inside its last ``<answer>...</answer>``, stripped.
    """
    if extractor == "whole":
        return reply.strip() or None
    if extractor == "last_integer":
        found = _INTEGER.findall(reply)
        return found[-1] if found else None
    if extractor == "first_word":
        words = reply.split(maxsplit=1)
        return (words[0].strip(".,;:!?\"'`*()[]") or None) if words else None
    return _last_tagged(reply)


def _last_tagged(reply: str) -> str | None:
    """One pass over the tags: a reply may be nothing but openings."""
    start, answer = -1, ""
    for tag in _TAG.finditer(reply):
        if not tag[1] and start < 0:
            start = tag.end()
        elif tag[1] and start >= 0:
            answer, start = reply[start : tag.start()], -1
    return answer.strip() or None


class ReasoningGymSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings.

    Attributes:
        answer_extractor: What of a reply is scored, see :func:`extract_answer`.
    """

    answer_extractor: AnswerExtractor = "answer_tag"


class ReasoningGymServer(ResourcesServer):
    """See the module.

    A scorer that raises on a reply means a wrong answer: reward 0.0, and the verdict says so in
    ``scorer_error``. An entry that no reply can be scored against is refused when the session is
    seeded, before the model is asked.
    """

    Settings: ClassVar[type[ServerSettings]] = ReasoningGymSettings

    def __init__(self, instance: str, settings: Mapping[str, Any], peers: Peers) -> None:
        super().__init__(instance, settings, peers)
        self._scorers: dict[str, Callable[[str | None, dict[str, Any]], float]] = {}

    async def seed_session(self, row: dict[str, Any]) -> None:
        """Check the row.

        Raises:
            RefusedRequest: The dataset is unknown, or the entry has no answer.
        """
        await self._scorer(row)

    async def verify(self, row: dict[str, Any], reply: Reply, state: None) -> Verdict:
        """Score the extracted answer with the dataset's own scorer."""
        scorer = await self._scorer(row)
        extracted = extract_answer(reply.text, self.settings.answer_extractor)
        extras: dict[str, Any] = {"extracted_answer": extracted}
        reward = 0.0
        if extracted is not None:
            try:
                # Scorers parse and search; some take longer than a loop may be held.
                score = await anyio.to_thread.run_sync(
                    partial(scorer, extracted, row["entry"]), abandon_on_cancel=True
                )
                reward = float(score)
                if not math.isfinite(reward):
                    raise ValueError(f"the scorer returned {reward!r}")  # noqa: TRY301 - recorded
            except Exception as error:  # noqa: BLE001 - scorers raise anything on odd replies
                reward = 0.0
                extras["scorer_error"] = f"{type(error).__name__}: {error}"[:500]
                self._log.log(
                    f"scorer:{row['dataset']}",
                    logging.INFO,
                    "%s: the scorer of %s raised %r; the reply counts as wrong",
                    self.instance,
                    row["dataset"],
                    error,
                )
        return Verdict(reward=reward, extras=extras)

    async def _scorer(self, row: dict[str, Any]) -> Callable[[str | None, dict[str, Any]], float]:
        name, entry = row.get("dataset"), row.get("entry")
        if not isinstance(name, str) or name not in DATASETS:
            raise RefusedRequest(f"reasoning-gym has no dataset {name!r}")
        if not isinstance(entry, dict) or entry.get("answer") is None:
            raise RefusedRequest(
                f"the row's entry of {name!r} has no answer, so no reply can be scored"
            )
        if name not in self._scorers:
            # Making a dataset may generate data.
            self._scorers[name] = await anyio.to_thread.run_sync(scorer_of, name)
        return self._scorers[name]
