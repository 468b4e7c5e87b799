"""The page for people who come from NeMo RL: every name once, every path real."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = [
    line.strip()
    for line in (ROOT / "tests" / "data" / "seed_names.txt").read_text().splitlines()
    if line.strip()
]
PAGE = (ROOT / "docs" / "from-nemo-rl.md").read_text()


ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]


def resolve(path):
    """What a dotted path means: a module, or something inside one.

    A field of a class that is only annotated, as a dictionary's keys are, counts.
    """
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not path.startswith(error.name or "-"):
                raise
            continue
        for name in parts[count:]:
            fields = getattr(found, "__annotations__", {})
            if not hasattr(found, name) and name in fields:
                found = fields[name]
            else:
                found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def test_every_name_has_exactly_one_row():
    assert sorted(row[0].strip("`") for row in ROWS) == sorted(NAMES)
    assert len(set(NAMES)) == len(NAMES)


def test_every_counterpart_is_a_path_of_gymrl():
    for name, counterpart, difference in ROWS:
        assert re.fullmatch(r"`gymrl(\.\w+)+`", counterpart), name
        assert difference, name


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(gymrl(?:\.\w+)+)`", PAGE))))
def test_every_path_on_the_page_resolves(path):
    assert resolve(path) is not None


def test_a_false_path_does_not_resolve():
    with pytest.raises(AttributeError):
        resolve("gymrl.scoring.nothing_of_the_kind")
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve("gymrl.nothing.of_the_kind")


def test_names_that_are_there_keep_their_name():
    for name, counterpart, _ in ROWS:
        if counterpart.startswith("`gymrl.compat.nemo_rl."):
            own = name.strip("`").removeprefix("nemo_rl.environments.nemo_gym.")
            own = own.removeprefix("nemo_rl.experience.rollouts.")
            path = counterpart.strip("`")
            if own.startswith("_"):  # private there: public here, in the module that has it
                assert path.rpartition(".")[2] == own.lstrip("_").lower()
            else:
                assert path == f"gymrl.compat.nemo_rl.{own}"
