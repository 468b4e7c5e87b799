"""Downloads of images over loopback HTTP: what is followed, what is refused, what is tried again."""

from __future__ import annotations

import io
from contextlib import asynccontextmanager

import anyio
import pytest
from aiohttp import web
from PIL import Image

from gymrl.config import MediaConfig
from gymrl.errors import MediaError, MediaFetchError
from gymrl.gym.listener import Listener, PortRange
from gymrl.media import load_image

FILE = io.BytesIO()
Image.new("RGB", (3, 2), (255, 0, 0)).save(FILE, "PNG")
RED = FILE.getvalue()


class ImageHost:
    """Serves images, and what hosts do instead."""

    def __init__(self) -> None:
        self.url = ""
        self.paths: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        kind = request.match_info["kind"]
        if kind.isdigit():
            return web.Response(status=int(kind), headers={"Location": request.query.get("to", "")})
        if kind == "slow":
            await anyio.sleep(30)
        if kind == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"\0" * 65536)
        if kind == "claims":
            return web.Response(body=b"\0" * 3000)
        if kind == "packed":
            return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})
        if kind == "loop":
            raise web.HTTPFound("/loop")
        return web.Response(body=RED, content_type="text/plain")


@asynccontextmanager
async def image_host():
    host = ImageHost()
    app = web.Application()
    app.router.add_get("/{kind}", host.answer)
    listener = Listener(app, PortRange())
    await listener.start()
    host.url = listener.url
    try:
        yield host
    finally:
        await listener.stop()


def config(**changes) -> MediaConfig:
    settings = {
        "schemes": ("http",),
        "allowed_hosts": ("127.0.0.1", "localhost"),
        "private_hosts": ("127.0.0.1",),
        **changes,
    }
    return MediaConfig(**settings)


async def test_an_image_is_fetched_from_a_named_host_whatever_it_calls_it():
    async with image_host() as host:
        image = await load_image(f"{host.url}/red.png", config())
        assert (image.data, image.media_type) == (RED, "image/png")
        moved = await load_image(f"{host.url}/302?to=/red.png", config())
        assert moved.digest == image.digest
    assert host.paths == ["/red.png", "/302", "/red.png"]


async def test_nothing_is_asked_of_a_host_that_is_not_named():
    async with image_host() as host:
        for changes in (
            {"allowed_hosts": ("cats.org",), "private_hosts": ()},
            {"private_hosts": ()},
        ):
            with pytest.raises(MediaError):
                await load_image(f"{host.url}/red.png", config(**changes))
    assert host.paths == []


async def test_a_redirect_does_not_lead_to_a_private_address_another_host_or_a_file():
    """A host that is allowed must not send a download where the row could not go itself."""
    async with image_host() as host:
        port = host.url.rpartition(":")[2]
        for to, said in {
            f"http://localhost:{port}/red.png": "not public",
            f"http://127.0.0.2:{port}/red.png": "not in media.allowed_hosts",
            "file:///etc/passwd": "not in media.schemes",
            "https://127.0.0.1/red.png": "not in media.schemes",
            f"http://me:pw@127.0.0.1:{port}/red.png": "user name",
            "http://[::1": "not a URL",
        }.items():
            with pytest.raises(MediaError, match=said):
                await load_image(f"{host.url}/307?to={to}", config())
        assert set(host.paths) == {"/307"}
        with pytest.raises(MediaError, match="max_redirects=3"):
            await load_image(f"{host.url}/loop", config())


async def test_an_address_in_another_spelling_is_checked_like_any_other():
    """A resolver reads 127.1 and 2130706433 as the loopback address, and some clients ask it to."""
    async with image_host() as host:
        port = host.url.rpartition(":")[2]
        for name in ("127.1", "2130706433", "0x7f.1", "127.0.0.01", "0", "::ffff:7f00:1"):
            shown = f"[{name}]" if ":" in name else name
            with pytest.raises(MediaError):
                await load_image(
                    f"http://{shown}:{port}/red.png",
                    config(allowed_hosts=(name,), private_hosts=()),
                )
        assert host.paths == []


async def test_a_host_that_refuses_is_the_rows_fault_and_one_that_is_unwell_is_not():
    async with image_host() as host:
        for status in (404, 403, 410):
            with pytest.raises(MediaError, match=f"HTTP {status}"):
                await load_image(f"{host.url}/{status}", config())
        for status in (500, 503, 429, 408):
            with pytest.raises(MediaFetchError, match=f"HTTP {status}") as caught:
                await load_image(f"{host.url}/{status}", config())
            assert (caught.value.kind, caught.value.status) == ("infra", status)
        with pytest.raises(MediaFetchError, match=r"fetch_timeout_s=0\.2"):
            await load_image(f"{host.url}/slow", config(fetch_timeout_s=0.2))
    with pytest.raises(MediaFetchError, match="Cannot connect"):
        await load_image(f"{host.url}/red.png", config())


async def test_a_download_is_bounded_whatever_its_host_says():
    async with image_host() as host:
        for kind in ("endless", "claims"):
            with pytest.raises(MediaError, match="max_image_bytes=2000"):
                await load_image(f"{host.url}/{kind}", config(max_image_bytes=2000))
        with pytest.raises(MediaError, match="compressed"):
            await load_image(f"{host.url}/packed", config())
