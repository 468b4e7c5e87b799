"""The sliding puzzle: bring the tiles of a square into order.

The model writes ``<action>up</action>`` (or down, left, right): the tile next to the gap that can
move that way moves into it. The metadata of an episode is ``{"grid", "moves", "max_moves"}``; the
grid is a list of rows in which 0 is the gap.
"""

from __future__ import annotations

import random
from typing import Any

from gymrl.environments.base import BaseEnvironment, EnvironmentReturn, MessageLog
from gymrl.environments.builtin.answers import last_tagged
from gymrl.environments.builtin.task import Task, environment_message

STOP = ["</action>"]
Grid = list[list[int]]
# Where the tile that moves that way stands, seen from the gap: rows, columns.
_TILES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
_OPPOSITE = {"up": "down", "down": "up", "left": "right", "right": "left"}
_PROMPT = """\
Solve this sliding puzzle within {max_moves} moves. The gap is shown as a dot. Bring the tiles into \
order, row by row, with the gap at the end:

{goal}

The puzzle:

{grid}

Make one move at a time by writing <action>up</action>, <action>down</action>, \
<action>left</action> or <action>right</action>: the tile next to the gap that can move that way \
slides into it."""


def make_task(
    seed: int, *, size: int = 3, shuffle_moves: int = 10, max_moves: int | None = None
) -> Task:
    """A puzzle that `shuffle_moves` moves away from the solution can solve.

    Args:
        seed: Equal arguments make equal puzzles.
        size: Tiles of a side, 2 to 6.
        shuffle_moves: Moves from the solved puzzle, none of which takes the one before back.
        max_moves: Moves of an episode; None: five times `shuffle_moves`.

    Raises:
        ValueError: A size or a number of moves is out of range.
    """
    if not 2 <= size <= 6 or shuffle_moves < 1:
        raise ValueError(f"size={size}, shuffle_moves={shuffle_moves}: 2 to 6, and at least 1")
    limit = 5 * shuffle_moves if max_moves is None else max_moves
    numbers = random.Random(seed)
    grid, last = solved(size), None
    for _ in range(shuffle_moves):
        grid, last = _shuffle_once(grid, last, numbers)
    if grid == solved(size):  # a walk may lead back to where it began
        grid, last = _shuffle_once(grid, last, numbers)
    text = _PROMPT.format(max_moves=limit, goal=drawn(solved(size)), grid=drawn(grid))
    return Task(
        messages=[{"role": "user", "content": text}],
        metadata={"grid": grid, "moves": 0, "max_moves": limit},
        stop_strings=STOP,
    )


def solved(size: int) -> Grid:
    """The solved puzzle."""
    tiles = [*range(1, size * size), 0]
    return [tiles[row * size : (row + 1) * size] for row in range(size)]


def drawn(grid: Grid) -> str:
    """The puzzle as text, a row a line."""
    width = len(str(len(grid) ** 2 - 1))
    return "\n".join(
        " ".join(str(tile or ".").rjust(width) for tile in row).rstrip() for row in grid
    )


def moved(grid: Grid, action: str) -> Grid | None:
    """The puzzle after a move; None when no tile can move that way, or there is no such move."""
    if action not in _TILES:
        return None
    size = len(grid)
    row, column = next((r, c) for r in range(size) for c in range(size) if grid[r][c] == 0)
    down, right = _TILES[action]
    tile_row, tile_column = row + down, column + right
    if not (0 <= tile_row < size and 0 <= tile_column < size):
        return None
    after = [list(line) for line in grid]
    after[row][column] = after[tile_row][tile_column]
    after[tile_row][tile_column] = 0
    return after


def _shuffle_once(grid: Grid, last: str | None, numbers: random.Random) -> tuple[Grid, str]:
    back = None if last is None else _OPPOSITE[last]
    possible = [
        (after, action)
        for action in _TILES
        if action != back and (after := moved(grid, action)) is not None
    ]
    return numbers.choice(possible)


class SlidingPuzzleEnvironment(BaseEnvironment):
    """The puzzle. Solved within the moves is a reward of 1, anything else 0.

    A move that can't be made, or can't be read, counts as a move and changes nothing.
    """

    async def step(self, message_logs: list[MessageLog], metadata: list[Any]) -> EnvironmentReturn:
        """See :class:`gymrl.environments.base.Environment`."""
        actions = [_action(log[-1]["content"]) for log in message_logs]
        turns = [_turn(action, puzzle) for action, puzzle in zip(actions, metadata, strict=True)]
        return EnvironmentReturn(
            observations=[environment_message(text) for text, _, _, _ in turns],
            metadata=[puzzle for _, puzzle, _, _ in turns],
            next_stop_strings=[STOP] * len(turns),
            rewards=[float(is_solved) for _, _, is_solved, _ in turns],
            terminateds=[ended for _, _, _, ended in turns],
            answers=actions,
        )


def _action(text: str) -> str | None:
    action = last_tagged(text, "action", may_be_open=True)
    return None if action is None else action.lower()[:20]


def _turn(action: str | None, puzzle: dict[str, Any]) -> tuple[str, dict[str, Any], bool, bool]:
    """What is said, the puzzle after it, whether it is solved, whether the episode is over."""
    moves = puzzle["moves"] + 1
    after = None if action is None else moved(puzzle["grid"], action)
    grid = puzzle["grid"] if after is None else after
    is_solved = grid == solved(len(grid))
    ended = is_solved or moves >= puzzle["max_moves"]
    if is_solved:
        said = "Solved."
    elif action not in _TILES:
        said = "I could not read a move. Write one of up, down, left, right as <action>up</action>."
    elif after is None:
        said = f"No tile can move {action}."
    else:
        said = ""
    text = f"{said}\n{drawn(grid)}\n".lstrip("\n") if not is_solved else f"{said}\n"
    return text, {**puzzle, "grid": grid, "moves": moves}, is_solved, ended
