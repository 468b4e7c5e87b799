"""An OpenAI-compatible HTTP server over any generator, with token ids in its answers.

Routes: ``POST /v1/responses``, ``POST /v1/chat/completions``, ``POST /v1/completions``,
``POST /tokenize`` (also under ``/v1``), ``GET /v1/models`` and ``/v1/models/{name}``, ``GET /health``. All but the last are also served under
``/ng-rollout/{id}/...``, where Gym's servers put the id of the rollout that a call belongs to; a
header ``x-gymrl-rollout-id`` names it as well. What such calls were served is kept, and
``GET|DELETE /ledger/{id}`` gives it out: see :mod:`gymrl.generation.ledger_routes`.

Errors are JSON in OpenAI's shape: see :mod:`gymrl.generation.http_errors`. The stack of what is the
server's own fault goes to the log. A client that disconnects cancels its generation.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from gymrl.addresses import bound_socket
from gymrl.browsers import guard, is_loopback
from gymrl.concurrency import gather_bounded
from gymrl.errors import GenerationRequestError, ServerStartError
from gymrl.generation import chat_api, responses_api
from gymrl.generation.base import SamplingParams, fault_of, token_budget
from gymrl.generation.chunks import ClientGoneError, EventStream
from gymrl.generation.completions_api import CompletionRequest, Completions
from gymrl.generation.deferred import DeferredGenerator
from gymrl.generation.http_errors import (
    INVALID,
    BodyTooLargeError,
    BrokenBodyError,
    UnknownModelError,
    error_answer,
    json_answer,
    status_answer,
    told,
)
from gymrl.generation.ledger import LedgerBook
from gymrl.generation.ledger_routes import LedgerRoutes
from gymrl.generation.requests import (
    ChatRequest,
    ResponsesRequest,
    TokenizeRequest,
    read_request,
)
from gymrl.generation.responses_stream import ResponseStream
from gymrl.generation.streaming import ChatStream
from gymrl.listening import IDLE_S, Door, read_body

if TYPE_CHECKING:
    import socket

    from gymrl.generation.policy import Policy

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that nobody listens on yet.

    Raises:
        ServerStartError: The address is not this machine's, or the port is taken.
    """
    try:
        return bound_socket(host, port)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "another port, or 0 for a free one" if is_port else "an address of this machine"
        raise ServerStartError(
            f"can't listen on {host}:{port}: {error.strerror or error}; choose {remedy}"
        ) from error


class GenerationServer:
    """Serves one policy.

    Args:
        policy: Its generator is owned by the caller and outlives the server.
        host: Address to listen on.
        port: 0 takes a free one.
        max_body_bytes: Larger request bodies get HTTP 413.
        ledgers: Where calls that name their rollout are recorded; None: a book with its defaults.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        max_body_bytes: int = 256 << 20,
        ledgers: LedgerBook | None = None,
    ) -> None:
        self._policy = policy
        self._host = host
        self._port = port
        self._max_body_bytes = max_body_bytes
        self._ledgers = LedgerRoutes(LedgerBook() if ledgers is None else ledgers)
        self._runner: web.AppRunner | None = None
        self._door: Door | None = None

    async def start(self) -> str:
        """Listen.

        Returns:
            The base URL, with ``/v1``.

        Raises:
            ServerStartError: The address can't be listened on.
        """
        bound = listening_socket(self._host, self._port)
        self._runner = web.AppRunner(
            self._app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=5.0,
            keepalive_timeout=IDLE_S,
        )
        await self._runner.setup()
        self._door = Door(self._runner, bound)
        await self._door.open()
        if not is_loopback(self._host):
            logger.warning(
                "the generation server listens on %s and asks for no key: whoever reaches it can use it",
                self._host,
            )
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._door.port}/v1"

    async def stop_listening(self) -> None:
        """Refuse new connections; calls in flight go on."""
        if self._door is not None:
            await self._door.close()

    async def close(self) -> None:
        """Stop; calls still in flight are cancelled after a grace of 5 s. Safe to call twice."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await self.stop_listening()
            await runner.cleanup()

    def _app(self) -> web.Application:
        middlewares = [guard(self._host), self._errors]
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=middlewares)
        posts: dict[str, Handler] = {
            "/v1/responses": self._responses,
            "/v1/chat/completions": self._chat_completions,
            "/v1/completions": self._completions,
            "/tokenize": self._tokenize,
            "/v1/tokenize": self._tokenize,
        }
        # Further segments may follow the id, as in .../training-token-capture/v1/responses.
        for root in ("", "/ng-rollout/{rollout_id}", "/ng-rollout/{rollout_id}/{feature}"):
            for path, handler in posts.items():
                app.router.add_post(root + path, handler)
            app.router.add_get(root + "/v1/models", self._models)
            app.router.add_get(root + "/v1/models/{name:.+}", self._model)
        self._ledgers.add_to(app)
        app.router.add_get("/health", self._health)
        return app

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await self._read(request, ResponsesRequest)
        self._check_model(body.model)
        responses_api.check_request(body)
        conversation = responses_api.conversation_of(body, self._policy.chat.reads)
        sampling = body.sampling(body.max_output_tokens, "max_output_tokens")
        conversation = await self._policy.images.read(conversation)
        conversation = self._ledgers.conversation(request, conversation)
        prompt_ids = await self._policy.prompt(conversation)
        if body.stream:
            answer = ResponseStream(self._policy, body, conversation, prompt_ids)
            return await self._stream(
                request, prompt_ids, sampling, lambda events: answer.write(events, sampling)
            )
        completion = await self._policy.sample(prompt_ids, conversation, sampling)
        logprobs = responses_api.included_logprobs(body, completion, self._policy.chat)
        return json_answer(
            responses_api.response_of(body, completion, self._policy.model_name, logprobs)
        )

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        body: ChatRequest = await self._read(request, ChatRequest)
        self._check_model(body.model)
        num_choices = chat_api.check_request(body)
        conversation = chat_api.conversation_of(body, self._policy.chat.reads)
        sampling = body.sampling(*body.limit)
        conversation = await self._policy.images.read(conversation)
        conversation = self._ledgers.conversation(request, conversation)
        policy = self._policy
        prompt_ids = await policy.prompt(conversation)
        if body.stream:
            stream = ChatStream(policy, body, conversation, prompt_ids)
            return await self._stream(
                request,
                prompt_ids,
                sampling,
                lambda events: stream.write(events, sampling, num_choices),
            )
        completions = await gather_bounded(
            lambda own: policy.sample(prompt_ids, conversation, own),
            [chat_api.choice_sampling(sampling, index) for index in range(num_choices)],
        )
        return json_answer(
            chat_api.completion_of(body, completions, policy.chat, policy.model_name)
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body: CompletionRequest = await self._read(request, CompletionRequest)
        self._check_model(body.model)
        completions = Completions(self._policy, body, self._ledgers.ledger(request))
        if body.stream:
            longest = max(completions.jobs, key=lambda job: len(job.prompt_ids))
            return await self._stream(
                request, longest.prompt_ids, longest.sampling, completions.write
            )
        samples = await gather_bounded(completions.sample, range(len(completions.jobs)))
        return json_answer(completions.answer(samples))

    async def _stream(
        self,
        request: web.Request,
        prompt_ids: list[int],
        sampling: SamplingParams,
        write: Callable[[EventStream], Awaitable[None]],
    ) -> web.StreamResponse:
        # Raised while the status can still tell it.
        token_budget(len(prompt_ids), sampling, self._policy.generator.max_model_len)
        events = EventStream(request)
        await write(events)
        await events.response.write_eof()
        return events.response

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body: TokenizeRequest = await self._read(request, TokenizeRequest)
        self._check_model(body.model)
        if (body.messages is None) == (body.prompt is None):
            raise GenerationRequestError("give either messages or prompt", param="messages")
        if body.prompt is not None:
            token_ids = self._policy.chat.encode(
                body.prompt, add_special_tokens=body.add_special_tokens is not False
            )
        else:
            conversation = await self._policy.images.read(chat_api.conversation_of(body))
            token_ids = await self._policy.prompt(
                self._ledgers.conversation(request, conversation),
                add_generation_prompt=body.add_generation_prompt is not False,
            )
        tokenizer = self._policy.chat.tokenizer
        strings = tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
        return json_answer(
            {
                "count": len(token_ids),
                "max_model_len": self._policy.generator.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return json_answer({"object": "list", "data": [self._served_model()]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._check_model(request.match_info["name"])
        return json_answer(self._served_model())

    def _served_model(self) -> dict[str, Any]:
        return {
            "id": self._policy.model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "gymrl",
            "max_model_len": self._policy.generator.max_model_len,
        }

    async def _health(self, _: web.Request) -> web.StreamResponse:
        generator = self._policy.generator
        if isinstance(generator, DeferredGenerator) and generator.is_loading:
            return error_answer(503, "the model is still being loaded", "NotReadyError")
        fault = fault_of(generator)
        if fault is not None:
            return error_answer(503, fault, "GeneratorDiedError")
        return json_answer({"status": "ok"})

    def _check_model(self, model: str | None) -> None:
        if not self._policy.knows(model):
            raise UnknownModelError(
                f"The model {model!r} does not exist here; this server has "
                f"{self._policy.model_name!r}",
                param="model",
            )

    async def _read(self, request: web.Request, cls: type[Any]) -> Any:
        """What a request's body asks for.

        Raises:
            BodyTooLargeError: It says that it is larger than what is read.
            BrokenBodyError: It is not packed as its headers say.
            GenerationRequestError: It is no JSON object.
        """
        size = request.content_length or 0
        if size > self._max_body_bytes:
            raise BodyTooLargeError(self._size_limit)
        try:
            return read_request(await read_body(request), cls)
        except web.RequestPayloadError as error:
            raise BrokenBodyError(f"the body can't be read: {error}") from error

    @property
    def _size_limit(self) -> str:
        return f"the body is over max_body_bytes={self._max_body_bytes}"

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return error_answer(413, self._size_limit, INVALID)
        except web.HTTPException as error:
            return status_answer(error, request)
        except ClientGoneError as error:
            logger.debug("%s %s: %s", request.method, request.path, error)
            return error_answer(499, str(error), "ClientGoneError")
        except Exception as error:
            known = told(error, request.path)
            if known.status == 500:
                logger.exception("%s %s failed", request.method, request.path)
            answer = known.answer()
            if isinstance(error, BrokenBodyError):
                answer.force_close()
            return answer
