"""Runs in the interpreter that has NeMo Gym: one prepare script of a benchmark.

Started as a script, with the paths of a request and of an answer, both JSON. The configuration is
where Gym's own call looks for it, in ``NEMO_GYM_CONFIG_DICT``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from types import ModuleType
from typing import Any


def main(request_path: str, answer_path: str) -> None:
    """Answer one request; what the script raises is part of the answer."""
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    try:
        answer = {"path": _prepared(request)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the process that asked
        answer = {"error": f"{type(error).__name__}: {error}"}
    with open(answer_path, "w", encoding="utf-8") as file:
        json.dump(answer, file)


def _prepared(request: dict[str, Any]) -> str | None:
    folders, script = request["folders"], request["script"]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    # Benchmarks of all folders are one package, whichever of them has an __init__.py.
    package = ModuleType("benchmarks")
    package.__path__ = [os.path.join(folder, "benchmarks") for folder in folders]
    sys.modules["benchmarks"] = package
    spec = importlib.util.spec_from_file_location("prepare_script", script)
    if spec is None or spec.loader is None:
        raise ImportError(f"{script} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare_script"] = module
    spec.loader.exec_module(module)
    returned = module.prepare(**request["arguments"])
    if not isinstance(returned, str | os.PathLike):
        raise TypeError(f"it returned {returned!r}; the path of the dataset is needed")
    return os.path.abspath(os.fspath(returned))


if __name__ == "__main__":
    main(*sys.argv[1:])
