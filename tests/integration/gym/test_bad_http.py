"""What comes back is no HTTP, or not what was asked for."""

import contextlib
import gzip

import anyio
import pytest
from anyio.abc import SocketAttribute

from gymrl.errors import GymRequestError, GymTransportError
from gymrl.gym.client import HttpPool, failure_kind_of
from gymrl.gym.health import check_alive


@contextlib.asynccontextmanager
async def server_that_says(answer):
    async def serve(client):
        async with client:
            asked = await client.receive()
            # Else the rest of the request meets a closed socket, and the answer is lost with it.
            while asked.startswith(b"POST") and not asked.endswith(b"{}"):
                asked += await client.receive()
            with contextlib.suppress(anyio.BrokenResourceError):
                await client.send(answer)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    host, port = listener.extra(SocketAttribute.local_address)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://{host}:{port}/run"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
    ],
)
async def test_what_is_no_http_is_the_fleets_fault_and_no_status_400(answer):
    async with server_that_says(answer) as url, HttpPool() as pool:
        with pytest.raises(GymTransportError, match="what came is no HTTP answer") as caught:
            await pool.post(url, b"{}")
    assert failure_kind_of(caught.value) == "infra"
    assert caught.value.status is None


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed_and_says_where_to(status):
    answer = b"HTTP/1.1 %d Moved\r\nLocation: http://elsewhere.test/run\r\n\r\n" % status
    async with server_that_says(answer) as url, HttpPool() as pool:
        with pytest.raises(GymRequestError, match=r"elsewhere\.test/run', which is not followed"):
            await pool.post(url, b"{}")


async def test_an_answer_has_a_longest_length_also_when_it_was_compressed():
    body = gzip.compress(b" " * (8 << 20))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with server_that_says(head + body) as url:
        async with HttpPool(max_answer_bytes=1 << 20) as pool:
            with pytest.raises(GymRequestError, match="longer than 1048576 bytes") as caught:
                await pool.post(url, b"{}")
            assert failure_kind_of(caught.value) == "data"
        async with HttpPool() as pool:
            assert len((await pool.post(url, b"{}")).body) == 8 << 20


async def test_a_server_whose_front_page_leads_elsewhere_is_alive():
    async with server_that_says(b"HTTP/1.1 307 Moved\r\nLocation: /docs\r\n\r\n") as url:
        async with HttpPool() as pool:
            await check_alive(pool, {"math": url})
