import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import SamplingParams
from gymrl.errors import RowTypeError, RowValueError, UnsupportedOptionError
from gymrl.rollout.prepare import (
    GroupSizes,
    next_attempt,
    prepare_rows,
    refuse_unsupported,
    repeat_rows,
    sampling_seed,
)


def dataset_row(**changes):
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "2+2?"}]},
        "agent_ref": {"name": "math_agent"},
        "expected_answer": "4",
    }
    return {**row, **changes}


def with_params(**params):
    return dataset_row(responses_create_params={"input": "2+2?", **params})


TRAINING = SamplingParams()


def prepare_one(row, sampling=TRAINING, **options):
    (prepared,) = prepare_rows([row], sampling, GroupSizes(group=1), **options)
    return json.loads(prepared.body)


def test_the_sampling_profile_is_stamped_on_every_row():
    body = prepare_one(
        with_params(temperature=0.1, top_p=0.2), SamplingParams(temperature=0.7, top_p=0.9)
    )
    assert body["responses_create_params"]["temperature"] == 0.7
    assert body["responses_create_params"]["top_p"] == 0.9


def test_the_callers_rows_are_never_changed():
    row = with_params(tools=[], metadata={"extra_body": '{"min_p": 0.1}'})
    before = json.dumps(row)
    prepare_rows([row] * 4, SamplingParams(), GroupSizes(group=2), seed=1)
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    ("own", "configured", "stamped"),
    [(100, 50, 50), (50, 100, 50), (None, 70, 70), (70, None, 70), (None, None, None)],
)
def test_the_smaller_output_limit_wins(own, configured, stamped):
    params = prepare_one(with_params(max_output_tokens=own), SamplingParams(max_tokens=configured))
    assert params["responses_create_params"].get("max_output_tokens") == stamped


@pytest.mark.parametrize("tools", [[], None])
def test_an_empty_list_of_tools_is_dropped(tools):
    assert "tools" not in prepare_one(with_params(tools=tools))["responses_create_params"]


def test_tools_that_are_there_stay():
    tools = [{"type": "function", "name": "add", "strict": True}]
    assert prepare_one(with_params(tools=tools))["responses_create_params"]["tools"] == tools


def test_unknown_fields_of_the_request_and_the_row_survive():
    body = prepare_one(
        dataset_row(
            responses_create_params={"input": "x", "a_new_field": {"deep": [1, None, True]}},
            verifier_metadata={"x": "你好 😀"},
        )
    )
    assert body["responses_create_params"]["a_new_field"] == {"deep": [1, None, True]}
    assert body["verifier_metadata"] == {"x": "你好 😀"}
    assert body["expected_answer"] == "4"


def test_rows_know_their_place_in_batch_prompt_and_group():
    rows = prepare_rows([dataset_row()] * 6, SamplingParams(), GroupSizes(group=3))
    assert [row.index for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row.task_index for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row.rollout_index for row in rows] == [0, 1, 2, 0, 1, 2]
    bodies = [json.loads(row.body) for row in rows]
    assert [body["_rowidx"] for body in bodies] == [0, 1, 2, 3, 4, 5]
    assert [body["_ng_task_index"] for body in bodies] == [0, 0, 0, 1, 1, 1]
    assert [body["_ng_rollout_index"] for body in bodies] == [0, 1, 2, 0, 1, 2]


def test_attempts_at_a_prompt_share_a_group_id_that_no_other_preparation_has():
    def ids(*own):
        rows = [dataset_row(**fields) for fields in own or ({},) * 4]
        prepared = prepare_rows(rows, SamplingParams(), GroupSizes(group=4, identity=2))
        return [json.loads(row.body).get("_ng_group_id") for row in prepared]

    first, second, third, fourth = ids()
    assert first == second != third == fourth
    assert set(ids()).isdisjoint([first, third])
    assert ids(*({"_ng_group_id": "mine", "_ng_group_attempt": 2},) * 4) == ["mine"] * 4
    assert "_ng_group_id" not in prepare_one(dataset_row())


def test_identity_is_independent_of_the_group_that_is_yielded():
    sizes = GroupSizes(group=6, identity=2, routing=2, returns_entire_batch=True)
    rows = prepare_rows([dataset_row()] * 6, SamplingParams(), sizes)
    assert [row.task_index for row in rows] == [0, 0, 1, 1, 2, 2]
    assert [row.rollout_index for row in rows] == [0, 1, 0, 1, 0, 1]


def test_indices_that_a_row_brings_are_kept():
    body = prepare_one(dataset_row(_ng_task_index=17, _ng_rollout_index=3))
    assert (body["_ng_task_index"], body["_ng_rollout_index"]) == (17, 3)


def test_null_indices_count_as_absent():
    body = prepare_one(dataset_row(_ng_task_index=None, _ng_rollout_index=None))
    assert (body["_ng_task_index"], body["_ng_rollout_index"]) == (0, 0)


def test_repeats_of_a_row_that_names_its_rollout_get_places_of_their_own():
    repeated = repeat_rows([dataset_row(_ng_rollout_index=0, _ng_rollout_id="mine")], 3)
    rows = prepare_rows(repeated, SamplingParams(), GroupSizes(group=3))
    assert [row.rollout_index for row in rows] == [0, 1, 2]


def test_repeats_stand_together():
    first, second = dataset_row(task=1), dataset_row(task=2)
    assert [row["task"] for row in repeat_rows([first, second], 2)] == [1, 1, 2, 2]


def test_rollout_ids_are_unique_within_and_across_preparations():
    rows = [dataset_row(_ng_task_index=0, _ng_rollout_index=0)] * 8
    ids = [
        row.rollout_id
        for _ in range(2)
        for row in prepare_rows(rows, SamplingParams(), GroupSizes(group=4))
    ]
    assert len(set(ids)) == 16


def test_an_agent_cannot_tell_the_ids_of_other_rollouts_from_its_own():
    rows = prepare_rows([dataset_row()] * 4, SamplingParams(), GroupSizes(group=4))
    ends = {row.rollout_id.rpartition("-")[2] for row in rows}
    assert len(ends) == 4
    assert {len(end) for end in ends} == {16}


def test_rollout_ids_fit_the_pattern_and_are_in_the_body():
    (row,) = prepare_rows([dataset_row()], SamplingParams(), GroupSizes(group=1))
    retried = next_attempt(row, 1)
    for attempt in (row, retried):
        assert attempt.rollout_id[0].isalnum()
        assert set(attempt.rollout_id) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.")
        assert json.loads(attempt.body)["_ng_rollout_id"] == attempt.rollout_id
    assert retried.rollout_id != row.rollout_id


def test_a_second_attempt_asks_for_exactly_what_the_first_asked_for():
    (row,) = prepare_rows(
        [with_params(metadata={"k": "v"})], SamplingParams(), GroupSizes(group=1), seed=3
    )
    first, second = json.loads(row.body), json.loads(next_attempt(row, 1).body)
    del first["_ng_rollout_id"], second["_ng_rollout_id"]
    assert first == second


def row_seed(body):
    return json.loads(body["responses_create_params"]["metadata"]["extra_body"])["seed"]


def test_the_row_seed_travels_in_extra_body():
    assert row_seed(prepare_one(dataset_row(), seed=7)) == sampling_seed(7, 0, 0)


def test_the_row_seed_joins_an_extra_body_that_is_there():
    body = prepare_one(
        with_params(metadata={"trace": "t1", "extra_body": '{"min_p": 0.1, "seed": 5}'}), seed=7
    )
    metadata = body["responses_create_params"]["metadata"]
    assert metadata["trace"] == "t1"
    assert json.loads(metadata["extra_body"]) == {"min_p": 0.1, "seed": sampling_seed(7, 0, 0)}


@pytest.mark.parametrize("metadata", [None, {}, {"extra_body": None}])
def test_null_metadata_takes_the_seed(metadata):
    assert row_seed(prepare_one(with_params(metadata=metadata), seed=7)) == sampling_seed(7, 0, 0)


def test_without_a_run_seed_nothing_is_stamped():
    assert "metadata" not in prepare_one(dataset_row())["responses_create_params"]


def test_row_seeds_depend_on_run_task_and_rollout_alone():
    seeds = {
        sampling_seed(run, task, rollout)
        for run in range(5)
        for task in range(5)
        for rollout in range(5)
    }
    assert len(seeds) == 125
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(7, 1, 2) == sampling_seed(7, 1, 2)


@pytest.mark.parametrize(
    "row",
    [
        "not a row",
        {"agent_ref": {"name": "math_agent"}},
        dataset_row(responses_create_params=None),
        dataset_row(responses_create_params=[1]),
        dataset_row(agent_ref="math_agent"),
        dataset_row(agent_ref={"name": 3}),
        dataset_row(_ng_task_index=True),
        dataset_row(_ng_task_index="0"),
        dataset_row(_ng_rollout_index=1.0),
        with_params(max_output_tokens="10"),
        with_params(max_output_tokens=True),
        with_params(metadata=[]),
        with_params(metadata={"extra_body": {"seed": 1}}),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_and_names_the_row(row):
    with pytest.raises(RowTypeError, match="row 1") as caught:
        prepare_rows([dataset_row(), row], SamplingParams(), GroupSizes(group=1), seed=1)
    assert caught.value.row == 1


@pytest.mark.parametrize(
    "row",
    [
        {"responses_create_params": {}},
        dataset_row(agent_ref=None),
        dataset_row(agent_ref={}),
        dataset_row(agent_ref={"name": ""}, task_source=""),
        dataset_row(_ng_task_index=-1),
        with_params(max_output_tokens=0),
        with_params(metadata={"extra_body": "{"}),
        with_params(metadata={"extra_body": "[1]"}),
        with_params(metadata={"extra_body": '"\ud800"'}),
    ],
)
def test_a_value_that_cannot_be_served_is_refused_and_names_the_row(row):
    with pytest.raises(RowValueError, match="row 1") as caught:
        prepare_rows([dataset_row(), row], SamplingParams(), GroupSizes(group=1), seed=1)
    assert caught.value.row == 1


def test_a_row_without_an_agent_goes_by_its_task_source():
    (row,) = prepare_rows(
        [dataset_row(agent_ref=None, task_source="math")], SamplingParams(), GroupSizes(group=1)
    )
    assert row.route == "math"


def test_an_unknown_route_is_refused_before_any_request_listing_the_known_ones_sorted():
    with pytest.raises(RowValueError, match=r"row 0: .*'math_agent' \(known: a, b, c\)"):
        prepare_one(dataset_row(), routes=["c", "a", "b"])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (2**70, "64 bits"),
        (-(2**63) - 1, "64 bits"),
        (float("nan"), "nan"),
        (float("-inf"), "inf"),
        ("a\ud800b", "surrogate"),
        ({1, 2}, "set"),
        (b"raw", "bytes"),
        (object(), "object"),
        ({3: "x"}, "key 3"),
        ({None: "x"}, "key None"),
        ({"\ud800": 1}, "key"),
    ],
)
def test_a_value_that_json_would_change_is_refused_with_row_and_path(value, reason):
    row = dataset_row(verifier_metadata={"cases": [{"ok": 1}, {"bad one": value}]})
    with pytest.raises(RowValueError, match=reason) as caught:
        prepare_one(row)
    assert "row 0: verifier_metadata.cases[1].'bad one'" in str(caught.value)


def test_nesting_is_bounded_and_a_cycle_is_refused():
    cycle = []
    cycle.append(cycle)
    with pytest.raises(RowValueError, match="deep"):
        prepare_one(dataset_row(extra=cycle))
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RowValueError, match="deep"):
        prepare_one(dataset_row(extra=deep))


def test_the_largest_and_smallest_64_bit_integers_travel():
    body = prepare_one(dataset_row(big=2**64 - 1, small=-(2**63)))
    assert (body["big"], body["small"]) == (2**64 - 1, -(2**63))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4)
    ),
    max_leaves=20,
)


@settings(deadline=None, max_examples=40)
@given(json_values)
def test_whatever_json_can_hold_arrives_as_it_was_given(value):
    assert prepare_one(dataset_row(verifier_metadata=value))["verifier_metadata"] == value


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": 20}, "top_k"),
        ({"stop": ("END",)}, "stop"),
        ({"stop_token_ids": (2,)}, "stop_token_ids"),
        ({"ignore_eos": True}, "ignore_eos"),
    ],
)
def test_sampling_options_without_a_road_through_gym_are_refused(changes, setting):
    with pytest.raises(UnsupportedOptionError) as caught:
        prepare_rows([dataset_row()], SamplingParams(**changes), GroupSizes(group=1))
    assert caught.value.setting == setting


def test_a_validation_may_be_greedy():
    body = prepare_one(dataset_row(), SamplingParams(temperature=0.0), is_training=False)
    assert body["responses_create_params"]["temperature"] == 0.0


@pytest.mark.parametrize("options", [{"greedy": True}, {"max_rollout_turns": 5}])
def test_greedy_decoding_and_turn_limits_are_refused(options):
    with pytest.raises(AssertionError, match="not supported"):
        refuse_unsupported(SamplingParams(), **options)


@pytest.mark.parametrize("option", ["top_k", "stop", "stop_token_ids"])
def test_a_rows_own_unsupported_option_is_refused_and_names_the_row(option):
    with pytest.raises(UnsupportedOptionError, match=f"row 0: .*{option}"):
        prepare_one(with_params(**{option: [5]}))


@pytest.mark.parametrize(
    "sizes",
    [
        GroupSizes(group=0),
        GroupSizes(group=-2),
        GroupSizes(group=4),
        GroupSizes(group=6, routing=4),
        GroupSizes(group=6, identity=0),
        GroupSizes(group=3, returns_entire_batch=True),
    ],
)
def test_sizes_that_do_not_fit_the_batch_are_refused(sizes):
    with pytest.raises(RowValueError):
        prepare_rows([dataset_row()] * 6, SamplingParams(), sizes)


@pytest.mark.parametrize("size", [True, 2.0, "2"])
def test_sizes_that_are_no_integers_are_refused(size):
    with pytest.raises(RowTypeError):
        prepare_rows([dataset_row()] * 6, SamplingParams(), GroupSizes(group=size))


def test_an_empty_batch_is_refused():
    with pytest.raises(RowValueError, match="empty"):
        prepare_rows([], SamplingParams(), GroupSizes(group=1))


def test_equal_runs_prepare_equal_requests():
    def requests():
        rows = prepare_rows([dataset_row()] * 4, SamplingParams(), GroupSizes(group=2), seed=11)
        return [json.loads(row.body)["responses_create_params"] for row in rows]

    first = requests()
    assert first == requests()
    assert len({json.dumps(request) for request in first}) == 4
