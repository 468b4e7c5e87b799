import math

import msgspec
import numpy as np
import pytest

from gymrl.concurrency import gather_bounded
from gymrl.config import SamplingParams
from gymrl.errors import BadLogprobsError, GenerationRequestError
from gymrl.generation.fidelity import RecordedSequence, check_fidelity, recompute_logprobs
from gymrl.generation.transformers import TransformersGenerator
from gymrl.types import Reward, Trajectory, Turn

SAMPLINGS = [
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=40, temperature=0.7),
    SamplingParams(max_tokens=30, temperature=1.3, top_k=50, top_p=0.9),
    SamplingParams(max_tokens=10, temperature=0),
]


async def recorded(model, mode="processed") -> list[RecordedSequence]:
    generator = TransformersGenerator(model, end_ids=[], logprobs_mode=mode)
    calls = [([1 + i] * (1 + 7 * i), SAMPLINGS[i % 4]) for i in range(12)]
    results = await gather_bounded(lambda call: generator.generate(*call), calls)
    await generator.close()
    return [
        RecordedSequence.of_call(prompt, result.token_ids, result.logprobs, sampling)
        for (prompt, sampling), result in zip(calls, results, strict=True)
    ]


@pytest.mark.parametrize("mode", ["processed", "raw"])
async def test_what_a_generator_records_agrees_with_a_plain_forward_pass(tiny_model, mode):
    report = check_fidelity(tiny_model, await recorded(tiny_model, mode), mode=mode)
    assert report.num_sequences == 12
    assert report.num_tokens == 3 * (20 + 40 + 30 + 10)
    assert report.agrees(), report


async def test_the_size_of_a_piece_does_not_matter(tiny_model):
    sequences = await recorded(tiny_model)
    for max_tokens in (5, 64, 10_000):
        assert check_fidelity(tiny_model, sequences, max_tokens=max_tokens).agrees()


async def test_a_record_of_the_wrong_temperature_is_found(tiny_model):
    sequences = await recorded(tiny_model)
    wrong = msgspec.structs.replace(sequences[1], sampling=SamplingParams())
    report = check_fidelity(tiny_model, [sequences[0], wrong])
    assert not report.agrees()
    assert report.worst is not None
    assert report.worst[0] == 1


async def test_one_wrong_token_is_found_with_its_place(tiny_model):
    sequence = (await recorded(tiny_model))[0]
    token_ids = sequence.token_ids.copy()
    token_ids[-1] = (token_ids[-1] + 1) % 400
    report = check_fidelity(tiny_model, [msgspec.structs.replace(sequence, token_ids=token_ids)])
    assert not report.agrees()
    assert report.worst == (0, len(token_ids) - 1)


async def test_a_recorded_token_that_a_filter_excludes_is_an_infinite_gap(tiny_model):
    sequence = (await recorded(tiny_model))[0]
    greedy = msgspec.structs.replace(sequence, sampling=SamplingParams(top_k=1))
    assert check_fidelity(tiny_model, [greedy]).max_gap == math.inf


def test_sequences_of_several_turns_are_checked_where_tokens_were_sampled(tiny_model):
    ids = np.arange(1, 31, dtype=np.int32)
    turns = (Turn(start=0, generation_start=4, end=9), Turn(start=9, generation_start=20, end=30))
    blank = Trajectory(
        agent="a", token_ids=ids, logprobs=np.zeros(30, np.float32), turns=turns, reward=Reward(0.0)
    )
    sequence = RecordedSequence.of(blank, SamplingParams())
    values = recompute_logprobs(tiny_model, [sequence])[0]
    assert np.flatnonzero(values).tolist() == [*range(4, 9), *range(20, 30)]
    honest = msgspec.structs.replace(sequence, logprobs=values)
    assert check_fidelity(tiny_model, [honest]).num_tokens == 15
    assert check_fidelity(tiny_model, [honest]).agrees()


def test_nothing_sampled_is_no_agreement(tiny_model):
    sequence = RecordedSequence.of_call([1, 2, 3], [], [], SamplingParams())
    report = check_fidelity(tiny_model, [sequence])
    assert (report.num_tokens, report.worst) == (0, None)
    assert not report.agrees()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_recorded_value_that_is_no_number_is_refused_with_its_position(tiny_model, bad):
    sequence = RecordedSequence.of_call([1, 2], [3, 4], [-0.5, bad], SamplingParams())
    with pytest.raises(BadLogprobsError, match="position 3") as caught:
        check_fidelity(tiny_model, [sequence])
    assert caught.value.position == 3


def test_arrays_that_do_not_fit_together_are_refused(tiny_model):
    sequence = RecordedSequence.of_call([1, 2], [3, 4], [-0.5], SamplingParams())
    with pytest.raises(BadLogprobsError, match="don't fit together"):
        check_fidelity(tiny_model, [sequence])


@pytest.mark.parametrize("token_id", [-1, 100_000])
def test_a_sequence_of_another_model_is_told_before_the_forward_pass(tiny_model, token_id):
    """torch said `index out of range in self`; on a GPU the process is lost with it."""
    sequence = RecordedSequence.of_call([5, token_id], [6], [-1.0], SamplingParams())
    with pytest.raises(
        GenerationRequestError, match=r"sequence 1: .* not the model that"
    ) as caught:
        check_fidelity(
            tiny_model, [RecordedSequence.of_call([5], [6], [-1.0], SamplingParams()), sequence]
        )
    assert caught.value.position == 1


def test_a_first_token_can_not_have_been_sampled(tiny_model):
    sequence = RecordedSequence.of_call([], [3], [-0.5], SamplingParams())
    with pytest.raises(BadLogprobsError, match="nothing precedes it"):
        check_fidelity(tiny_model, [sequence])
