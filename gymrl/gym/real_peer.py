"""Runs in the interpreter that has NeMo Gym: reads a configuration by Gym's own rules.

Started as a script, with the paths of a request and of an answer, both JSON. Gym is loaded by name
at run time, here alone, in a process that ends with the answer; gymrl itself never imports it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from typing import Any

KINDS = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")
POLICY_MODEL = "policy_model"


def main(request_path: str, answer_path: str) -> None:
    """Answer one request; what Gym refuses is part of the answer."""
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    try:
        answer = _resolve(request)
    except Exception as error:  # noqa: BLE001 - told to the process that asked
        answer = {"error": type(error).__name__, "message": str(error)}
    with open(answer_path, "w", encoding="utf-8") as file:
        json.dump(answer, file, default=str)


def _resolve(request: dict[str, Any]) -> dict[str, Any]:
    version = importlib.metadata.version("nemo-gym")
    if [int(part) for part in version.split(".")[:2]] < request["oldest"]:
        return {"version": version}
    gym = importlib.import_module("nemo_gym")
    rules: Any = importlib.import_module("nemo_gym.global_config")
    conf = importlib.import_module("omegaconf").OmegaConf
    parser = rules.GlobalConfigDictParser()
    initial = dict(request["config"])
    _, included = parser.load_extra_config_paths(list(initial.get("config_paths") or []))
    if POLICY_MODEL not in initial and not any(POLICY_MODEL in config for config in included):
        initial[POLICY_MODEL] = request["policy"]
    settings: dict[str, Any] = {"initial_global_config_dict": conf.create(initial)}
    if "offline" in rules.GlobalConfigDictParserConfig.model_fields:
        settings["offline"] = True
    else:  # before 0.7: ports would be looked for; -1 is what a reading offline says instead
        rules._find_open_port_using_range = lambda **_: -1
    asked = rules.GlobalConfigDictParserConfig(skip_load_from_cli=True, **settings)
    config = conf.to_container(parser.parse(asked), resolve=True)
    roots = _search_roots(gym)
    return {
        "version": version,
        "config": config,
        "roots": roots,
        "directories": dict(_directories(config, roots)),
    }


def _search_roots(gym: Any) -> list[str]:
    """Where servers are looked for, the first root wins."""
    if hasattr(gym, "component_search_roots"):
        return [str(root) for root in gym.component_search_roots()]
    named = os.environ.get("NEMO_GYM_EXTRA_ROOTS", "").split(os.pathsep)
    return [*(root for root in named if root), os.getcwd(), str(gym.PARENT_DIR)]


def _directories(config: dict[str, Any], roots: list[str]) -> list[tuple[str, str]]:
    """Where each instance's implementation is: the first root that has its entrypoint."""
    found = []
    for name, value in config.items():
        kinds = [kind for kind in KINDS if isinstance(value, dict) and kind in value]
        if not kinds:
            continue
        for impl, block in value[kinds[0]].items():
            entrypoint = block.get("entrypoint") if isinstance(block, dict) else None
            for root in roots:
                directory = os.path.abspath(os.path.join(root, kinds[0], impl))
                if os.path.isfile(os.path.join(directory, str(entrypoint))):
                    found.append((name, directory))
                    break
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
