"""Settings that can't work are refused; a place in the data is one number."""

import contextlib

import pytest
import torch

from gymrl.actors.failures import describe
from gymrl.config import GenerationConfig, GymConfig, RolloutConfig, VllmConfig
from gymrl.errors import ConfigError, RankFailedError, RowValueError, WeightUpdateError
from gymrl.torchrun import PerNode, RowCursor, TorchrunConfig, rollouts
from gymrl.torchrun.config import transfer_arguments
from gymrl.torchrun.handover import Transfers
from gymrl.torchrun.line import Cause
from gymrl.torchrun.site import Site
from gymrl.torchrun.weights import whole_parameters
from gymrl.torchrun.world import LoneWorld, is_echo

ROLLOUT = RolloutConfig(generation=GenerationConfig(model="m"), gym=GymConfig())


def test_workers_are_counted_a_node_not_in_the_engine():
    many = RolloutConfig(generation=GenerationConfig(model="m"), gym=GymConfig(), num_workers=2)
    with pytest.raises(ConfigError, match=r"per_node\.gym_workers"):
        TorchrunConfig(rollout=many)


def test_gym_workers_share_generators_out_evenly():
    with pytest.raises(ConfigError, match="multiple of"):
        PerNode(generators=2, gym_workers=3)


def test_one_process_has_one_worker():
    debugging = RolloutConfig(
        generation=GenerationConfig(model="m"), gym=GymConfig(), in_process=True
    )
    with pytest.raises(ConfigError, match="in_process"):
        TorchrunConfig(rollout=debugging, per_node=PerNode(gym_workers=2))


def test_a_deadline_of_zero_is_refused():
    with pytest.raises(ConfigError, match="heartbeat_timeout_s"):
        TorchrunConfig(rollout=ROLLOUT, heartbeat_timeout_s=0)


VLLM = GenerationConfig(model="m", backend="vllm")


@pytest.mark.parametrize(
    "generation",
    [
        GenerationConfig(model="m"),
        GenerationConfig(
            model="m", backend="vllm", vllm=VllmConfig(base_urls=("http://127.0.0.1:1",))
        ),
    ],
)
def test_only_engines_of_the_job_take_weights_by_transfer(generation):
    job = RolloutConfig(generation=generation, gym=GymConfig())
    with pytest.raises(ConfigError, match="only vLLM engines that the job starts"):
        TorchrunConfig(rollout=job, weight_transfer="gloo")


@pytest.mark.parametrize("given", [{"backend": "nccl"}, '{"backend": "gymrl_gloo"}'])
def test_an_engine_that_is_told_of_another_transfer_is_refused(given):
    vllm = VllmConfig(engine_args={"weight_transfer_config": given})
    generation = GenerationConfig(model="m", backend="vllm", vllm=vllm)
    with pytest.raises(ConfigError, match="contradicts weight_transfer='gloo'"):
        TorchrunConfig(
            rollout=RolloutConfig(generation=generation, gym=GymConfig()), weight_transfer="gloo"
        )


def test_engines_are_started_for_the_transfer_and_keep_their_other_arguments():
    given = {"seed": 3, "weight_transfer_config": {"target": "policy"}}
    assert transfer_arguments("ipc", given) == {
        "seed": 3,
        "weight_transfer_config": {"target": "policy", "backend": "gymrl_ipc"},
    }
    assert given["weight_transfer_config"] == {"target": "policy"}


@pytest.mark.parametrize("transfer", ["nccl", "ipc"])
def test_a_transfer_between_gpus_is_refused_where_there_is_none(transfer):
    job = TorchrunConfig(
        rollout=RolloutConfig(generation=VLLM, gym=GymConfig()), weight_transfer=transfer
    )
    if torch.cuda.is_available():
        refusal = contextlib.nullcontext()
    else:
        refusal = pytest.raises(ConfigError, match="torch sees none on rank 0; use gloo")
    with refusal:
        Transfers(job, LoneWorld(), Site(job, LoneWorld(), {}))


def test_a_refusal_by_an_engine_is_not_taken_for_the_end_of_a_peer():
    refused = WeightUpdateError("weights '1' from a transfer by gymrl_gloo were not taken")
    torn = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed"
    )
    assert (is_echo(refused), is_echo(torn)) == (False, True)


def test_nothing_works_outside_the_block():
    outside = rollouts(ROLLOUT)
    with pytest.raises(RuntimeError, match="inside `with`"):
        outside.collect([])
    with pytest.raises(RuntimeError, match="pass rows="):
        outside.take(1)


def test_a_pass_gives_each_row_once_in_an_order_of_its_own():
    rows = [{"n": n} for n in range(10)]
    cursor = RowCursor(rows, seed=3)
    first, second = cursor.take(10), cursor.take(10)
    assert sorted(row["n"] for row in first) == list(range(10))
    assert sorted(row["n"] for row in second) == list(range(10))
    assert first != second


def test_a_place_is_one_number():
    rows = [{"n": n} for n in range(7)]
    cursor = RowCursor(rows, seed=1)
    cursor.take(11)
    again = RowCursor(rows, seed=1)
    again.position = 11
    assert again.take(9) == cursor.take(9)


def test_rows_can_stay_in_their_order():
    rows = [{"n": n} for n in range(3)]
    assert [row["n"] for row in RowCursor(rows, shuffle=False).take(5)] == [0, 1, 2, 0, 1]


def test_no_rows_are_refused():
    with pytest.raises(RowValueError, match="no rows"):
        RowCursor([])


def test_state_of_closed_rollouts_goes_back_in():
    rows = [{"n": n} for n in range(5)]
    state = {"calls": 4, "version": 3, "position": 2, "pending": [0, 1]}
    fresh = rollouts(ROLLOUT, rows=rows)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state


def test_other_ranks_learn_the_first_error_with_its_type():
    error = Cause(3, "host b, process 7", describe(ConfigError("port=0: no"))).as_error()
    assert isinstance(error, RankFailedError)
    assert error.rank == 3
    assert "rank 3 (host b, process 7) failed: ConfigError: port=0: no" in str(error)
    assert isinstance(error.__cause__, ConfigError)


def test_kept_parameters_do_not_change_with_the_model():
    model = torch.nn.Linear(2, 2)
    kept = whole_parameters(model, keep=True)
    before = kept["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(kept["weight"], before)


def test_a_rank_that_only_takes_part_keeps_nothing():
    assert whole_parameters(torch.nn.Linear(2, 2), keep=False) == {}


def test_names_are_those_of_the_model_that_was_compiled():
    model = torch.nn.Sequential()
    model._orig_mod = torch.nn.Linear(2, 2)
    assert set(whole_parameters(model, keep=True)) == {"weight", "bias"}
