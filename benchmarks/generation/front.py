"""What one request costs in the server, less what any server pays.

That is an HTTP server that answers with the same bytes, and writing and tokenising the prompt.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from aiohttp import web

from benchmarks.comparison import Comparison, take_turns
from gymrl.actors import Actor, ActorHandle, spawn
from gymrl.generation.chat import ChatFormat
from gymrl.generation.policy import Policy
from gymrl.generation.server import GenerationServer
from gymrl.testing import ScriptedGenerator, build_tiny_tokenizer

TARGET_MS = 5.0


class Front(Actor):
    """The server in front of a generator that answers at once, and an echo beside it."""

    async def setup(self, num_sampled: int) -> None:
        """Prepare; every answer has `num_sampled` tokens."""
        self._num_sampled = num_sampled
        self._server: GenerationServer | None = None
        self._echo: web.AppRunner | None = None

    async def start(self, body: bytes) -> list[str]:
        """Serve; returns the address of the front and that of the echo, which answers alike."""
        chat = ChatFormat(build_tiny_tokenizer())
        sampled = (chat.encode("The answer is 42. ") * self._num_sampled)[: self._num_sampled]
        generator = ScriptedGenerator(lambda *_: _generated(sampled), max_model_len=1 << 20)
        self._server = GenerationServer(Policy(generator, chat))
        front = await self._server.start()
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{front}/responses", data=body) as answer:
                answered = await answer.read()

        async def echo(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(body=answered, content_type="application/json")

        app = web.Application()
        app.router.add_post("/v1/responses", echo)
        self._echo = web.AppRunner(app, access_log=None)
        await self._echo.setup()
        await web.TCPSite(self._echo, "127.0.0.1", 0).start()
        return [front, f"http://127.0.0.1:{self._echo.addresses[0][1]}/v1"]

    async def render(self, text: str, calls: int) -> float:
        """Seconds to write and tokenise one prompt, which any server must."""
        chat = ChatFormat(build_tiny_tokenizer())
        started = time.perf_counter()
        for _ in range(calls):
            chat.render([{"role": "user", "content": text}])
        return (time.perf_counter() - started) / calls

    async def close(self) -> None:
        """Stop both."""
        if self._server is not None:
            await self._server.close()
        if self._echo is not None:
            await self._echo.cleanup()


async def _generated(sampled: list[int]):  # noqa: ANN202 - a generated sample
    from gymrl.generation.base import Generated  # noqa: PLC0415 - in the child only

    return Generated(
        token_ids=sampled, logprobs=[-0.123456789] * len(sampled), finish_reason="stop"
    )


async def measure(calls: int, rounds: int) -> list[Comparison]:
    """Milliseconds a request, for a short prompt and for one of a few thousand tokens."""
    found = []
    for name, words, num_sampled in (("short", 8, 32), ("long", 3000, 512)):
        text = " ".join(f"word{number % 97}" for number in range(words))
        body = msgspec.json.encode({"input": text})
        async with _addresses(body, num_sampled) as (session, server, front, echo):

            async def ask(url: str, session=session, body=body) -> float:  # noqa: ANN001
                started = time.perf_counter()
                for _ in range(calls):
                    async with session.post(f"{url}/responses", data=body) as answer:
                        await answer.read()
                return (time.perf_counter() - started) / calls

            turns = await take_turns(
                lambda front=front, ask=ask: ask(front),
                {
                    "an echo of the same bytes": lambda echo=echo, ask=ask: ask(echo),
                    "tokenising the prompt": lambda server=server, text=text: server.call(
                        "render", text, calls
                    ),
                },
                rounds,
            )
        sides = {side: 1000 * s for side, s in turns.medians(own="the server").items()}
        others = sum(ms for side, ms in sides.items() if side != "the server")
        found.append(
            Comparison(
                name=f"front of a request, {name}",
                unit="ms",
                sides=sides,
                ratio="the server's less those of the others",
                value=sides["the server"] - others,
                target=TARGET_MS,
                at_least=False,
                note=f"a prompt of {words} words, {num_sampled} sampled tokens, one at a time",
            )
        )
    return found


@asynccontextmanager
async def _addresses(
    body: bytes, num_sampled: int
) -> AsyncIterator[tuple[aiohttp.ClientSession, ActorHandle, str, str]]:
    async with spawn(Front, num_sampled=num_sampled) as server:
        front, echo = await server.call("start", body)
        async with aiohttp.ClientSession() as session:
            yield session, server, front, echo
