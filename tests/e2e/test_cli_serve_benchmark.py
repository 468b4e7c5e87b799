"""``gymrl serve --benchmark``: servers until Ctrl-C, found through the registry that is printed."""

import os
import re
import signal
import subprocess
import sys

import anyio
import anyio.to_thread
import psutil
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

import gymrl
from gymrl.testing.model_server import ModelCall, ScriptedModelServer

# Interpreters start; a busy machine gets time for that.
pytestmark = pytest.mark.timeout(240)


async def test_a_benchmark_is_served_until_it_is_interrupted():
    environment = {**os.environ, "THE_KEY": "secret"}
    async with ScriptedModelServer([ModelCall(text="7")]) as model:
        command = [sys.executable, "-m", "gymrl", "serve", "--benchmark", "tool_arithmetic"]
        command += ["--base-url", model.base_url, "--api-key-env", "THE_KEY"]
        command += ["--param", "num_tasks=2"]
        async with await anyio.open_process(
            command, stderr=subprocess.DEVNULL, env=environment
        ) as process:
            output = BufferedByteReceiveStream(process.stdout)
            line = (await output.receive_until(b"\n", 1000)).decode()
            served = re.fullmatch(
                r"serving tool_arithmetic; its registry is at http://127\.0\.0\.1:(\d+); .*", line
            )
            registry_server = gymrl.BaseServerConfig("127.0.0.1", int(served.group(1)))
            planned = gymrl.plan_benchmark("tool_arithmetic", overrides={"num_tasks": 2})
            runner = gymrl.TaskRunner(planned.rows, registry_server)
            await runner.health_check()
            result = await runner.run_task(planned.task_ids()[0])
            assert result.rewards == [0.0]
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
    _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(family, timeout=60))
    assert alive == []
