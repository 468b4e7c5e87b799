import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gymrl.environments import settled
from gymrl.environments.builtin import number_guessing, sliding_puzzle
from gymrl.environments.builtin.number_guessing import NumberGuessingEnvironment
from gymrl.environments.builtin.sliding_puzzle import SlidingPuzzleEnvironment, drawn, moved, solved


def said(text):
    return [{"role": "user", "content": "play"}, {"role": "assistant", "content": text}]


async def play(environment, metadata, *texts):
    """The steps of one episode, until it ends."""
    steps = []
    for text in texts:
        answer = settled(await environment.step([said(text)], [metadata]), 1, "game")
        metadata = answer.metadata[0]
        steps.append((answer.observations[0]["content"], answer.rewards[0], answer.terminateds[0]))
        if answer.terminateds[0]:
            break
    return steps


async def test_a_number_is_found_by_higher_and_lower():
    game = {"low": 1, "high": 100, "target": 37, "max_guesses": 5, "guesses": 0}

    steps = await play(
        NumberGuessingEnvironment(),
        game,
        "<guess>50</guess>",
        "maybe <guess>25",
        "no tag",
        "<guess>37</guess>",
    )

    assert steps == [
        ("My number is lower than 50.", 0.0, False),
        ("My number is higher than 25.", 0.0, False),
        ("I could not read a guess. Write it as <guess>number</guess>.", 0.0, False),
        ("Yes, it is 37.", 1.0, True),
    ]


async def test_the_last_guess_ends_the_game_without_a_reward():
    game = {"low": 1, "high": 9, "target": 3, "max_guesses": 2, "guesses": 0}

    steps = await play(NumberGuessingEnvironment(), game, "<guess>1</guess>", "<guess>2</guess>")

    assert steps[-1] == (
        "My number is higher than 2. That was your last guess; it was 3.",
        0.0,
        True,
    )


@pytest.mark.parametrize("guess", ["9" * 5000, "NaN", "3.0", "-", "٣" * 30])
async def test_an_odd_guess_is_no_number(guess):
    game = {"low": 1, "high": 9, "target": 3, "max_guesses": 9, "guesses": 0}

    [(text, reward, ended)] = await play(
        NumberGuessingEnvironment(), game, f"<guess>{guess}</guess>"
    )

    assert text.startswith("I could not read")
    assert (reward, ended) == (0.0, False)


def test_equal_seeds_make_equal_games():
    assert number_guessing.make_task(5) == number_guessing.make_task(5)
    targets = {number_guessing.make_task(seed).metadata["target"] for seed in range(50)}
    assert len(targets) > 10
    assert targets <= set(range(1, 101))


async def test_a_step_changes_no_metadata_of_the_caller():
    game = number_guessing.make_task(1).metadata
    before = dict(game)
    await NumberGuessingEnvironment().step([said("<guess>1</guess>")], [game])
    assert game == before


async def test_a_puzzle_is_solved_by_the_moves_back():
    puzzle = {"grid": [[1, 2, 3], [4, 0, 6], [7, 5, 8]], "moves": 0, "max_moves": 5}

    steps = await play(
        SlidingPuzzleEnvironment(),
        puzzle,
        "<action>UP</action>",
        "I think <action>left",
    )

    assert steps == [
        ("1 2 3\n4 5 6\n7 . 8\n", 0.0, False),
        ("Solved.\n", 1.0, True),
    ]


async def test_a_move_that_cannot_be_made_counts_and_changes_nothing():
    puzzle = {"grid": [[1, 2], [0, 3]], "moves": 0, "max_moves": 3}

    steps = await play(
        SlidingPuzzleEnvironment(), puzzle, "<action>up</action>", "hm", "<action>fly</action>"
    )

    assert steps[0] == ("No tile can move up.\n1 2\n. 3\n", 0.0, False)
    assert steps[1][0].startswith("I could not read a move.")
    assert steps[2][1:] == (0.0, True)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 5), shuffle_moves=st.integers(1, 30))
def test_every_puzzle_is_shuffled_and_can_be_solved(seed, size, shuffle_moves):
    task = sliding_puzzle.make_task(seed, size=size, shuffle_moves=shuffle_moves)
    grid = task.metadata["grid"]

    assert grid != solved(size)
    assert sorted(tile for row in grid for tile in row) == list(range(size * size))
    assert is_solvable(grid)
    assert drawn(grid) in task.messages[0]["content"]
    assert task == sliding_puzzle.make_task(seed, size=size, shuffle_moves=shuffle_moves)


def is_solvable(grid):
    """The parity of the tiles' permutation is that of the gap's way home."""
    tiles = [tile for row in grid for tile in row]
    inversions = sum(
        tiles[i] > tiles[j] > 0 for i in range(len(tiles)) for j in range(i + 1, len(tiles))
    )
    size = len(grid)
    gap_row = tiles.index(0) // size
    return (inversions + (0 if size % 2 else size - 1 - gap_row)) % 2 == 0


@pytest.mark.parametrize(
    ("there", "back"), [("up", "down"), ("down", "up"), ("left", "right"), ("right", "left")]
)
def test_every_move_has_one_that_takes_it_back(there, back):
    grid = [[1, 2, 3], [4, 0, 5], [6, 7, 8]]
    assert moved(moved(grid, there), back) == grid


def test_what_is_out_of_range_is_refused():
    with pytest.raises(ValueError, match="size=1"):
        sliding_puzzle.make_task(0, size=1)
    with pytest.raises(ValueError, match="nothing to guess"):
        number_guessing.make_task(0, low=2, high=1)
