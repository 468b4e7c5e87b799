"""Request bodies of the HTTP server, decoded once at the edge.

Every optional field may be missing or null. Unknown fields are tolerated, as clients of this
protocol send many. A field that would change the sampling distribution and that this server can't
honour is refused by name instead of ignored.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from gymrl.config import SamplingParams
from gymrl.errors import GenerationRequestError
from gymrl.generation import refused_fields
from gymrl.generation.carried_tokens import TokenCarrier
from gymrl.generation.request_content import (  # noqa: TC001 - msgspec reads annotations
    Content,
    Part,
)
from gymrl.generation.surrogates import read_json

RequestT = TypeVar("RequestT", bound="SampledRequest")

MAX_STOP_TEXTS = 256
MAX_STOP_CHARS = 16384
"""All stop texts of a call together. Each is looked for after each token, in the thread that decodes for all."""

_NO_VARIABLES = frozenset(
    {"conversation", "messages", "tools", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask"}
)
"""Not the template's to read: transformers takes them, a program in place of the template among them."""


class InputItem(TokenCarrier, kw_only=True):
    """One item of a Responses input: a message, a call, a call's output, or reasoning."""

    type: str | None = None
    role: str | None = None
    content: Content = None
    summary: list[Part] | None = None
    name: str | None = None
    arguments: Any = None
    call_id: str | None = None
    output: Content = None


class CallFunction(msgspec.Struct):
    """The function of a chat message's tool call."""

    name: str | None = None
    arguments: Any = None


class MessageCall(msgspec.Struct):
    """One tool call of a chat message."""

    id: str | None = None
    function: CallFunction | None = None


class ChatMessage(TokenCarrier, kw_only=True):
    """One message of a chat-completions request; `function_call` is the older form of one call."""

    role: str
    content: Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    function_call: CallFunction | None = None
    tool_call_id: str | None = None


class SampledRequest(msgspec.Struct, kw_only=True):
    """What the APIs that sample share.

    Attributes:
        refused: Fields that this server does not have, and refuses where they would do
            something.
        called_here: What fields of other APIs are called on this route.
    """

    refused: ClassVar[refused_fields.Neutral] = refused_fields.SAMPLED
    called_here: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None

    def sampling(self, max_tokens: int | None, limit_field: str) -> SamplingParams:
        """The sampling parameters; `top_k` of 0 or -1 is off, as clients of vLLM write it.

        Args:
            max_tokens: The request's limit.
            limit_field: How the request calls it.

        Raises:
            GenerationRequestError: The limit is not positive.
            ConfigError: Another value is out of range.
        """
        if max_tokens is not None and max_tokens <= 0:
            raise GenerationRequestError(
                f"{limit_field}={max_tokens}: must be positive", param=limit_field
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOP_TEXTS or sum(map(len, stop)) > MAX_STOP_CHARS:
            raise GenerationRequestError(
                f"stop: {len(stop)} texts of {sum(map(len, stop))} characters; {MAX_STOP_TEXTS} texts of "
                f"{MAX_STOP_CHARS} characters together are taken",
                param="stop",
            )
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=None if self.top_k in (None, 0, -1) else self.top_k,
            max_tokens=max_tokens,
            stop=tuple(text for text in stop if text),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
        )


class ResponsesRequest(SampledRequest, kw_only=True):
    """``POST /v1/responses``."""

    refused: ClassVar[refused_fields.Neutral] = refused_fields.RESPONSES
    called_here: ClassVar[Mapping[str, str]] = refused_fields.IN_RESPONSES

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    user: str | None = None


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ChatRequest(SampledRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    refused: ClassVar[refused_fields.Neutral] = refused_fields.CHAT
    called_here: ClassVar[Mapping[str, str]] = refused_fields.IN_CHAT

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    logprobs: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None

    @property
    def limit(self) -> tuple[int | None, str]:
        """Of the sampled tokens, and the field that says it; the newer of the two counts."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """``POST /tokenize``: a conversation, or a text.

    Attributes:
        add_special_tokens: Of a text: put around it what the tokenizer puts there; on unless it is
            false, as in ``/v1/completions``. A conversation has those that its template writes.
    """

    refused: ClassVar[refused_fields.Neutral] = refused_fields.NO_PROMPT
    called_here: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def read_request(body: bytes, cls: type[RequestT] | type[TokenizeRequest]) -> Any:
    """The request that a body is, ``metadata.extra_body`` merged into it.

    What no field reads is skipped, not decoded: long conversations carry more of it than of anything
    else.

    Raises:
        GenerationRequestError: As :func:`decode_body` and :func:`convert`.
    """
    try:
        request = msgspec.json.decode(body, type=_as_sent(cls))
    except (msgspec.DecodeError, RecursionError):
        return convert(decode_body(body), cls)
    values = {name: getattr(request, name) for name in ("metadata", *cls.refused)}
    if _extra_of(values) is not None:
        return convert(decode_body(body), cls)
    return _checked(request, values)


@functools.cache
def _as_sent(cls: type[RequestT] | type[TokenizeRequest]) -> type[Any]:
    """A request with the fields that it refuses, so that one pass over a body finds all."""
    others = {"metadata", *cls.refused}.difference(cls.__struct_fields__)
    fields = [(name, Any, None) for name in sorted(others)]
    return msgspec.defstruct(cls.__name__, fields, bases=(cls,), kw_only=True)


def decode_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request, ``metadata.extra_body`` merged into it.

    A lone surrogate in a text, which JSON can spell and UTF-8 can't, becomes U+FFFD.

    Raises:
        GenerationRequestError: The body is no JSON object.
    """
    try:
        values = _decode_json(body)
    except (ValueError, RecursionError) as error:
        raise GenerationRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise GenerationRequestError(
            f"the body is a JSON {type(values).__name__}; an object is needed"
        )
    extra = _extra_of(values)
    return values if extra is None else {**values, **_extra_body(extra)}


def _extra_of(values: Mapping[str, Any]) -> Any:
    metadata = values.get("metadata")
    return metadata.get("extra_body") if isinstance(metadata, dict) else None


def _decode_json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        pass
    return read_json(body.decode())


def _extra_body(extra: Any) -> dict[str, Any]:
    try:
        values = read_json(extra) if isinstance(extra, str) else extra
    except (ValueError, RecursionError) as error:
        raise GenerationRequestError(
            f"metadata.extra_body is not valid JSON: {error}", param="metadata.extra_body"
        ) from error
    if not isinstance(values, dict):
        raise GenerationRequestError(
            "metadata.extra_body must be the text of a JSON object", param="metadata.extra_body"
        )
    return values


def convert(values: Mapping[str, Any], cls: type[RequestT] | type[TokenizeRequest]) -> Any:
    """Build a request from plain data.

    Raises:
        GenerationRequestError: Naming the field that is missing, has the wrong type, or asks for
            what this server can't do.
    """
    try:
        request = msgspec.json.decode(msgspec.json.encode(values), type=cls)
    except msgspec.ValidationError as error:
        text = str(error)
        found = re.search(r"at `\$\.?(.*)`$", text) or re.search(r"field `(.*)`$", text)
        raise GenerationRequestError(text, param=found[1] if found else None) from None
    return _checked(request, values)


def _checked(request: Any, values: Mapping[str, Any]) -> Any:
    """The request, unless it asks for what this server can't do."""
    refused_fields.refuse(values, request.refused, request.called_here)
    for name in sorted(_NO_VARIABLES.intersection(request.chat_template_kwargs or ())):
        raise GenerationRequestError(
            f"chat_template_kwargs.{name} is no variable of a template; leave it out",
            param=f"chat_template_kwargs.{name}",
        )
    return request


def check_tool_choice(choice: Any) -> bool:
    """Whether calls may be made: the model can't be forced to make one.

    Raises:
        GenerationRequestError: A call is required, which needs constrained decoding.
    """
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    raise GenerationRequestError(
        f"tool_choice={refused_fields.shown(choice)} needs constrained decoding, which this server does not have; "
        "use 'auto' or 'none'",
        param="tool_choice",
    )


def check_text_format(format_: Any, param: str) -> None:
    """Refuse structured output.

    Raises:
        GenerationRequestError: The format is anything but plain text.
    """
    kind = format_.get("type") if isinstance(format_, dict) else format_
    if format_ and kind != "text":
        raise GenerationRequestError(
            f"{param}: the format {refused_fields.shown(kind)} needs constrained decoding, which this "
            "server does not have; ask for it in the prompt",
            param=param,
        )


def template_variables(
    variables: Mapping[str, Any] | None, effort: str | None, reads: Callable[[str], bool]
) -> dict[str, Any] | None:
    """Variables of the chat template: the request's own, and what an effort of reasoning means there.

    As vLLM has it: a template reads `reasoning_effort`, or `enable_thinking`, or neither.

    Args:
        variables: The request's `chat_template_kwargs`; they have the last word.
        effort: ``none``, ``low``, ...; None: the request does not say.
        reads: Whether the template reads a variable. One that it does not read makes no difference,
            and so none between two calls of a rollout.
    """
    if effort is None:
        return None if variables is None else dict(variables)
    meant = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    known = {name: value for name, value in meant.items() if reads(name)}
    return {**known, **(variables or {})} or None
