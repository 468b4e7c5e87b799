"""Random rollouts: whatever the turns and however the JSON is spelled, the tokens are the same."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.gym.episode import read_episode

ids = st.integers(0, 2**31 - 1)
turns = st.lists(
    st.tuples(st.lists(ids, max_size=6), st.lists(ids, min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
)


def body_of(turns, indents=(None,), separators=(",", ":")):
    seen, items = [], []
    for number, (observed, sampled) in enumerate(turns):
        prompt = seen + observed
        item = {
            "type": "message",
            "prompt_token_ids": prompt,
            "generation_token_ids": sampled,
            "generation_log_probs": [-float(k + 1) for k in range(len(sampled))],
        }
        indent = indents[number % len(indents)]
        items.append(json.dumps(item, indent=indent, separators=separators))
        seen = prompt + sampled
    text = f'{{"reward": 1.0, "response": {{"output": [{", ".join(items)}]}}, "extra": [1.50]}}'
    return text.encode(), seen


@settings(deadline=None, max_examples=60)
@given(turns=turns)
def test_lengths_agree_and_the_sampled_ids_come_back_verbatim(turns):
    body, everything = body_of(turns)
    trajectory = read_episode(body, agent="a")
    assert trajectory.token_ids.tolist() == everything
    assert len(trajectory.token_ids) == len(trajectory.logprobs) == len(trajectory.token_mask())
    assert trajectory.turns[0].start == 0
    assert trajectory.turns[-1].end == trajectory.num_tokens
    for before, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        assert before.end == after.start
    for turn, (observed, sampled) in zip(trajectory.turns, turns, strict=True):
        ids = trajectory.token_ids.tolist()
        assert ids[turn.start : turn.generation_start] == observed
        assert ids[turn.generation_start : turn.end] == sampled
        logprobs = trajectory.logprobs[turn.generation_start : turn.end]
        assert logprobs.tolist() == [-float(k + 1) for k in range(len(sampled))]
        assert not trajectory.logprobs[turn.start : turn.generation_start].any()


@settings(deadline=None, max_examples=30)
@given(
    turns=turns,
    indents=st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=4),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " :\n")]),
)
def test_the_result_does_not_depend_on_the_white_space_of_the_json(turns, indents, separators):
    plain = read_episode(body_of(turns)[0], agent="a")
    spaced = read_episode(body_of(turns, indents, separators)[0], agent="a")
    assert np.array_equal(plain.token_ids, spaced.token_ids)
    assert np.array_equal(plain.logprobs, spaced.logprobs)
    assert plain.turns == spaced.turns
    assert json.loads(plain.result) == json.loads(spaced.result)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text('ab"\\:,{}', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(extra=json_values, item_extra=json_values, first=st.booleans())
def test_the_verifiers_own_fields_survive_whatever_they_hold(extra, item_extra, first):
    tokens = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [0.0]}
    item = {"own": item_extra, **tokens} if first else {**tokens, "own": item_extra}
    body = {"extra": extra, "response": {"output": [item]}, "reward": 0.5}
    result = json.loads(read_episode(json.dumps(body).encode(), agent="a").result)
    assert result == {"extra": extra, "response": {"output": [{"own": item_extra}]}, "reward": 0.5}
