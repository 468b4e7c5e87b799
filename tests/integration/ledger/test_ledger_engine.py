"""The engine over real processes, with agents that know nothing of tokens."""

import numpy as np
import pytest

from gymrl.config import GenerationConfig, GymConfig, RolloutConfig, SamplingParams
from gymrl.records import RecordWriter, RunRecord, read_groups
from gymrl.rollout.engine import RolloutEngine
from gymrl.tensors import to_batch
from gymrl.types import WeightVersionSpan
from tests.integration.ledger.conftest import CHAT_AGENT


@pytest.mark.parametrize("in_process", [True, False])
async def test_a_run_over_the_ledger_gives_groups_records_and_tensors(
    tiny_directory, tmp_path, in_process
):
    model = str(tiny_directory)
    config = RolloutConfig(
        generation=GenerationConfig(model=model, max_batch_size=4, num_threads=1),
        gym=GymConfig(
            servers=CHAT_AGENT, tokenizer=model, token_source="ledger", side_calls="keep"
        ),
        sampling=SamplingParams(max_tokens=8),
        seed=1,
        in_process=in_process,
    )
    rows = [
        {
            "agent_ref": {"name": "agent"},
            "responses_create_params": {"input": "unused"},
            "questions": [f"{number} and 2?", "and then?"],
            "aside": True,
        }
        for number in range(2)
    ]
    async with RolloutEngine(config) as engine:
        groups = await engine.run(rows, num_generations=2)
    samples = [sample for group in groups for sample in group.trajectories]
    assert len(samples) == 4
    for sample in samples:
        assert len(sample.turns) == 2
        assert len(sample.side_trajectories) == 2
        assert sample.turns[1].prompt_text
        assert "and then?" in sample.turns[1].prompt_text
        assert sample.weight_versions == tuple(
            WeightVersionSpan("0", turn.generation_start, turn.end) for turn in sample.turns
        )
    assert int(to_batch(groups, pad_token_id=0).token_mask.sum()) == sum(
        sample.num_generated for sample in samples
    )
    path = tmp_path / "rollouts.jsonl"
    with RecordWriter(path, RunRecord()) as writer:
        for group in groups:
            writer.write(group)
    read = [sample for group in read_groups(path) for sample in group.trajectories]
    for before, after in zip(samples, read, strict=True):
        assert after.weight_versions == before.weight_versions
        pairs = zip(before.side_trajectories, after.side_trajectories, strict=True)
        for one, other in pairs:
            assert one.turns == other.turns
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.logprobs, other.logprobs)
