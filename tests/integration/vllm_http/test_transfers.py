"""Weights that a trainer sends to servers by URL: who takes part, and what is left when one fails."""

from collections.abc import AsyncIterator

import anyio
import numpy as np
import pytest
import pytest_asyncio
import safetensors.numpy
import torch

from gymrl.config import SamplingParams
from gymrl.errors import WeightsLostError, WeightUpdateError
from gymrl.generation.weight_transfer import weight_sender
from gymrl.generation.weights import DirectoryWeights
from tests.integration.vllm.engines import until
from tests.integration.vllm_http.fake_transfers import UpdatableVllm, sent

TRANSFER = [
    *("start_weight_update", "update_weights", "finish_weight_update"),
    "gymrl_forget_cache",
]


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[list[UpdatableVllm]]:
    fakes = [UpdatableVllm(), UpdatableVllm()]
    for fake in fakes:
        await fake.start()
    yield fakes
    for fake in fakes:
        await fake.close()


@pytest_asyncio.fixture
async def generator(servers, connect):
    return await connect(*(fake.url for fake in servers), update_servers=True)


def checkpoint(path) -> DirectoryWeights:
    """Its last name is the word that servers have for it."""
    path.mkdir()
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, path / "model.safetensors")
    return DirectoryWeights(path=str(path))


async def refused(generator, weights, match: str) -> WeightUpdateError:
    with pytest.raises(WeightUpdateError, match=match) as caught:
        await generator.update_weights(weights, "no")
    return caught.value


def state(servers: list[UpdatableVllm]) -> list[tuple[str, str, bool]]:
    return [(fake.weights, fake.version, fake.is_paused) for fake in servers]


async def lose(generator, fake: UpdatableVllm) -> None:
    """A server is killed, and a call finds out."""
    await fake.stop()
    for _ in range(2):
        await generator.generate([1, 80, 81, 2], SamplingParams(max_tokens=4))
    assert list(generator.out) == [fake.url]


async def start_again(fake: UpdatableVllm) -> None:
    fake.forget_all()
    await fake.start()


async def test_every_server_meets_a_trainer_once_and_takes_what_it_sends(servers, generator):
    assert await generator.weight_takers() == [fake.url for fake in servers]
    await generator.update_weights(sent("second"), "1")
    await generator.update_weights(sent("third"), "2")
    assert state(servers) == [("third", "2", False)] * 2
    for place, fake in enumerate(servers):
        assert fake.met == [{"port": 1, "world_size": 3, "first_rank": 1 + place}]
        assert fake.orders == [
            *("pause", "gymrl_abandon_transfer", "init_weight_transfer_engine"),
            *(*TRANSFER, "resume"),
            *("pause", *TRANSFER, "resume"),
        ]
    await generator.update_weights(sent("fourth", port=2), "3")
    assert [fake.met[1]["port"] for fake in servers] == [2, 2]
    assert generator.weight_version == "3"


@pytest.mark.parametrize(
    ("order", "takes_back"),
    [
        ("init_weight_transfer_engine", []),
        ("update_weights", ["gymrl_abandon_transfer"]),
    ],
)
async def test_a_server_that_fails_before_it_has_everything_leaves_its_weights_as_they_were(
    servers, connect, order, takes_back
):
    generator = await connect(servers[1].url, update_servers=True)
    await generator.update_weights(sent("good", 1), "1")
    servers[1].orders.clear()
    servers[1].faults[order] = "the trainer is gone"
    error = await refused(generator, sent("bad", 1, port=2), "the trainer is gone")
    assert (error.serving, error.num_engines) == ("1", None)
    assert state(servers[1:]) == [("good", "1", False)]
    assert servers[1].orders[-len(takes_back) - 1 :] == [*takes_back, "resume"]

    servers[1].faults.clear()
    await generator.update_weights(sent("bad", 1, port=2), "2")
    assert [info["port"] for info in servers[1].met[-1:]] == [2]
    assert state(servers[1:]) == [("bad", "2", False)]


async def test_where_one_server_fails_the_others_load_what_they_had(servers, generator, tmp_path):
    await generator.update_weights(checkpoint(tmp_path / "good"), "1")
    servers[1].faults["update_weights"] = "the trainer is gone"
    error = await refused(generator, sent("bad"), rf"{servers[1].url}.*'1' goes on serving")
    assert error.serving == "1"
    assert state(servers) == [("good", "1", False)] * 2
    assert "gymrl_load_weights" not in servers[1].orders[-2:]
    assert generator.out == {}


async def test_weights_of_a_trainer_that_are_lost_on_one_server_serve_on_the_others(
    servers, generator
):
    await generator.update_weights(sent("good"), "1")
    servers[1].faults["update_weights"] = "the trainer is gone"
    error = await refused(generator, sent("bad"), "nor go back.*they came from a trainer")
    assert error.serving == "1"
    assert list(generator.out) == [servers[0].url]
    assert state(servers) == [("bad", "1", True), ("good", "1", False)]

    servers[1].faults.clear()
    await generator.update_weights(sent("better", port=2), "2")
    assert state(servers) == [("better", "2", False)] * 2
    assert generator.out == {}


async def test_a_server_that_is_started_again_stays_out_until_a_trainer_sends_to_it_too(
    servers, generator
):
    await generator.update_weights(sent("good"), "1")
    await lose(generator, servers[0])
    assert await generator.weight_takers() == [servers[1].url]
    error = await refused(generator, sent("none"), "num_engines=1; .* can't be reached")
    assert (error.serving, error.num_engines) == ("1", 1)

    await until(lambda: "can't be reached" in generator.out[servers[0].url])
    await start_again(servers[0])
    await until(lambda: "they came from a trainer" in generator.out[servers[0].url])
    assert await generator.weight_takers() == [fake.url for fake in servers]
    assert state(servers) == [("first", "default", False), ("good", "1", False)]

    error = await refused(
        generator, sent("none"), f"{servers[0].url} did not meet .* another sender"
    )
    assert error.num_engines == 2
    await generator.update_weights(sent("one", 1, port=2), "2")
    assert list(generator.out) == [servers[0].url]
    assert state(servers) == [("first", "default", False), ("one", "2", False)]

    error = await refused(generator, sent("none", 3), f"{servers[0].url} can come back.*engines=2")
    assert error.num_engines == 2
    await generator.update_weights(sent("both", port=3), "3")
    assert state(servers) == [("both", "3", False)] * 2
    assert generator.out == {}


async def test_a_directory_brings_back_a_server_that_had_weights_of_a_trainer(
    servers, generator, tmp_path
):
    await generator.update_weights(sent("sent"), "1")
    await lose(generator, servers[0])
    await start_again(servers[0])
    await generator.update_weights(checkpoint(tmp_path / "saved"), "2")
    await until(lambda: not generator.out)
    assert state(servers) == [("saved", "2", False)] * 2


async def test_a_server_that_dies_in_the_middle_leaves_the_others_at_what_they_had(
    servers, generator
):
    await generator.update_weights(sent("good"), "1")
    servers[0].hangs.add("update_weights")
    servers[1].faults["update_weights"] = "connection closed by peer"
    async with anyio.create_task_group() as group:
        group.start_soon(refused, generator, sent("bad"), f"{servers[0].url}.*closed by peer")
        await until(lambda: servers[0].orders[-1] == "update_weights")
        await servers[0].stop()
    assert state(servers[1:]) == [("good", "1", False)]
    assert list(generator.out) == [servers[0].url]
    await until(lambda: "can't be reached" in generator.out[servers[0].url])

    servers[1].faults.clear()
    await generator.update_weights(sent("better", 1, port=2), "2")
    assert state(servers[1:]) == [("better", "2", False)]


@pytest.mark.parametrize("order", ["init_weight_transfer_engine", "update_weights"])
async def test_a_server_that_hears_nothing_from_the_trainer_is_left_out_at_the_deadline(
    servers, connect, order
):
    urls = [fake.url for fake in servers]
    generator = await connect(*urls, update_servers=True, update_timeout_s=2)
    servers[0].hangs.add(order)
    await generator.update_weights(sent("second"), "1")
    assert state(servers[1:]) == [("second", "1", False)]
    assert list(generator.out) == urls[:1]


async def test_where_no_server_is_left_nothing_serves_until_a_trainer_sends_again(
    servers, generator
):
    await generator.update_weights(sent("good"), "1")
    for fake in servers:
        fake.faults["finish_weight_update"] = "out of memory"
    error = await refused(generator, sent("bad"), "no vLLM server is left.*nothing serves")
    assert error.serving is None
    assert not generator.is_running
    assert all(fake.is_paused for fake in servers)
    assert (await refused(generator, sent("bad", 3), "num_engines=2")).serving is None

    for fake in servers:
        fake.faults.clear()
    await generator.update_weights(sent("better", port=2), "2")
    assert state(servers) == [("better", "2", False)] * 2
    assert generator.is_running


async def test_a_server_that_can_not_take_a_transfer_is_named_before_any_is_paused(
    servers, generator
):
    async def why(match: str) -> None:
        await refused(generator, sent("second"), match)
        assert [fake.orders for fake in servers] == [[], []]
        assert generator.out == {}

    servers[1].backend = "nccl"
    await why(rf"{servers[1].url}: its weight transfer is nccl; start it with .*gymrl_gloo")
    servers[1].backend = None
    await why("its weight transfer is off")
    servers[1].has_extension = False
    await why("start it with --worker-extension-cls gymrl.generation.vllm_worker")
    servers[1].backend, servers[1].has_extension, servers[1].num_workers = "gymrl_gloo", True, 2
    await why(r"made for 2 workers in 2 engines, and these have \[1, 2\]")


async def test_a_server_that_was_left_in_the_middle_of_an_update_goes_back_to_its_start(
    servers, connect
):
    """The generator that paused it died: a new one must neither hang on it nor trust its weights."""
    servers[0].is_paused, servers[0].weights, servers[0].version = True, "mixed", "7"
    generator = await connect(*(fake.url for fake in servers), update_servers=True)
    assert state(servers) == [("tiny", "default", False), ("first", "default", False)]
    assert servers[0].orders == [
        *("pause", "gymrl_load_weights", "update_weight_version", "resume")
    ]

    for fake in servers:
        fake.leave_open()
    await generator.update_weights(sent("second"), "8")
    assert state(servers) == [("second", "8", False)] * 2


async def test_a_generator_stands_in_for_one_that_died_where_servers_have_its_weights(
    servers, generator, connect
):
    await generator.update_weights(sent("second"), "7")
    await generator.close()
    urls = [fake.url for fake in servers]
    successor = await connect(*urls, update_servers=True)
    await successor.adopt_weights("7")
    assert (successor.weight_version, successor.out) == ("7", {})

    servers[1].forget_all()
    partly = await connect(*urls, update_servers=True)
    await partly.adopt_weights("7")
    assert list(partly.out) == urls[1:]
    assert partly.weight_version == "7"

    with pytest.raises(WeightsLostError, match="it has the weights '7', not '8'"):
        await (await connect(*urls, update_servers=True)).adopt_weights("8")
    assert state(servers) == [("second", "7", False), ("first", "default", False)]


async def test_cancelling_a_transfer_that_waits_for_calls_leaves_the_old_weights(
    servers, generator
):
    servers[0].hangs.add("pause")
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: generator.update_weights(sent("second"), "1", pause="wait"))
        await until(lambda: [fake.orders for fake in servers] == [["pause"]] * 2)
        group.cancel_scope.cancel()
    assert state(servers) == [("first", "default", False)] * 2
    assert [fake.orders for fake in servers] == [["pause", "resume"]] * 2


def test_two_senders_at_one_address_are_told_apart():
    first = weight_sender("gloo")
    weights = first.weights({"a": torch.zeros(2)})
    first.close()
    second = weight_sender("gloo", port=weights.init_info["port"])
    again = second.weights({"a": torch.zeros(2)})
    assert again.init_info == weights.init_info
    assert again.meeting != weights.meeting
    assert again.for_engine(0, 1).meeting == second.weights({}).for_engine(0, 1).meeting
