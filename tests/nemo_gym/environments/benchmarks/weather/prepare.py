"""Run by the peer's interpreter: Gym itself is asked for its example data."""

import json
from pathlib import Path

from nemo_gym import PARENT_DIR


def prepare():
    source = PARENT_DIR / "resources_servers/example_single_tool_call/data/example.jsonl"
    file = Path(__file__).parent / "data" / "weather.jsonl"
    file.parent.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in source.read_text().splitlines()[:2]]
    with file.open("w") as lines:
        for index, row in enumerate(rows):
            params = row["responses_create_params"]
            question = params.pop("input")[-1]["content"]
            params["max_output_tokens"] = 8
            task = {"task_id": f"w{index}", "question": question, "responses_create_params": params}
            lines.write(json.dumps(task) + "\n")
    return file
