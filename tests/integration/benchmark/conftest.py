import json
import textwrap

import pytest

PREPARE = """
import json
from pathlib import Path

def prepare(count=3):
    file = Path(__file__).parent / "data" / "tinymath.jsonl"
    file.parent.mkdir(exist_ok=True)
    rows = [
        {
            "task_id": f"tm-{i}",
            "question": f"{i}+{4 - i}",
            "expected_answer": "4",
            "responses_create_params": {"max_output_tokens": 64},
        }
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\\n" for row in rows))
    return file
"""

CONFIG = """
config_paths: [benchmarks/base.yaml]
tinymath_agent:
  _inherit_from: base_agent
  responses_api_agents:
    simple_agent:
      resources_server: {name: tinymath}
      datasets:
        - name: tinymath
          type: benchmark
          jsonl_fpath: benchmarks/tinymath/data/tinymath.jsonl
          prepare_script: benchmarks/tinymath/prepare.py
          prepare_script_args: {count: "${count}"}
          prompt_config: benchmarks/tinymath/prompt.yaml
          num_repeats: 2
count: 3
tinymath:
  resources_servers:
    ours: {entrypoint: "tinymath_server:TinyMath"}
"""

BASE = """
base_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: gymrl.gym.embedded.simple_agent:SimpleAgent
      resources_server: {type: resources_servers, name: "???"}
      model_server: {type: responses_api_models, name: policy_model}
"""

PROMPT = """
system: You are a careful calculator.
user: |-
  Solve: {question}
  Put the answer in \\boxed{{}}.
"""


class Tinymath:
    """A root in Gym's layout with one benchmark, whose files a test may rewrite."""

    def __init__(self, root):
        self.root = root
        self.folder = root / "benchmarks" / "tinymath"
        self.folder.mkdir(parents=True)
        self.write("prepare.py", PREPARE)
        self.write("config.yaml", CONFIG)
        self.write("prompt.yaml", PROMPT)
        (root / "benchmarks" / "base.yaml").write_text(BASE)

    def write(self, name, text):
        (self.folder / name).write_text(textwrap.dedent(text))

    def rewrite(self, name, old, new):
        text = (self.folder / name).read_text()
        assert old in text
        (self.folder / name).write_text(text.replace(old, new))

    def write_rows(self, rows):
        """Rows that are there, without a prepare script."""
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (self.folder / "rows.jsonl").write_text(lines)
        self.rewrite("config.yaml", "tinymath/data/tinymath.jsonl", "tinymath/rows.jsonl")
        self.drop("prepare_script", "prepare_script_args")

    def drop(self, *keys):
        lines = (self.folder / "config.yaml").read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.strip().split(":")[0] not in keys]
        (self.folder / "config.yaml").write_text("".join(kept))


@pytest.fixture
def tinymath(tmp_path, monkeypatch):
    monkeypatch.delenv("NEMO_GYM_EXTRA_ROOTS", raising=False)
    return Tinymath(tmp_path / "root")
