"""A server that sends more than it was asked for."""

import contextlib
import json

import anyio
from anyio.abc import SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream

from gymrl.actors import spawn
from gymrl.config import GymConfig
from gymrl.gym.listener import Listener, PortRange
from gymrl.gym.registry import RegistryServer
from gymrl.gym.service import GymService
from gymrl.testing.gym_server import gym_answer


async def answer_twice(client):
    """Each request gets its answer, and a moment later the same one again."""
    received = BufferedByteReceiveStream(client)
    async with client:
        with contextlib.suppress(anyio.IncompleteRead, anyio.BrokenResourceError):
            while True:
                head = (await received.receive_until(b"\r\n\r\n", 65536)).lower()
                length = int(head.partition(b"content-length:")[2].split()[0])
                row = json.loads(await received.receive_exactly(length))["_rowidx"]
                body = json.dumps(gym_answer([([1, 2], [row])], reward=1.0)).encode()
                answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                answer += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
                await client.send(answer)
                await anyio.sleep(0.01)
                await client.send(answer)


async def test_a_second_answer_is_not_taken_for_that_of_the_next_row(make_row):
    agent = await anyio.create_tcp_listener(local_host="127.0.0.1")
    host, port = agent.extra(SocketAttribute.local_address)
    registry = RegistryServer()
    listener = Listener(registry.application(), PortRange())
    async with agent, anyio.create_task_group() as tasks:
        tasks.start_soon(agent.serve, answer_twice)
        block = {"x": {"entrypoint": "app.py", "host": host, "port": port}}
        await listener.start()
        registry.publish(
            {"fake_agent": {"responses_api_agents": block}},
            [{"process_name": "fake_agent", "port": port}],
        )
        config = GymConfig(registry_url=listener.url, max_connections=1)
        async with spawn(GymService, in_process=True, config=config) as gym:
            await gym.call("spin_up", [], "policy")
            rows = [make_row(index) for index in range(6)]
            results = [r async for r in gym.stream("run_rollouts", rows)]
        await listener.stop()
        tasks.cancel_scope.cancel()
    sampled = {r.index: r.outcome.token_ids.tolist() for r in results}
    assert sampled == {index: [1, 2, index] for index in range(6)}
