"""One vLLM server over HTTP: what it is, and what it answers.

aiohttp's errors end here: what comes out is gymrl's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from gymrl.api_keys import authorization, read_api_key
from gymrl.config import LogprobsMode, SamplingParams
from gymrl.errors import (
    GenerationError,
    GenerationRequestError,
    GenerationTransportError,
)
from gymrl.generation.vllm_wire import (
    COMPLETIONS_PATH,
    GENERATE_PATH,
    Choice,
    ServedModels,
    error_param,
    error_text,
    read_choice,
    request_body,
    sampling_fields,
)

CONNECT_TIMEOUT_S = 10.0

_NOT_NOW = frozenset({429, 502, 503, 504})
"""Statuses that refuse a call before it is served."""


class RefusedError(GenerationTransportError):
    """A server did not take the call; nothing was sampled, another one may take it."""


class UnauthorizedError(RefusedError):
    """A server does not take the call's key, or wants one."""


class NoRouteError(GenerationRequestError):
    """A server does not know the route."""


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about a server.

    Attributes:
        model: The name that requests use.
        max_model_len: Context in tokens.
        path: The best route it has.
        logprobs_mode: What its log-probabilities are.
    """

    model: str
    max_model_len: int
    path: str
    logprobs_mode: LogprobsMode


class VllmClient:
    """Talks to any number of servers. Needs a running event loop.

    Args:
        api_key_env: The environment variable that holds their key; None: they want none.

    Raises:
        ConfigError: As :func:`gymrl.api_keys.read_api_key`.
    """

    def __init__(self, api_key_env: str | None = None) -> None:
        self._api_key_env = api_key_env
        self._key = read_api_key(
            api_key_env, "vllm.api_key_env", f"vllm.api_key_env={api_key_env!r}"
        )
        self._session = aiohttp.ClientSession(
            headers=authorization(self._key),
            # A connection a call: servers drop idle ones without a word, and a call that is lost
            # that way looks like one that broke off.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )

    async def choices(self, url: str, path: str, body: dict[str, Any]) -> AsyncIterator[Choice]:
        """The parts of an answer; one where it isn't streamed.

        Raises:
            UnauthorizedError: It wants a key, or another one; nothing was sampled.
            RefusedError: The server can't be reached or has no room; nothing was sampled.
            GenerationTransportError: It broke off, or failed.
            GenerationRequestError: It refuses the request as it stands.
        """
        try:
            async with self._session.post(
                url + path,
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
            ) as response:
                if response.status != 200:
                    raise self._refusal(url, response.status, await response.read())
                if not body["stream"]:
                    choice = read_choice(self._without_key(await response.read()), url)
                    if choice is not None:
                        yield choice
                    return
                async for line in response.content:
                    event = line.strip().removeprefix(b"data:").strip()
                    if not event or event == b"[DONE]":
                        continue
                    choice = read_choice(self._without_key(event), url)
                    if choice is not None:
                        yield choice
        except aiohttp.ClientConnectorError as error:
            raise RefusedError(f"{url} can't be reached: {error}", url=url) from error
        except (aiohttp.ClientError, OSError) as error:
            raise GenerationTransportError(
                f"{url} broke off before its answer was whole: {type(error).__name__}: {error}",
                url=url,
            ) from error

    async def inspect(self, url: str) -> ServerFacts:
        """Ask a server what it is, and sample one token to see that it is well.

        Raises:
            UnauthorizedError: It wants a key, or another one.
            GenerationError: It can't be reached, is not well, or is no vLLM server.
        """
        try:
            await self._get(f"{url}/health")
            models = msgspec.json.decode(await self._get(f"{url}/v1/models"), type=ServedModels)
            # An empty request: refused as it stands where the route is, else as a whole.
            async with self._session.post(f"{url}{GENERATE_PATH}", json={}) as response:
                path = GENERATE_PATH if response.status in (400, 422) else COMPLETIONS_PATH
        except (aiohttp.ClientError, OSError) as error:
            raise RefusedError(
                f"{url} can't be reached: {type(error).__name__}: {error}", url=url
            ) from error
        except msgspec.DecodeError as error:
            raise GenerationTransportError(f"{url} is no vLLM server: {error}", url=url) from error
        if not models.data or models.data[0].max_model_len is None:
            raise GenerationTransportError(
                f"{url} is no vLLM server: its /v1/models names no model with a context length",
                url=url,
            )
        model = models.data[0]
        return ServerFacts(
            model=model.id,
            max_model_len=model.max_model_len or 0,
            path=path,
            logprobs_mode=await self._measured_mode(url, path, model.id),
        )

    async def control(self, url: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Give an order over one of vLLM's development routes.

        Args:
            url: Of the server.
            path: With its query.
            body: None: asked with GET.

        Returns:
            The answer's JSON; None where it is empty.

        Raises:
            NoRouteError: The server has no such route.
            RefusedError: It can't be reached, or has no room.
            GenerationTransportError: It broke off, or failed; only then does it have a status.
            GenerationRequestError: It refuses the order.
        """
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, url + path, json=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise RefusedError(
                f"{url} can't be reached: {type(error).__name__}: {error}", url=url
            ) from error
        if response.status == 404:
            raise NoRouteError(f"{url} does not know {path}")
        if response.status != 200:
            raise self._refusal(url, response.status, answer)
        try:
            return msgspec.json.decode(answer) if answer else None
        except msgspec.DecodeError as error:
            raise GenerationTransportError(
                f"{url}{path} answered something else than JSON: {error}",
                url=url,
                status=response.status,
            ) from error

    async def model_root(self, url: str) -> str | None:
        """Where a server says that its model was loaded from.

        Raises:
            GenerationError: As :meth:`control`.
        """
        answer = await self.control(url, "/v1/models")
        models = msgspec.convert(answer, ServedModels, strict=False).data
        return models[0].root if models else None

    async def _get(self, url: str) -> bytes:
        async with self._session.get(url) as response:
            body = await response.read()
            if response.status != 200:
                raise self._refusal(url, response.status, body)
            return body

    async def _measured_mode(self, url: str, path: str, model: str) -> LogprobsMode:
        """What a server's log-probabilities are; no route tells.

        With top-k 1 the likeliest token is sampled for sure: its log-probability is 0 in the
        sampling distribution, and below that in the model's own.
        """
        sampling = SamplingParams(top_k=1, max_tokens=1)
        fields = sampling_fields(sampling, budget=1, end_ids=frozenset())
        body = request_body(path, model, [1], fields, stream=False)
        measured: list[float] = []
        async for choice in self.choices(url, path, body):
            measured += choice.logprobs.values() if choice.logprobs else []
        if not measured:
            raise GenerationTransportError(f"{url} gives no log-probabilities", url=url)
        return "processed" if abs(measured[0]) < 1e-6 else "raw"

    async def close(self) -> None:
        """Close what is open."""
        await self._session.close()

    def _without_key(self, said: bytes) -> bytes:
        """Some servers say which key they were given; before anything is cut, as half a key is one too."""
        return said if self._key is None else said.replace(self._key.encode(), b"(the key)")

    def _refusal(self, url: str, status: int, body: bytes) -> GenerationError:
        text = f"{url} answered HTTP {status}: {error_text(self._without_key(body))}"
        if status in (401, 403):
            remedy = (
                "set vllm.api_key_env to the variable that holds its key"
                if self._api_key_env is None
                else f"the key in {self._api_key_env} (vllm.api_key_env) is not one it takes"
            )
            return UnauthorizedError(f"{text}; {remedy}", url=url, status=status)
        return _error_of(text, url, status, error_param(body))


def _error_of(text: str, url: str, status: int, param: str | None) -> GenerationError:
    if status in _NOT_NOW:
        return RefusedError(text, url=url, status=status)
    if status >= 500:
        return GenerationTransportError(text, url=url, status=status)
    return GenerationRequestError(text, param=param)
