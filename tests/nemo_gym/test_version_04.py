"""NeMo Gym 0.4, whose servers all import Ray and would all start it: run with Ray left alone."""

import anyio
import psutil
import pytest

import gymrl
from gymrl.errors import ConfigError
from gymrl.testing.model_server import ScriptedModelServer

pytestmark = [pytest.mark.nemo_gym, pytest.mark.timeout(240)]

RAYS_PROCESSES = ("raylet", "gcs_server", "ray::", "dashboard", "log_monitor", "runtime_env")


@pytest.fixture
def old_gym(root, request):
    python = request.config.rootpath / ".venv-nemo-gym-04" / "bin" / "python"
    return {"roots": [root], "gym_python": str(python)}


def policy(base_url, **further):
    return {"policy_base_url": base_url, "policy_model_name": "policy"} | further


async def test_servers_of_the_old_version_reward_a_task_and_no_ray_is_started(old_gym, forecaster):
    planned = await anyio.to_thread.run_sync(lambda: gymrl.plan_benchmark("weather", **old_gym))
    assert planned.plan.gym.version == "0.4.0"
    # A browser of other tests, say, whose own processes come and go.
    before = psutil.Process().children()
    async with ScriptedModelServer(forecaster) as model:
        served = gymrl.serve_benchmark("weather", overrides=policy(model.base_url), **old_gym)
        async with served as registry_server:
            runner = gymrl.TaskRunner(planned.rows, registry_server)
            result = await runner.run_task("w0", num_repeats=2)
            assert result.rewards == [1.0, 1.0]
            begun = [p for p in psutil.Process().children() if p not in before]
            family = [*begun, *(p for one in begun for p in one.children(recursive=True))]
            commands = [" ".join(process.cmdline()) for process in family]
            servers = [p for p in family if p.cmdline()[:1] == [old_gym["gym_python"]]]
            assert len(servers) == 2
            # Imported, which this version can't do without, and never started.
            assert all(any("/ray/" in m.path for m in p.memory_maps()) for p in servers)
            assert not [c for c in commands if any(name in c for name in RAYS_PROCESSES)]
            assert not [p for p in servers if p.children()]
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def test_a_server_of_the_old_version_that_uses_ray_is_refused_by_name(old_gym, forecaster):
    code_gen = ["resources_servers/code_gen/configs/code_gen.yaml"]
    async with ScriptedModelServer(forecaster) as model:
        overrides = policy(model.base_url, config_paths=code_gen)
        served = gymrl.serve_benchmark("weather", overrides=overrides, **old_gym)
        with pytest.raises(ConfigError, match=r"gymrl starts no Ray.*code_gen.*uses Ray"):
            async with served:
                pass
