"""What vLLM's HTTP API says and is told: requests as plain data, answers as structs.

Two routes sample from token ids: ``/inference/v1/generate`` (a server started with
``--enable-scale-out``), which also says which weights the tokens came from, and
``/v1/completions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import GenerationTransportError
from gymrl.generation.base import WeightSpan
from gymrl.generation.vllm_sampling import check_temperature, stop_token_ids
from gymrl.media import to_data_url

if TYPE_CHECKING:
    from gymrl.config import SamplingParams
    from gymrl.generation.images import PromptImages

GENERATE_PATH = "/inference/v1/generate"
COMPLETIONS_PATH = "/v1/completions"


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token of ``/inference/v1/generate``; None stands for no finite number."""

    logprob: float | None = None


class Span(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` and the version of their weights."""

    version: str
    start: int
    end: int


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities in either route's form."""

    content: list[TokenLogprob] | None = None
    token_logprobs: list[float | None] | None = None

    def values(self) -> list[float]:
        """One per token; NaN where the server sent null."""
        found: list[float | None]
        if self.content is not None:
            found = [entry.logprob for entry in self.content]
        else:
            found = self.token_logprobs or []
        return [float("nan") if value is None else value for value in found]


class Choice(msgspec.Struct, frozen=True):
    """One sample, or a part of it."""

    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[Span] | None = None
    routed_experts: str | None = None
    engine_prompt_ids: list[int] | None = None

    @property
    def spans(self) -> list[WeightSpan]:
        """As :class:`~gymrl.generation.base.Generated` has them."""
        return [WeightSpan(s.version, s.start, s.end) for s in self.weight_versions or ()]


class ErrorBody(msgspec.Struct, frozen=True):
    """What went wrong, in OpenAI's shape."""

    message: str = ""
    param: Any = None


class Answer(msgspec.Struct, frozen=True):
    """A whole answer, or one event of a stream; the first one has the prompt, if it was asked for."""

    choices: list[Choice] = []
    prompt_token_ids: list[int] | None = None
    error: ErrorBody | None = None


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of ``/v1/models``."""

    id: str
    max_model_len: int | None = None
    root: str | None = None


class ServedModels(msgspec.Struct, frozen=True):
    """The answer of ``/v1/models``."""

    data: list[ServedModel] = []


_answers = msgspec.json.Decoder(Answer)


def read_choice(body: bytes, url: str) -> Choice | None:
    """The sample of an answer or of a stream's event; None where it holds none.

    Raises:
        GenerationTransportError: It is no answer of vLLM's, or says that sampling failed.
    """
    try:
        answer = _answers.decode(body)
    except msgspec.DecodeError as error:
        raise GenerationTransportError(
            f"{url} answered with something else than vLLM's JSON: {error}", url=url
        ) from error
    if answer.error is not None:
        raise GenerationTransportError(f"{url}: {answer.error.message}", url=url)
    if not answer.choices or answer.prompt_token_ids is None:
        return answer.choices[0] if answer.choices else None
    return msgspec.structs.replace(answer.choices[0], engine_prompt_ids=answer.prompt_token_ids)


def error_text(body: bytes) -> str:
    """The message of an error's body, else its first 500 characters."""
    try:
        message = _answers.decode(body).error
    except msgspec.DecodeError:
        message = None
    return message.message if message else body[:500].decode("utf-8", "replace")


def error_param(body: bytes) -> str | None:
    """The field that an error's body names."""
    try:
        told = _answers.decode(body).error
    except msgspec.DecodeError:
        return None
    return told.param if told is not None and isinstance(told.param, str) else None


def sampling_fields(
    sampling: SamplingParams, *, budget: int, end_ids: frozenset[int]
) -> dict[str, Any]:
    """Parameters by vLLM's names.

    Those that gymrl has no setting for are named too: a server takes what is left out from the
    model's own generation config.

    Raises:
        GenerationRequestError: A temperature that vLLM would change.
    """
    check_temperature(sampling)
    fields: dict[str, Any] = {
        "max_tokens": budget,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": stop_token_ids(sampling, end_ids),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs": 0,
    }
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        fields["seed"] = sampling.seed % (1 << 63)
    return fields


def image_fields(prompt_ids: Sequence[int], images: PromptImages) -> dict[str, Any]:
    """Fields of a body of ``/inference/v1/generate`` that make it one with images."""
    parts = [
        {
            "type": "image_url",
            "url": to_data_url(image.data, image.media_type),
            "uuid": image.digest,
        }
        for image in images.images
    ]
    return {
        "token_ids": images.shortened(prompt_ids),
        "content_parts": parts,
        "return_token_ids": True,
    }


def request_body(
    path: str, model: str, prompt_ids: Sequence[int], fields: dict[str, Any], *, stream: bool
) -> dict[str, Any]:
    """The JSON of one call."""
    if path == GENERATE_PATH:
        return {
            "model": model,
            "token_ids": list(prompt_ids),
            "sampling_params": fields,
            "stream": stream,
        }
    return {
        "model": model,
        "prompt": list(prompt_ids),
        "return_token_ids": True,
        "stream": stream,
        **fields,
    }
