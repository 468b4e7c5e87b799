"""Router replay under NeMo RL's names: cursor, placeholders, backfill, fallback metrics."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.compat.nemo_rl import (
    NemoGym,
    backfill_missing_routed_experts,
    generate_responses,
    generate_responses_async,
    run_multi_turn_rollout,
)
from gymrl.compat.nemo_rl.routed_experts import (
    ROUTED_EXPERTS_DTYPES,
    add_r3_fallback_metrics,
    attach_routed_experts_to_message_log_prefix,
    dummy_routed_experts_for_tokens,
    find_routed_experts_template,
)
from gymrl.compat.nemo_rl.settings import rollout_config
from gymrl.environments import EnvironmentReturn
from gymrl.errors import ConfigError, GenerationError, RowValueError
from gymrl.generation import BatchGenerator, Generated
from gymrl.routed_experts import ROUTES_DTYPES
from gymrl.testing import ScriptedGenerator


def ids(count: int) -> torch.Tensor:
    return torch.arange(count)


def routes(*rows: int, dtype=torch.int16) -> torch.Tensor:
    """``[T, 1, 2]``, both experts of a token alike."""
    return torch.tensor(rows, dtype=dtype).reshape(-1, 1, 1).expand(-1, 1, 2).clone()


def rows_of(message) -> list[int]:
    return message["routed_experts"][:, 0, 0].tolist()


def test_the_types_are_those_that_routes_travel_in():
    assert list(ROUTED_EXPERTS_DTYPES) == list(ROUTES_DTYPES)
    assert all(dtype.is_signed for dtype in ROUTED_EXPERTS_DTYPES.values())


def test_routes_of_a_call_are_laid_over_the_messages_by_a_cursor():
    log = [
        {"role": "user", "token_ids": ids(2)},
        {"role": "assistant", "token_ids": ids(1), "routed_experts": routes(-1)},
        {"role": "note"},
        {"role": "user", "token_ids": ids(3)},
    ]

    start = attach_routed_experts_to_message_log_prefix(log, routes(*range(10, 20)))

    assert start == 6
    assert [rows_of(m) for m in log if "token_ids" in m] == [[10, 11], [12], [13, 14, 15]]
    assert "routed_experts" not in log[2]


@pytest.mark.parametrize("given_routes", [routes(1, 2), torch.zeros(5, 2)])
def test_routes_too_few_for_the_messages_are_attached_to_none_of_them(given_routes):
    log = [{"token_ids": ids(2)}, {"token_ids": ids(1)}]

    with pytest.raises(RowValueError, match="for 3 prompt tokens"):
        attach_routed_experts_to_message_log_prefix(log, given_routes)

    assert all("routed_experts" not in message for message in log)


def test_an_observation_gets_the_first_experts_in_every_layer_until_a_call_computes_it():
    log = [
        {"token_ids": ids(1)},
        {"token_ids": ids(2), "routed_experts": torch.zeros(2, 3, 4, dtype=torch.int8)},
    ]
    template = find_routed_experts_template(log)

    placeholder = dummy_routed_experts_for_tokens(ids(2), template)

    assert placeholder.tolist() == [[[0, 1, 2, 3]] * 3] * 2
    assert placeholder.dtype == torch.int8
    assert find_routed_experts_template([{"token_ids": ids(1)}]) is None


def test_every_tokenised_message_gets_a_route_or_the_sentinel_and_each_log_its_count():
    """NVIDIA-NeMo/RL#3378: a trajectory whose first turn raised, beside siblings with routes."""
    logs = [
        [
            {"token_ids": ids(2)},
            {"token_ids": ids(1)},
            {"token_ids": ids(1), "routed_experts": routes(7)},
        ],
        [{"token_ids": ids(2), "routed_experts": routes(5, 6)}, {"content": "no tokens"}],
        [{"token_ids": ids(3)}],
    ]

    counts = backfill_missing_routed_experts(logs)

    assert counts == [2, 0, 1]
    assert [[rows_of(m) for m in log if "token_ids" in m] for log in logs] == [
        [[-1, -1], [-1], [7]],
        [[5, 6]],
        [[-1, -1, -1]],
    ]
    assert all(m["routed_experts"].dtype == torch.int16 for m in (*logs[0], logs[1][0]))
    assert "routed_experts" not in logs[1][1]


def test_a_batch_without_any_routes_is_left_alone():
    logs = [[{"token_ids": ids(2)}], []]

    assert backfill_missing_routed_experts(logs) == [0, 0]
    assert "routed_experts" not in logs[0][0]


@pytest.mark.parametrize(("unsigned", "signed"), [("uint8", "int16"), ("uint16", "int32")])
def test_unsigned_routes_become_signed_so_that_the_sentinel_is_no_expert(unsigned, signed):
    highest = int(np.iinfo(unsigned).max)
    known = torch.from_numpy(np.full((1, 1, 1), highest, dtype=unsigned))
    logs = [[{"token_ids": ids(1), "routed_experts": known}, {"token_ids": ids(1)}]]

    backfill_missing_routed_experts(logs)

    assert [m["routed_experts"].flatten().tolist() for m in logs[0]] == [[highest], [-1]]
    assert {m["routed_experts"].dtype for m in logs[0]} == {getattr(torch, signed)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (routes(1), "message 1 of log 0: 1 rows of routes for 2 tokens"),
        (routes(1, 2, 3), "message 1 of log 0: 3 rows of routes for 2 tokens"),
        (torch.zeros(2, 2), r"message 1 of log 0: routed_experts has shape \[2, 2\]"),
        (torch.zeros(2, 1, 8), r"message 1 of log 0: routes of \[1, 8\].*log 0 has \[1, 2\]"),
    ],
)
def test_routes_that_do_not_fit_are_named_and_nothing_is_changed(wrong, message):
    logs = [
        [
            {"token_ids": ids(1), "routed_experts": routes(1)},
            {"token_ids": ids(2), "routed_experts": wrong},
            {"token_ids": ids(1)},
        ]
    ]

    with pytest.raises(RowValueError, match=message):
        backfill_missing_routed_experts(logs)

    assert "routed_experts" not in logs[0][2]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=4), max_size=4),
    st.sampled_from(["int8", "int16", "int32"]),
)
def test_after_a_backfill_any_batch_can_be_joined_and_known_routes_are_untouched(shape, dtype):
    logs = [
        [
            {
                "token_ids": ids(count),
                **(
                    {"routed_experts": routes(*[9] * count, dtype=getattr(torch, dtype))}
                    if has
                    else {}
                ),
            }
            for count, has in log
        ]
        for log in shape
    ]
    has_any = any(has for log in shape for _, has in log)

    counts = backfill_missing_routed_experts(logs)

    assert counts == [sum(not has for _, has in log) if has_any else 0 for log in shape]
    if has_any:
        joined = torch.cat([m["routed_experts"] for log in logs for m in log])
        naive = [9 if has else -1 for log in shape for count, has in log for _ in range(count)]
        assert joined[:, 0, 0].tolist() == naive


def test_fallback_metrics_are_sums_over_the_call():
    metrics = {"mean_generation_length": 2.0}

    add_r3_fallback_metrics(
        metrics,
        {
            "r3_routed_experts_missing_routes": torch.tensor([0, 3, 2]),
            "r3_routed_experts_expected_routes": torch.tensor([5, 3, 2]),
            "r3_routed_experts_actual_routes": torch.tensor([5, 0, 0]),
        },
    )

    assert metrics == {
        "mean_generation_length": 2.0,
        "r3/routed_experts_fallback_samples": 2,
        "r3/routed_experts_fallback_token_routes": 5,
        "r3/routed_experts_expected_token_routes": 10,
        "r3/routed_experts_actual_token_routes": 5,
        "r3/routed_experts_fallback_token_route_fraction": 0.5,
    }


def test_the_fraction_is_zero_where_nothing_was_expected_and_no_counts_add_nothing():
    metrics, silent = {}, {}

    add_r3_fallback_metrics(metrics, {"r3_routed_experts_missing_routes": torch.tensor([0])})
    add_r3_fallback_metrics(silent, {"output_ids": torch.zeros(1, 1)})

    assert metrics["r3/routed_experts_fallback_token_route_fraction"] == 0.0
    assert silent == {}


class Characters:
    pad_token_id = 0

    def encode(self, text, add_special_tokens=False):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids)


def routed(prompt_ids, sampling) -> Generated:
    """Answers "x"; routes tell the length of the call's prompt (hundreds) and the row."""
    if prompt_ids[0] == ord("-"):
        return Generated(token_ids=[120], logprobs=[-0.5], finish_reason="stop")
    count = len(prompt_ids) + 1
    rows = 100 * len(prompt_ids) + np.arange(count, dtype=np.int16)
    rows[-1] = -1
    return Generated(
        token_ids=[120],
        logprobs=[-0.5],
        finish_reason="stop",
        routed_experts=rows.reshape(-1, 1, 1).repeat(2, axis=2),
    )


def policy() -> BatchGenerator:
    return BatchGenerator(ScriptedGenerator(routed), pad_token_id=0)


def batch_of(*texts):
    tokens = [torch.tensor([ord(c) for c in text]) for text in texts]
    width = max(map(len, tokens))
    batch = {"message_log": [[{"role": "user", "content": "", "token_ids": t}] for t in tokens]}
    data = {
        "input_ids": torch.stack([torch.nn.functional.pad(t, (0, width - len(t))) for t in tokens]),
        "input_lengths": torch.tensor([len(t) for t in tokens]),
    }
    return batch, data


@pytest.mark.parametrize("is_async", [False, True])
def test_a_generated_answer_and_the_messages_before_it_get_the_calls_routes(is_async):
    batch, data = batch_of("abc", "-")
    arguments = (policy(), data, batch, Characters(), data["input_lengths"])

    if is_async:
        _, _, metrics = asyncio.run(generate_responses_async(*arguments))
    else:
        _, _, metrics = generate_responses(*arguments)

    routed_log, plain_log = batch["message_log"]
    assert [rows_of(m) for m in routed_log] == [[300, 301, 302], [-1]]
    assert [rows_of(m) for m in plain_log] == [[-1], [-1]]
    assert metrics["r3/routed_experts_expected_token_routes"] == 4
    assert metrics["r3/routed_experts_fallback_token_routes"] == 1
    assert metrics["r3/routed_experts_fallback_samples"] == 1


def test_a_second_call_mends_the_last_token_and_replaces_the_placeholder_of_an_observation():
    batch, data = batch_of("ab")
    generate_responses(policy(), data, batch, Characters(), data["input_lengths"])
    (log,) = batch["message_log"]
    template = find_routed_experts_template(log)
    seen = torch.tensor([ord("o")])
    placeholder = dummy_routed_experts_for_tokens(seen, template)
    log.append(
        {"role": "environment", "content": "o", "token_ids": seen, "routed_experts": placeholder}
    )
    whole = torch.cat([m["token_ids"] for m in log])

    generate_responses(
        policy(),
        {"input_ids": whole.unsqueeze(0), "input_lengths": torch.tensor([4])},
        batch,
        Characters(),
        torch.tensor([4]),
    )

    assert [rows_of(m) for m in log] == [[400, 401], [402], [403], [-1]]


def test_a_log_that_is_not_the_prompt_is_refused():
    batch, data = batch_of("abc")
    batch["message_log"][0][0]["token_ids"] = ids(2)

    with pytest.raises(GenerationError, match="4 rows of routes for 2 tokens of the message log"):
        generate_responses(policy(), data, batch, Characters(), data["input_lengths"])


class Ends:
    def step(self, message_logs, metadata):
        count = len(message_logs)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": "done"}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=[1.0] * count,
            terminateds=[True] * count,
        )


class OtherPolicy:
    """NeMo RL's batch face and nothing of gymrl's."""

    def generate(self, data, greedy=False):
        return policy().generate(dict(data))


@pytest.mark.parametrize("make", [policy, OtherPolicy, lambda: ScriptedGenerator(routed)])
def test_whole_native_rollouts_have_routes_on_every_message_and_fallback_metrics(make):
    batch, _ = batch_of("abc", "-")

    columns, metrics = run_multi_turn_rollout(
        make(),
        {**batch, "task_name": ["w", "w"], "extra_env_info": [None, None]},
        Characters(),
        {"w": Ends()},
        max_seq_len=40,
    )

    assert [[rows_of(m) for m in log] for log in columns["message_log"]] == [
        [[300, 301, 302], [-1]],
        [[-1], [-1]],
    ]
    # The log of a sample without routes is filled up; the sample itself says that it has none.
    assert metrics["r3/routed_experts_fallback_token_routes"] == 1
    assert metrics["r3/routed_experts_fallback_token_route_fraction"] == 0.25


CFG = {
    "model_name": "policy",
    "base_urls": ["http://127.0.0.1:1/v1"],
    "initial_global_config_dict": {"head_server": {"host": "127.0.0.1", "port": 1}},
}


def test_the_environments_settings_reach_the_workers():
    config = rollout_config({**CFG, "require_routed_experts": True, "routed_experts_dtype": "int8"})

    assert config.gym.require_routed_experts
    assert config.gym.routed_experts_dtype == "int8"
    assert not rollout_config(CFG).gym.require_routed_experts


def test_a_type_that_is_none_is_refused_before_any_process():
    with pytest.raises(ConfigError, match="routed_experts_dtype"):
        NemoGym({**CFG, "routed_experts_dtype": "uint8"})
