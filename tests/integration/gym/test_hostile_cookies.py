"""Cookies that nobody gave out, in bytes that are no text."""

import anyio
import pytest

from gymrl.gym.embedded import Peers, ResourcesServer, Verdict
from gymrl.gym.listener import Listener, PortRange


class Judge(ResourcesServer):
    async def verify(self, row, reply, state):
        return Verdict(reward=1.0)


@pytest.mark.parametrize("cookie", [b"ab.\xff\xfe", b"\xff.ab", b"ab.\xc3\xa9", b".", b"=", b"ab."])
async def test_a_cookie_of_any_bytes_is_a_session_that_nobody_knows(cookie):
    listener = Listener(Judge("judge", {}, Peers()).application(), PortRange())
    await listener.start()
    try:
        port = int(listener.url.rpartition(":")[2])
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"GET /health HTTP/1.1\r\nHost: judge\r\n")
            await stream.send(b"Cookie: Judge___judge=" + cookie + b"\r\n\r\n")
            assert (await stream.receive()).startswith(b"HTTP/1.1 200")
    finally:
        await listener.stop()
