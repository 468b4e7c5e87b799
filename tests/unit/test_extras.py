import tomllib
from pathlib import Path

import pytest

from gymrl.extras import EXTRA_OF, install_hint, optional_imports

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_every_extra_that_is_named_exists():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert set(EXTRA_OF.values()) <= set(extras)


def test_a_missing_package_is_told_with_its_extra_once():
    with pytest.raises(ModuleNotFoundError) as caught, optional_imports(), optional_imports():
        raise ModuleNotFoundError("No module named 'torch.distributed'", name="torch.distributed")
    assert str(caught.value) == (
        "No module named 'torch.distributed'; install it with: pip install 'gymrl[transformers]'"
    )
    assert caught.value.name == "torch.distributed"


def test_a_module_of_no_extra_is_left_as_it_is():
    missing = ModuleNotFoundError("No module named 'mine'", name="mine")
    assert install_hint(missing) == ""
    with pytest.raises(ModuleNotFoundError) as caught, optional_imports():
        raise missing
    assert caught.value is missing
