"""A Gym worker of the tests: it obeys the ``fake`` field of each row instead of calling an agent."""

import json
import math
import os
import pathlib
import signal
import sys
import time
from collections.abc import AsyncIterator

import anyio
import msgspec
import numpy as np

from gymrl.actors import Actor
from gymrl.config import GenerationConfig, GymConfig
from gymrl.errors import ServerDiedError, WeightsLostError, WeightUpdateError
from gymrl.generation.weights import PauseMode, WeightSource
from gymrl.types import Failure, FailureKind, Reward, Row, RowResult, Trajectory, Turn
from tests.integration.actors.watching import until


class Endpoint(msgspec.Struct, frozen=True):
    registry_url: str
    routes: tuple[str, ...]


class GenerationEndpoint(msgspec.Struct, frozen=True):
    base_url: str
    model: str
    max_model_len: int


def options_of(config: GymConfig) -> dict:
    for server in config.servers.values():
        for implementation in server.get("responses_api_agents", {}).values():
            return implementation
    return {}


def result_of(row: Row, fake: dict, seed: int | None) -> RowResult:
    agent = fake.get("agent", f"{row.route}_agent")
    tokens = fake.get("tokens", 3)
    return RowResult(
        index=fake.get("index", row.index),
        agent=agent,
        outcome=Trajectory(
            agent=agent,
            token_ids=np.arange(2 + tokens, dtype=np.int32),
            logprobs=np.array([0, 0] + [-0.5] * tokens, dtype=np.float32),
            turns=(Turn(start=0, generation_start=2, end=2 + tokens),),
            reward=Reward(float(fake.get("reward", 1.0))),
            result=json.dumps({"seed": seed, "pid": os.getpid(), "id": row.rollout_id}).encode(),
        ),
    )


class FakeWorker(Actor):
    """Emits rows in the order of their ``delay``, each when its file ``until`` is there.

    See :func:`FakeWorker._serve` for the rest.
    """

    async def setup(self, config: GymConfig) -> None:
        self.config = config
        self.options = options_of(config)
        self.log("setup")
        if "setup_error" in self.options:
            raise RuntimeError(self.options["setup_error"])
        if "setup_sleep" in self.options:
            await anyio.sleep(self.options["setup_sleep"])

    def log(self, event: str) -> None:
        path = self.options.get("log")
        if path:
            with pathlib.Path(path).open("a") as file:
                file.write(f"{event} {os.getpid()}\n")

    async def spin_up(self, base_urls: list[str], model_name: str) -> Endpoint:
        self.log(f"spin_up {base_urls[0]} {model_name}")
        if "spin_up_sleep" in self.options:
            await anyio.sleep(self.options["spin_up_sleep"])
        return Endpoint("http://127.0.0.1:1", tuple(self.config.servers))

    async def run_rollouts(
        self, rows: list[Row], timer_prefix: str = "timing/rollout"
    ) -> AsyncIterator[RowResult]:
        self.log(f"run {len(rows)}")
        bodies = {row.index: json.loads(row.body) for row in rows}
        fakes = {index: body.get("fake") or {} for index, body in bodies.items()}
        ordered = sorted(rows, key=lambda row: fakes[row.index].get("delay", 0))
        passed = 0.0
        try:
            for place, row in enumerate(ordered):
                fake = fakes[row.index]
                await anyio.sleep(max(0.0, fake.get("delay", 0) - passed))
                passed = max(passed, fake.get("delay", 0))
                if "until" in fake:
                    await until(pathlib.Path(fake["until"]).exists, math.inf)
                if fake.get("skip"):
                    continue
                result = self._serve(row, fake, bodies[row.index])
                if place == len(ordered) - 1:
                    timings = {f"{timer_prefix}/run_rollouts": passed}
                    result = msgspec.structs.replace(result, timings=timings)
                yield result
                if fake.get("twice"):
                    yield result
        finally:
            self.log("left")

    def _serve(self, row: Row, fake: dict, body: dict) -> RowResult:
        _, _, again = row.rollout_id.partition(".")
        attempt = int(again or 0) + 1
        if attempt <= fake.get("die_times", 0):
            sys.stderr.write("the worker's last words\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt <= fake.get("block_times", 0):
            time.sleep(300)
        if "raise" in fake:
            raise KeyError(fake["raise"])
        if attempt <= fake.get("fail_times", 0):
            failure = Failure(
                kind=FailureKind(fake.get("kind", "data")),
                error=fake.get("error", "NoGenerationError"),
                message=f"attempt {attempt} gave nothing",
                traceback="Traceback of the worker",
                fields={"turn": 2},
                turn=2,
            )
            return RowResult(index=row.index, agent=row.route, outcome=failure)
        metadata = body["responses_create_params"].get("metadata") or {}
        seed = json.loads(metadata.get("extra_body", "{}")).get("seed")
        return result_of(row, fake, seed)

    async def health_check(self) -> None:
        if self.options.get("sick"):
            raise ServerDiedError("math is gone", instance="math", exit_code=3)

    async def close(self) -> None:
        self.log("close")


class FakeGeneration(Actor):
    async def setup(self, config: GenerationConfig) -> None:
        self.config = config
        if config.model == "broken":
            raise RuntimeError("no weights")

    async def start(self) -> GenerationEndpoint:
        return GenerationEndpoint("http://127.0.0.1:2/v1", self.config.served_model_name, 64)

    async def health_check(self) -> None:
        pass


class PortedGeneration(FakeGeneration):
    """Says in the model's name which port it was to take, and which weights it started with."""

    version = "0"

    async def start(self) -> GenerationEndpoint:
        asked = self.config.port
        model = f"port {asked}, weights {self.version}"
        return GenerationEndpoint(f"http://127.0.0.1:{asked or 4321}/v1", model, 64)

    async def update_weights(
        self, source: WeightSource, version: str, pause: PauseMode = "keep"
    ) -> None:
        if version == "bad":
            raise WeightUpdateError("not these", version=version, serving=self.version)
        if version == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        self.version = version

    async def adopt_weights(self, version: str) -> None:
        if version == "in the engine alone":
            raise WeightsLostError("they died with it", version=version)
        self.version = f"{version} of before"

    async def weight_version(self) -> str:
        return self.version

    async def weight_takers(self) -> list[str]:
        return ["http://one:8000", "http://two:8000"]
