import anyio
import anyio.lowlevel
import pytest

from gymrl.config import SamplingParams
from gymrl.errors import ConfigError, GenerationError, WeightUpdateError
from gymrl.generation.base import Generator
from gymrl.generation.deferred import DeferredGenerator, LoadFailedError, NotReadyError
from gymrl.generation.weights import DirectoryWeights
from gymrl.testing import ScriptedGenerator

SAMPLING = SamplingParams(max_tokens=5)


class Gate:
    """Loads a scripted generator once it is opened."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.opened = anyio.Event()
        self.generator = ScriptedGenerator([[1, 2]], max_model_len=99)
        self._failure = failure

    async def load(self):
        await self.opened.wait()
        if self._failure is not None:
            raise self._failure
        return self.generator


def deferred(gate: Gate) -> DeferredGenerator:
    return DeferredGenerator(gate.load, max_model_len=50, end_ids=(2,))


async def test_calls_are_refused_until_the_model_is_there_and_then_served():
    gate = Gate()
    generator = deferred(gate)
    assert isinstance(generator, Generator)
    assert (generator.is_running, generator.is_ready, generator.max_model_len) == (True, False, 50)
    with pytest.raises(NotReadyError, match="still being loaded"):
        await generator.generate([1], SAMPLING)
    with pytest.raises(WeightUpdateError, match="still being loaded"):
        await generator.update_weights(DirectoryWeights(path="x"), "1")

    gate.opened.set()
    await generator.wait_ready()
    assert (generator.is_ready, generator.max_model_len) == (True, 99)
    assert (await generator.generate([1], SAMPLING)).token_ids == [1, 2]
    await generator.close()
    assert not generator.is_running
    with pytest.raises(GenerationError, match="closed"):
        await generator.generate([1], SAMPLING)
    with pytest.raises(GenerationError, match="closed"):
        await gate.generator.generate([1], SAMPLING)


async def test_a_model_that_cannot_be_loaded_fails_whoever_asks():
    gate = Gate(ConfigError("model='x': there is no such directory", setting="model"))
    generator = deferred(gate)
    gate.opened.set()
    with pytest.raises(ConfigError, match="no such directory"):
        await generator.wait_ready()
    # Not as the caller's mistake, which a configuration's error would be to the server.
    with pytest.raises(LoadFailedError, match="could not be loaded: model='x': there is no such"):
        await generator.generate([1], SAMPLING)
    with pytest.raises(LoadFailedError):
        await generator.generate([1], SAMPLING)
    assert "no such directory" in generator.fault
    assert not generator.is_running
    assert not generator.is_ready
    await generator.close()


async def test_closing_while_the_model_loads_waits_for_it_and_closes_it():
    gate = Gate()
    generator = deferred(gate)

    async with anyio.create_task_group() as group:
        group.start_soon(generator.close)
        await anyio.lowlevel.checkpoint()
        gate.opened.set()
    with pytest.raises(GenerationError, match="closed"):
        await gate.generator.generate([1], SAMPLING)
