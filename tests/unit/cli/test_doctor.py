import io

import numpy as np
import pytest
from rich.console import Console

from gymrl.cli.doctor import (
    FileGap,
    combine,
    print_gaps,
    remedy,
    require_vocabulary,
    sampling_of,
    verdict,
)
from gymrl.errors import ConfigError
from gymrl.generation.fidelity import FidelityReport
from gymrl.records import RowRecord, SamplingRecord
from gymrl.types import Reward, Trajectory


def record(index, **sampling):
    return RowRecord(
        group=0,
        group_size=1,
        index=index,
        task_index=0,
        rollout_index=0,
        route="agent",
        rollout_id=f"r{index}",
        task_digest="",
        sampling=SamplingRecord(**sampling),
    )


def report(tokens, mean, largest, worst):
    return FidelityReport(
        num_sequences=1, num_tokens=tokens, mean_gap=mean, max_gap=largest, worst=worst
    )


def gap(**changes):
    values = {
        "path": "a.jsonl", "rows": 1, "tokens": 4, "mean_gap": 1e-5, "max_gap": 2e-4,
        "worst": (3, 7),
    }  # fmt: skip
    return FileGap(**(values | changes))


def test_the_mean_over_pieces_is_over_tokens_and_the_worst_names_the_row():
    pieces = [
        ([record(4), record(5)], report(10, 0.1, 0.3, (1, 9))),
        ([record(6)], report(30, 0.5, 0.9, (0, 2))),
    ]
    combined = combine("a.jsonl", pieces)
    assert combined.mean_gap == pytest.approx(0.4)
    assert (combined.max_gap, combined.worst) == (0.9, (6, 2))
    assert (combined.rows, combined.tokens) == (3, 40)


def test_a_file_without_sampled_tokens_proves_nothing():
    empty = combine("a.jsonl", [])
    assert (empty.tokens, empty.worst) == (0, None)
    assert verdict(empty, 1e-3) == "nothing to compare"


def test_the_largest_gap_decides():
    assert verdict(gap(max_gap=1e-3), 1e-3) == "ok"
    assert verdict(gap(max_gap=1.1e-3), 1e-3) == "above 0.001"
    assert verdict(gap(max_gap=float("inf")), 1e-3) == "above 0.001"
    assert verdict(gap(max_gap=float("nan")), 1e-3) == "above 0.001"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 0, "rows": 0}, "returns token ids"),
        ({"max_gap": 0.3, "mean_gap": 0.04}, "--tolerance above 0.3"),
        ({"max_gap": 9.0, "mean_gap": 4.0}, "name the checkpoint that served them"),
        ({"max_gap": float("nan"), "mean_gap": float("nan")}, "name the checkpoint"),
    ],
)
def test_a_verdict_that_is_not_well_says_what_to_change(changes, said):
    assert said in remedy(gap(**changes), 1e-3)
    assert remedy(gap(), 1e-3) == ""


def test_sampling_that_a_record_does_not_name_is_off():
    params = sampling_of(record(0))
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, None)
    params = sampling_of(record(0, temperature=0.7, top_p=0.9, top_k=5))
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 5)


def test_every_file_has_a_line_with_its_gaps():
    stream = io.StringIO()
    print_gaps(Console(file=stream, width=160), [gap(), gap(path="b.jsonl", max_gap=0.5)], 1e-3)
    text = stream.getvalue()
    assert "row 3, token 7" in text
    assert "2.00e-04" in text
    assert "above 0.001" in text


def test_rollouts_of_a_larger_vocabulary_are_refused_by_row():
    trajectory = Trajectory(
        agent="agent",
        token_ids=np.array([1, 500, 2], np.int32),
        logprobs=np.zeros(3, np.float32),
        turns=(),
        reward=Reward(0.0),
    )
    require_vocabulary([(record(7), trajectory)], 501)
    with pytest.raises(ConfigError, match="row 7 holds token 500, but the model has 500 tokens"):
        require_vocabulary([(record(7), trajectory)], 500)
