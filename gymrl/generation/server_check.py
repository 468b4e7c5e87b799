"""What a policy server can do, asked before a run: its limits, token ids, log-probabilities."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from gymrl.api_keys import authorization
from gymrl.concurrency import gather_bounded
from gymrl.errors import GenerationTransportError
from gymrl.generation.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TIMEOUT_S = 60.0
NUM_CONNECTIONS = 64
NUM_SAMPLES = 16
"""Calls of one token at each of two temperatures, to see which log-probabilities come back."""

_QUESTION = "Say yes or no."
_SAME = 1e-2
"""Nats that two log-probabilities of one token may differ by and still be the same number."""

_REFUSED = (401, 403)
_TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class _Answer(msgspec.Struct, frozen=True):
    status: int
    body: Any


async def check_server(
    base_url: str, model: str | None = None, api_key: str | None = None
) -> list[Finding]:
    """Everything there is to say about a server.

    A few dozen calls of one token each are sampled. Where the server refuses the key, or misses
    one, that is the last that is said.

    Args:
        base_url: With ``/v1``.
        model: What requests ask for; None: the first that the server lists.
        api_key: Sent as a bearer token, and in nothing that is found; None: no key.

    Raises:
        GenerationTransportError: The server can't be reached.
    """
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=authorization(api_key)
    ) as session:
        asker = _Asker(session, base_url.rstrip("/"), api_key)
        listed = await asker.get("/models")
        if listed.status in _REFUSED:
            return [_about_key(listed, "/models", api_key)]
        models = _models(listed.body)
        findings = [*_about_models(listed, models, model)]
        asker.model = model or (models[0]["id"] if models else "policy")
        answer = await asker.post("/responses", _responses_body())
        if answer.status in _REFUSED:
            return [*findings, _about_key(answer, "/responses", api_key)]
        findings += _about_responses(answer)
        chat = await asker.post("/chat/completions", _chat_body())
        findings += _about_chat(chat)
        if answer.status != 200 and chat.status != 200:
            findings.append(_no_answer(asker.model, models))
            return findings
        findings += await _about_logprobs(asker)
        findings += _about_ledger(await asker.get("/ledger"))
        findings += await _about_connections(asker)
    return findings


class _Asker:
    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, api_key: str | None = None
    ) -> None:
        self._session = session
        self._api_key = api_key
        self.base_url = base_url
        self.model = "policy"

    async def get(self, path: str) -> _Answer:
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> _Answer:
        return await self._ask("POST", path, {"model": self.model, **body})

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> _Answer:
        url = f"{self.base_url}{path}"
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, url, data=data, headers=headers) as answer:
                text = await answer.read()
                if self._api_key is not None:
                    # Some servers say which key they were given.
                    text = text.replace(self._api_key.encode(), b"(the key)")
                return _Answer(answer.status, _decoded(text))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise GenerationTransportError(
                f"{url}: {type(error).__name__}: {error}; is the server up, and does the URL end "
                "in /v1?",
                url=url,
            ) from error


def _no_answer(asked: str, models: Sequence[dict[str, Any]]) -> Finding:
    names = ", ".join(model["id"] for model in models) or "none that it lists"
    return Finding(
        check="answers",
        severity="break",
        found=f"the server samples on neither route for the model {asked!r}",
        remedy=f"ask for a model that it has ({names}) with --model-name, and with gym.model_name in "
        "the run; its own log says what else may be wrong",
    )


def _about_key(answer: _Answer, path: str, api_key: str | None) -> Finding:
    remedy = (
        "name the environment variable that holds the server's key with --api-key-env; a run takes "
        "it from gym.api_key_env"
        if api_key is None
        else "the key that was sent is not one it takes: look into the variable of --api-key-env"
    )
    return Finding(
        check="key",
        severity="break",
        found=f"{path} answered HTTP {answer.status}: {_short(answer.body)}",
        remedy=remedy,
    )


def _decoded(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text[:200].decode("utf-8", "replace")


def _responses_body(**sampling: Any) -> dict[str, Any]:
    return {"input": _QUESTION, "max_output_tokens": 4, **sampling}


def _chat_body(**sampling: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": _QUESTION}],
        "max_tokens": 4,
        "logprobs": True,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        **sampling,
    }


def _models(body: Any) -> list[dict[str, Any]]:
    data = body.get("data") if isinstance(body, dict) else None
    return [m for m in data or () if isinstance(m, dict) and isinstance(m.get("id"), str)]


def _about_models(
    answer: _Answer, models: Sequence[dict[str, Any]], wanted: str | None
) -> Iterator[Finding]:
    if not models:
        yield Finding(
            check="models",
            severity="break",
            found=f"GET /models answered HTTP {answer.status} and lists no model",
            remedy="give the base URL of an OpenAI-compatible server, with /v1",
        )
        return
    names = ", ".join(model["id"] for model in models)
    if wanted is not None and wanted not in {model["id"] for model in models}:
        yield Finding(
            check="models",
            severity="warn",
            found=f"{wanted!r} is not among those listed ({names})",
            remedy="set gym.model_name to one of them, unless it is an alias",
        )
    else:
        yield Finding(check="models", severity="ok", found=names)
    length = models[0].get("max_model_len")
    if isinstance(length, int):
        yield Finding(check="context", severity="ok", found=f"{length} tokens")
    else:
        yield Finding(
            check="context",
            severity="note",
            found="the server does not say how long a context may be",
            remedy="set sampling.max_tokens so that long rollouts fit",
        )


def _about_responses(answer: _Answer) -> Iterator[Finding]:
    check = "responses"
    output = answer.body.get("output") if isinstance(answer.body, dict) else None
    last = output[-1] if isinstance(output, list) and output else None
    if answer.status != 200 or not isinstance(last, dict):
        yield Finding(
            check=check,
            severity="warn",
            found=f"POST /responses answered HTTP {answer.status}: {_short(answer.body)}",
            remedy="agents that use the Responses API need a model server in front that speaks it",
        )
        return
    missing = [field for field in _TOKEN_FIELDS if not isinstance(last.get(field), list)]
    if missing:
        yield Finding(
            check=check,
            severity="break",
            found=f"the last output item lacks {', '.join(missing)}",
            remedy="serve the policy with `gymrl serve`, or put Gym's vllm_model in front with "
            "return_token_id_information: true",
        )
        return
    yield Finding(check=check, severity="ok", found="token ids and log-probabilities come back")


def _about_chat(answer: _Answer) -> Iterator[Finding]:
    check = "chat completions"
    choice = _choice(answer.body)
    if answer.status != 200 or choice is None:
        yield Finding(
            check=check,
            severity="warn",
            found=f"POST /chat/completions answered HTTP {answer.status}: {_short(answer.body)}",
            remedy="agents that use chat completions need a server that has them",
        )
        return
    has_ids = isinstance(choice.get("token_ids"), list)
    has_prompt = isinstance(answer.body.get("prompt_token_ids"), list)
    tokens = [entry.get("token") for entry in _entries(choice)]
    are_ids = bool(tokens) and all(str(token).startswith("token_id:") for token in tokens)
    if has_ids and not has_prompt:
        yield Finding(
            check=check,
            severity="break",
            found="token_ids come without prompt_token_ids; Gym's model server refuses that",
            remedy="update the server, so that return_token_ids gives both",
        )
    elif has_ids or are_ids:
        kind = (
            "token_ids and prompt_token_ids" if has_ids else "token_id:N in the log-probabilities"
        )
        yield Finding(check=check, severity="ok", found=kind)
    else:
        yield Finding(
            check=check,
            severity="break",
            found="no token ids: neither token_ids nor tokens written as token_id:N",
            remedy="use a server with return_tokens_as_token_ids or return_token_ids (vLLM, gymrl)",
        )


async def _about_logprobs(asker: _Asker) -> list[Finding]:
    """Raw log-probabilities do not change with the temperature; processed ones do."""
    check = "log-probabilities"
    # At temperature 0 the likeliest token comes with its log-probability at 1.
    greedy, at_one, at_half = await gather_bounded(
        lambda temperature: _first_logprobs(asker, temperature), (0.0, 1.0, 0.5)
    )
    at_one = greedy | at_one
    both = {token: (at_one[token], at_half[token]) for token in at_one.keys() & at_half.keys()}
    # A token that is nearly certain has the same number either way.
    telling = [pair for pair in both.values() if pair[0] < -5 * _SAME]
    if not telling:
        reason = "no log-probabilities come back" if not at_one else "no token told them apart"
        return [
            Finding(
                check=check,
                severity="warn",
                found=f"raw or processed could not be measured: {reason}",
                remedy="train with temperature 1, where both are the same",
            )
        ]
    gap = max(abs(half - one) for one, half in telling)
    if gap > _SAME:
        found = f"processed: those of the sampling distribution (they move by {gap:.3g} nats)"
        return [Finding(check=check, severity="ok", found=found)]
    return [
        Finding(
            check=check,
            severity="warn",
            found="raw: those of temperature 1 whatever the sampling was",
            remedy="start vLLM with --logprobs-mode processed_logprobs, set "
            "generation.logprobs_mode='processed', or sample at temperature 1 without top-p",
        )
    ]


async def _first_logprobs(asker: _Asker, temperature: float) -> dict[str, float]:
    async def one(seed: int) -> tuple[str, float] | None:
        body = _chat_body(temperature=temperature, max_tokens=1, seed=seed)
        answer = await asker.post("/chat/completions", body)
        choice = _choice(answer.body)
        entry = next(iter(_entries(choice or {})), None)
        value = None if entry is None else entry.get("logprob")
        if entry is None or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return str(entry.get("token")), float(value)

    found: defaultdict[str, float] = defaultdict(float)
    for pair in await gather_bounded(one, range(NUM_SAMPLES if temperature else 1), limit=4):
        if pair is not None:
            found[pair[0]] = pair[1]
    return dict(found)


def _about_ledger(answer: _Answer) -> Iterator[Finding]:
    known = isinstance(answer.body, dict) and "server_id" in answer.body
    if known and answer.body.get("max_bytes"):
        megabytes = answer.body["max_bytes"] / (1 << 20)
        yield Finding(check="token ledger", severity="ok", found=f"kept, up to {megabytes:g} MiB")
    else:
        yield Finding(
            check="token ledger",
            severity="note",
            found="none: agents must carry token fields",
            remedy="leave gym.token_source at 'messages' with this server",
        )


async def _about_connections(asker: _Asker) -> list[Finding]:
    check = "connections"

    async def one(_: int) -> str | None:
        try:
            await asker.get("/models")
        except GenerationTransportError as error:
            return str(error)
        return None

    errors = [error for error in await gather_bounded(one, range(NUM_CONNECTIONS)) if error]
    if errors:
        return [
            Finding(
                check=check,
                severity="warn",
                found=f"{len(errors)} of {NUM_CONNECTIONS} at once failed, first: {errors[0]}",
                remedy="raise the server's limits (open files, backlog), or set "
                "gym.max_connections",
            )
        ]
    return [Finding(check=check, severity="ok", found=f"{NUM_CONNECTIONS} at once are answered")]


def _choice(body: Any) -> dict[str, Any] | None:
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else None


def _entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [entry for entry in content or () if isinstance(entry, dict)]


def _short(body: Any) -> str:
    text = body if isinstance(body, str) else msgspec.json.encode(body).decode()
    return text if len(text) <= 200 else f"{text[:200]}..."
