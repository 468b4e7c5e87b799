"""Which of several servers takes the next call: the one with the fewest in flight.

Pure bookkeeping; it knows no HTTP. A server that fails is taken out with the reason, and gets no
calls until whoever looks after it puts it back in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from gymrl.errors import ConfigError, GenerationTransportError


class Upstream:
    """One server.

    Attributes:
        url: Without a slash at the end.
        in_flight: Calls that it is serving for us.
        out_because: Why it gets no calls; None while it gets some.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0
        self.out_because: str | None = None


class Balancer:
    """Hands out servers.

    Args:
        urls: At least one, each once.

    Raises:
        ConfigError: There is none, or one comes twice.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls or len(set(urls)) != len(urls):
            raise ConfigError(
                f"vllm.base_urls={list(urls)!r}: name one server or more, each once",
                setting="vllm.base_urls",
            )
        self.upstreams = [Upstream(url) for url in urls]

    @contextlib.contextmanager
    def lease(self, tried: Collection[str] = ()) -> Iterator[Upstream]:
        """A server for one call: the least busy one, and among equals the one that waited longest.

        Args:
            tried: URLs that this call has been to already.

        Raises:
            GenerationTransportError: Every server is out, or was tried; the text says why for each.
        """
        fit = [u for u in self.upstreams if u.out_because is None and u.url not in tried]
        if not fit:
            said = "; ".join(
                f"{u.url}: {u.out_because or 'refused the call'}" for u in self.upstreams
            )
            raise GenerationTransportError(f"no vLLM server can take the call; {said}")
        chosen = min(fit, key=lambda upstream: upstream.in_flight)
        self.upstreams.remove(chosen)
        self.upstreams.append(chosen)
        chosen.in_flight += 1
        try:
            yield chosen
        finally:
            chosen.in_flight -= 1

    def out(self) -> list[Upstream]:
        """The servers that get no calls."""
        return [upstream for upstream in self.upstreams if upstream.out_because is not None]
