"""A server that answers as vLLM was recorded to, and fails as vLLM and networks do."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from gymrl.addresses import bound_socket
from gymrl.listening import Door

DATA = Path(__file__).parents[2] / "data" / "vllm"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def recorded(name: str) -> bytes:
    return (DATA / name).read_bytes()


class FakeVllm:
    """One server: recorded answers, until `behave` says otherwise.

    Its port is nobody else's until it is closed, also while it is stopped.

    Attributes:
        requests: Bodies of the calls it got, the ones of inspections left out.
        behave: Answers a call in place of the recording.
        healthy: What ``/health`` says.
        key: What calls must carry; None: nothing. A refusal repeats what came, as some proxies do.
    """

    def __init__(self, has_route_for_tokens: bool = True) -> None:
        self.requests: list[dict] = []
        self.behave: Handler | None = None
        self.healthy = True
        self.key: str | None = None
        self.refusal = 401
        self._has_route = has_route_for_tokens
        self._runner: web.AppRunner | None = None
        self._door: Door | None = None
        self._place = bound_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        self.add_routes(app.router)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        self._door = Door(self._runner, bound_socket("127.0.0.1", self.port))
        await self._door.open()

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """More of them, in a fake that has more."""

    @property
    def port(self) -> int:
        return self._place.getsockname()[1]

    async def close(self) -> None:
        """Stop for good."""
        await self.stop()
        self._place.close()

    async def stop(self) -> None:
        """Answer nobody, until it is started again."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await self._door.close()
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        came = request.headers.get("Authorization")
        if self.key is None or request.path == "/health" or came == f"Bearer {self.key}":
            return await handler(request)
        error = {"message": f"Unauthorized: {came}"}
        return web.json_response({"error": error}, status=self.refusal)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.Response(body=recorded("models.json"), content_type="application/json")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self._has_route:
            return web.json_response({"error": {"message": "not enabled"}}, status=403)
        body = await request.json()
        if not body:
            return web.json_response({"error": {"message": "token_ids: missing"}}, status=400)
        if body["sampling_params"]["top_k"] == 1:
            return web.json_response(
                {
                    "choices": [
                        {
                            "token_ids": [7],
                            "finish_reason": "length",
                            "logprobs": {"content": [{"token_id": 7, "logprob": 0.0}]},
                        }
                    ]
                }
            )
        self.requests.append(body)
        if self.behave is not None:
            return await self.behave(request)
        if body["stream"]:
            return web.Response(
                body=recorded("generate_stream.txt"), content_type="text/event-stream"
            )
        return web.Response(body=recorded("generate.json"), content_type="application/json")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["top_k"] == 1:
            logprobs = {"token_logprobs": [0.0]}
            choice = {"token_ids": [7], "finish_reason": "length", "logprobs": logprobs}
            return web.json_response({"choices": [choice]})
        self.requests.append(body)
        if self.behave is not None:
            return await self.behave(request)
        return web.Response(body=recorded("completions_ids.json"), content_type="application/json")
