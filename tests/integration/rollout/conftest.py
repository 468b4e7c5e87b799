import contextlib

import pytest

from gymrl.config import GymConfig, RolloutConfig
from gymrl.rollout.engine import RolloutEngine
from gymrl.rollout.fleet import Fleet
from tests.integration.rollout.workers import FakeGeneration, FakeWorker


@pytest.fixture
def log(tmp_path):
    """A file where the workers note what happens to them."""
    path = tmp_path / "events.log"
    path.touch()
    return path


@pytest.fixture
def make_engine(log):
    """An engine over fake workers; `options` go to the workers, the rest to the configuration."""

    def make(options=None, *, observer=None, scoring=None, accept=None, policy=None, **settings):
        agent = {"responses_api_agents": {"fake": {"log": str(log), **(options or {})}}}
        gym = GymConfig(
            servers={"math": agent, "code": agent},
            base_urls=() if "generation" in settings else ("http://127.0.0.1:2/v1",),
        )
        settings.setdefault("max_data_attempts", 1)
        settings.setdefault("retry_delay_s", 0.05)
        config = RolloutConfig(gym=gym, **settings)
        fleet = Fleet(config, gym=FakeWorker, generation=FakeGeneration, policy=policy)
        return RolloutEngine(config, observer=observer, scoring=scoring, accept=accept, fleet=fleet)

    return make


@pytest.fixture
async def engine(make_engine):
    """An open engine with two workers. Fixtures enter and leave it in different tasks."""
    async with contextlib.AsyncExitStack() as stack:
        yield await stack.enter_async_context(make_engine(num_workers=2))


@pytest.fixture
def row():
    """A dataset row whose worker does what the keywords say."""

    def make(route="math", **fake):
        return {
            "responses_create_params": {"input": "2+2?"},
            "agent_ref": {"name": route},
            "fake": fake,
        }

    return make
