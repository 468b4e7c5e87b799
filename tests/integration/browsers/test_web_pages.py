"""Web pages ask servers on this machine through the browser that shows them."""

import aiohttp
import pytest
from aiohttp import web

from gymrl.browsers import is_loopback
from gymrl.gym.listener import Listener, PortRange


@pytest.fixture
async def asked():
    """The status of a request to a server that listens on loopback, and whether it was served."""
    served = []

    async def serve(request):
        served.append(request.path)
        return web.json_response("sampled")

    app = web.Application()
    app.router.add_route("*", "/v1/{path:.*}", serve)
    listener = Listener(app, PortRange())
    await listener.start()
    async with aiohttp.ClientSession() as session:

        async def ask(method, **headers):
            served.clear()
            request = session.request(method, f"{listener.url}/v1/responses", headers=headers)
            async with request as answer:
                return answer.status, bool(served)

        yield ask
    await listener.stop()


async def test_a_page_of_another_site_has_nothing_sampled(asked):
    # What a form, or fetch() in mode no-cors, sends without asking first.
    for origin in ("https://evil.example", "http://evil.example:8000", "null", "file://"):
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        assert await asked("POST", **headers) == (403, False)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example"])
async def test_a_name_that_was_made_to_point_here_reads_nothing(asked, host):
    assert await asked("GET", Host=host) == (421, False)
    assert await asked("POST", Host=host) == (421, False)


@pytest.mark.parametrize(
    "host",
    [
        "localhost:9000",
        "127.0.0.1:9000",
        "[::1]:80",
        "10.1.2.3",
        "policy.internal",
        "box.local",
        "policy:8000",
    ],
)
async def test_programs_are_served_under_every_name_that_is_certain(asked, host):
    assert await asked("POST", Host=host) == (200, True)


async def test_a_page_of_this_machine_is_served(asked):
    assert await asked("POST", Origin="http://localhost:3000") == (200, True)


def test_what_is_this_machine_alone():
    assert all(is_loopback(host) for host in ("localhost", "a.localhost", "127.0.0.7", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "localhost.evil.example", ""))
