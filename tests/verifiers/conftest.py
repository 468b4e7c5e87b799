"""The interpreters that scripts/verifiers-peer makes, and environments of both kinds."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def environments():
    """The working directory has the environments."""
    before = os.getcwd()
    os.chdir(Path(__file__).parent / "environments")
    yield
    os.chdir(before)


def peer(name):
    folder = ROOT / name
    if not (folder / ".installed").exists():
        message = f"{folder} is not there: run scripts/verifiers-peer"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="session")
def v1_python():
    return peer(".venv-verifiers")


@pytest.fixture(scope="session")
def classic_python():
    return peer(".venv-verifiers-classic")
