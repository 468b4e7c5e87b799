"""vLLM's own server, several times, from one import.

    python -m tests.integration.vllm.serve MODEL

Reads lines ``start PORT [server arguments...]`` and ``kill PORT``.

Every server is forked from this process and in a session of its own, so that killing it takes its
engine along. The servers end with this process, which ends at the end of its input.
"""

import contextlib
import os
import signal
import sys

from gymrl.generation.vllm_process import children_follow, engine_environment, forked_engine
from tests.integration.vllm.engines import engine_config


def serve(model: str, port: str, arguments: list[str]) -> None:
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv = ["serve", "--model", model, "--served-model-name", "tiny"]
    sys.argv += ["--host", "127.0.0.1", "--port", port, "--dtype", "float32"]
    sys.argv += ["--max-model-len", "512", "--enforce-eager"]
    sys.argv += ["--kv-cache-memory-bytes", str(32 << 20), "--uvicorn-log-level", "warning"]
    sys.argv += ["--distributed-executor-backend", "uni"]
    sys.argv += ["--logprobs-mode", "processed_logprobs", "--enable-server-load-tracking"]
    sys.argv += arguments
    with forked_engine():
        main()


def main() -> None:
    model = sys.argv[1]
    os.environ.update(engine_environment(engine_config(model), on_cpu=True, environ=os.environ))
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.v1.engine.async_llm  # noqa: F401

    children: dict[str, int] = {}
    for line in sys.stdin:
        order, port, *arguments = line.split()
        if order == "kill":
            os.killpg(children[port], signal.SIGKILL)
            os.waitpid(children[port], 0)
            continue
        with children_follow():
            child = os.fork()
        if child == 0:
            os.setsid()
            serve(model, port, arguments)
            return
        children[port] = child
    for child in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
