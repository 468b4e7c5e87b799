"""Guess a number: the environment says higher or lower until it is found.

The model writes ``<guess>42</guess>``. The metadata of an episode is
``{"low", "high", "target", "max_guesses", "guesses"}``.
"""

from __future__ import annotations

import random
from typing import Any

from gymrl.environments.base import BaseEnvironment, EnvironmentReturn, MessageLog
from gymrl.environments.builtin.answers import last_tagged
from gymrl.environments.builtin.task import Task, environment_message

STOP = ["</guess>"]
_PROMPT = """\
I think of a whole number from {low} to {high}. Guess it within {max_guesses} guesses. Write each \
guess as <guess>number</guess>; I tell you whether my number is higher or lower."""


def make_task(seed: int, *, low: int = 1, high: int = 100, max_guesses: int = 7) -> Task:
    """A game; equal arguments make equal games.

    Raises:
        ValueError: There is no number between the limits, or no guess.
    """
    if low > high or max_guesses < 1:
        raise ValueError(f"low={low}, high={high}, max_guesses={max_guesses}: nothing to guess")
    target = random.Random(seed).randint(low, high)
    return Task(
        messages=[
            {
                "role": "user",
                "content": _PROMPT.format(low=low, high=high, max_guesses=max_guesses),
            }
        ],
        metadata={
            "low": low,
            "high": high,
            "target": target,
            "max_guesses": max_guesses,
            "guesses": 0,
        },
        stop_strings=STOP,
    )


class NumberGuessingEnvironment(BaseEnvironment):
    """The game. Found within the guesses is a reward of 1, anything else 0.

    An answer without a readable guess counts as a guess.
    """

    async def step(self, message_logs: list[MessageLog], metadata: list[Any]) -> EnvironmentReturn:
        """See :class:`gymrl.environments.base.Environment`."""
        turns = [
            _turn(log[-1]["content"], game)
            for log, game in zip(message_logs, metadata, strict=True)
        ]
        count = len(turns)
        return EnvironmentReturn(
            observations=[environment_message(text) for text, _, _, _ in turns],
            metadata=[game for _, game, _, _ in turns],
            next_stop_strings=[STOP] * count,
            rewards=[float(found) for _, _, found, _ in turns],
            terminateds=[ended for _, _, _, ended in turns],
            answers=[
                last_tagged(log[-1]["content"], "guess", may_be_open=True) for log in message_logs
            ],
        )


def _turn(text: str, game: dict[str, Any]) -> tuple[str, dict[str, Any], bool, bool]:
    """What is said, the game after it, whether the number was found, whether the game is over."""
    game = {**game, "guesses": game["guesses"] + 1}
    guess = _number(last_tagged(text, "guess", may_be_open=True))
    is_last = game["guesses"] >= game["max_guesses"]
    if guess == game["target"]:
        return f"Yes, it is {guess}.", game, True, True
    if guess is None:
        said = "I could not read a guess. Write it as <guess>number</guess>."
    elif guess < game["target"]:
        said = f"My number is higher than {guess}."
    else:
        said = f"My number is lower than {guess}."
    if is_last:
        said += f" That was your last guess; it was {game['target']}."
    return said, game, False, is_last


def _number(text: str | None) -> int | None:
    # Longer numbers are no guess, and reading them takes time that grows with the square.
    if text is None or len(text) > 20:
        return None
    try:
        return int(text)
    except ValueError:
        return None
