"""Downloads of images from named hosts, guarded against being sent elsewhere.

A row's text chooses the URL, so a download must not reach what the row could not reach itself.
The host of every hop is checked against the configuration, every address that its name resolves to
is checked, and the connection goes to the addresses that were checked: a name that resolves
differently a moment later gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

import aiohttp
import anyio
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from gymrl.errors import MediaFetchError
from gymrl.media.sources import is_listed, refused, shown, too_large

if TYPE_CHECKING:
    from gymrl.config import MediaConfig

REDIRECTS = frozenset({301, 302, 303, 307, 308})
NOT_NOW = frozenset({408, 429})
CHUNK_BYTES = 64 << 10
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out to the public (RFC 4291); `ipaddress` takes more for global."""

_SPECIAL = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("3fff::/20"))
"""Special-purpose ranges that `ipaddress` takes for global in some releases of Python."""


async def fetch(url: str, config: MediaConfig) -> bytes:
    """Download `url`, at most ``max_image_bytes`` of it, within ``fetch_timeout_s``.

    Raises:
        MediaError: A hop leads to a scheme, host or address that is not allowed, there are too
            many hops, the host refuses, or the body is too large.
        MediaFetchError: The host can't be reached, is not well, or takes too long.
    """
    try:
        with anyio.fail_after(config.fetch_timeout_s):
            async with _session(config) as session:
                return await _follow(session, url, config)
    except TimeoutError as error:
        raise _not_now(
            url, f"not there within media.fetch_timeout_s={config.fetch_timeout_s:g}"
        ) from error
    except _PrivateAddressError as error:
        raise refused(url, str(error)) from error
    except aiohttp.InvalidURL as error:
        raise refused(url, "not a URL that can be fetched") from error
    except (aiohttp.ClientError, OSError) as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, _PrivateAddressError):
                raise refused(url, str(cause)) from error
            cause = cause.__cause__ or cause.__context__
        raise _not_now(url, f"{type(error).__name__}: {error}") from error


def _session(config: MediaConfig) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=_CheckedResolver(config), use_dns_cache=False),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        headers={"Accept": "image/*", "Accept-Encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=config.fetch_timeout_s),
    )


async def _follow(session: aiohttp.ClientSession, source: str, config: MediaConfig) -> bytes:
    target = _parsed(source, source)
    for _ in range(config.max_redirects + 1):
        _check_target(target, source, config)
        async with session.get(target, allow_redirects=False) as response:
            if response.status not in REDIRECTS:
                return await _body(response, source, config)
            target = target.join(_parsed(response.headers.get("Location", ""), source))
    raise refused(source, f"more than media.max_redirects={config.max_redirects} redirects")


def _parsed(text: str, source: str) -> URL:
    """The URL as the HTTP client reads it: what is checked is what is connected to."""
    try:
        return URL(text)
    except ValueError as error:
        raise refused(source, f"not a URL: {error} (in {shown(text)!r})") from error


def _check_target(target: URL, source: str, config: MediaConfig) -> None:
    """Refuse a hop whose scheme, host or literal address is not allowed."""
    where = "" if str(target) == source else f" (redirected to {shown(str(target))!r})"
    host = (target.host or "").rstrip(".")
    if target.scheme not in config.schemes or target.scheme not in ("http", "https"):
        raise refused(source, f"{target.scheme or 'no scheme'} is not in media.schemes{where}")
    if target.user is not None or target.password is not None:
        raise refused(source, f"a URL with a user name or password is not fetched{where}")
    if not is_listed(host, config.allowed_hosts):
        raise refused(source, f"{host!r} is not in media.allowed_hosts{where}")
    try:
        check_address(host, host, config)
    except _PrivateAddressError as error:
        raise refused(source, f"{error}{where}") from error


async def _body(response: aiohttp.ClientResponse, url: str, config: MediaConfig) -> bytes:
    status = response.status
    if status >= 500 or status in NOT_NOW:
        raise _not_now(url, f"HTTP {status}", status)
    if status != 200:
        raise refused(url, f"HTTP {status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise refused(url, "it came compressed though that was not asked for")
    if (response.content_length or 0) > config.max_image_bytes:
        raise too_large(url, response.content_length or 0, config)
    data = bytearray()
    async for chunk in response.content.iter_chunked(CHUNK_BYTES):
        data += chunk
        if len(data) > config.max_image_bytes:
            raise too_large(url, len(data), config)
    return bytes(data)


def _not_now(url: str, why: str, status: int | None = None) -> MediaFetchError:
    return MediaFetchError(
        f"image {shown(url)!r}: {why}", source=shown(url), url=shown(url), status=status
    )


class _PrivateAddressError(OSError):
    """A host is at an address that is not public."""


class _CheckedResolver(AbstractResolver):
    """Resolves names, and gives out addresses only when each of them may be connected to."""

    def __init__(self, config: MediaConfig) -> None:
        self._config = config

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        results = []
        for kind, _, protocol, _, address in found:
            check_address(host, str(address[0]), self._config)
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(address[0]),
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST,
                )
            )
        return results

    async def close(self) -> None:
        """Nothing is held."""


def check_address(host: str, address: str, config: MediaConfig) -> None:
    """Refuse an address that is not public, unless its host may be at one.

    Text that is no address passes: it is a name, and is checked when it is resolved.

    Raises:
        OSError: The address is private, loopback, link-local, reserved or multicast, itself or as
            the IPv4 address inside an IPv6 one.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return
    if _is_public(ip) or is_listed(host, config.private_hosts):
        return
    raise _PrivateAddressError(
        f"{host!r} is at {address}, which is not public; list the host in media.private_hosts to "
        "allow it"
    )


def _is_public(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return _is_public(ip.ipv4_mapped)
        if ip in _NAT64:
            return _is_public(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF))
        inner = (ip.sixtofour, *(ip.teredo or ()))
        if ip not in _GLOBAL_UNICAST or not all(_is_public(a) for a in inner if a is not None):
            return False
    return ip.is_global and not ip.is_multicast and not any(ip in net for net in _SPECIAL)
