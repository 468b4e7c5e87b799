"""The example of the guide runs as it stands there, with a small model of its own."""

import re
from pathlib import Path

import anyio
import pytest

from gymrl.evaluation import read_evaluation
from gymrl.testing.models import build_tiny_model

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "resume-and-compare.md"


@pytest.mark.slow
@pytest.mark.timeout(240)  # a model is loaded twice
def test_the_guides_example_runs_reports_and_compares(tmp_path, monkeypatch, capsys):
    model = build_tiny_model(tmp_path / "tiny")
    (script,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert 'model="smollm2"' in script
    names = {"__name__": "example"}
    exec(compile(script.replace("smollm2", str(model)), "example.py", "exec"), names)
    monkeypatch.chdir(tmp_path)

    anyio.run(names["main"])

    mean, *_ = capsys.readouterr().out.split()
    assert 0.0 <= float(mean) <= 1.0
    for name in ("a", "b"):
        evaluation = read_evaluation(tmp_path / "runs" / name)
        assert [len(task.attempts) for task in evaluation.tasks] == [2, 2, 2, 2]
