import pytest
import torch

from gymrl.compat.nemo_rl.tensorize import tensorize_by_key, tensorize_nemo_gym_result


def test_fields_of_a_result_become_tensors_in_place():
    log = [
        {"role": "user", "token_ids": [1, 2]},
        {"role": "assistant", "token_ids": [3], "generation_logprobs": [-1]},
    ]
    tensorize_nemo_gym_result({"message_log": log, "input_message_log": log[:1]})
    assert [message["token_ids"].tolist() for message in log] == [[1, 2], [3]]
    assert {message["token_ids"].dtype for message in log} == {torch.int64}
    assert log[1]["generation_logprobs"].dtype == torch.float32
    assert "generation_logprobs" not in log[0]
    assert log[0]["role"] == "user"


def test_a_tensor_stays_itself_and_an_empty_list_keeps_its_type():
    given = torch.tensor([1, 2], dtype=torch.int32)
    log = [
        {"token_ids": given},
        {"token_ids": []},
        {"generation_logprobs": []},
        {"token_ids": None},
    ]
    tensorize_by_key(log, "token_ids")
    tensorize_by_key(log, "generation_logprobs")
    assert log[0]["token_ids"] is given
    assert (log[1]["token_ids"].dtype, len(log[1]["token_ids"])) == (torch.int64, 0)
    assert log[2]["generation_logprobs"].dtype == torch.float32
    assert log[3]["token_ids"] is None


def test_another_field_keeps_its_fractions():
    log = [{"advantages": [0.5, -0.5]}]
    tensorize_by_key(log, "advantages")
    assert log[0]["advantages"].tolist() == [0.5, -0.5]


@pytest.mark.parametrize("value", [["a"], "ab", [[1], [1, 2]], [None], [True]])
def test_what_is_no_list_of_numbers_is_refused_with_its_message(value):
    with pytest.raises(TypeError, match="message 1: token_ids is no list of numbers"):
        tensorize_by_key([{"token_ids": [1]}, {"token_ids": value}], "token_ids")


def test_a_result_without_logs_is_left_alone():
    result = {"reward": 1.0, "message_log": None}
    tensorize_nemo_gym_result(result)
    assert result == {"reward": 1.0, "message_log": None}
