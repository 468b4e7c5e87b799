"""A fake vLLM server with the development routes, whose weights are a word that a trainer sends."""

import anyio
from aiohttp import web

from gymrl.generation.weights import GLOO_BACKEND, TransferWeights
from tests.integration.vllm_http.fake_vllm import FakeVllm


class UpdatableVllm(FakeVllm):
    """It keeps the weights that it has until a transfer was received, as ``gymrl_gloo`` does.

    Attributes:
        backend: What takes transfers; None: nothing does.
        num_workers: Of its engine.
        weights: What it samples from.
        version: How it calls them.
        is_paused: Whether it samples.
        orders: That it got, in order.
        faults: What it answers to an order instead of obeying, by the order's last word.
        hangs: Orders that it never answers.
        has_extension: It was started with gymrl's worker extension.
    """

    def __init__(self) -> None:
        super().__init__(has_route_for_tokens=False)
        self.backend: str | None = GLOO_BACKEND
        self.num_workers = 1
        self.has_extension = True
        self.orders: list[str] = []
        self.faults: dict[str, str] = {}
        self.hangs: set[str] = set()
        self.met: list[dict] = []
        self.is_paused = False
        self.weights, self.version = "first", "default"
        self._is_open = self._is_touched = False

    def forget_all(self) -> None:
        """As a server that was started again."""
        self.met = []
        self.is_paused = self._is_open = self._is_touched = False
        self.weights, self.version = "first", "default"

    def leave_open(self) -> None:
        """As one whose trainer and generator died in the middle of a transfer."""
        self._is_open = True

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/is_paused", self._answer(lambda _: {"is_paused": self.is_paused}))
        router.add_get("/weight_info", self._answer(lambda _: {"weight_version": self.version}))
        router.add_get("/get_world_size", self._answer(lambda _: {"world_size": self.num_workers}))
        for path in (
            "pause",
            "resume",
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
            "update_weight_version",
            "collective_rpc",
        ):
            router.add_post(f"/{path}", self._order)

    def _answer(self, content):
        async def answer(request: web.Request) -> web.Response:
            return web.json_response(content(request))

        return answer

    async def _order(self, request: web.Request) -> web.Response:
        body = await request.json()
        order = body.get("method") or request.path.strip("/")
        if order != "gymrl_transfer_backend":
            self.orders.append(order)
        if order in self.hangs:
            self.is_paused = self.is_paused or order == "pause"
            await anyio.sleep_forever()
        fault = self.faults.get(order)
        if order.startswith("gymrl_") and not self.has_extension:
            fault = f"no attribute {order}"
        if fault is not None:
            return web.json_response({"error": {"message": fault}}, status=500)
        return web.json_response(getattr(self, f"_{order}")(body))

    def _pause(self, body: dict) -> dict:
        self.is_paused = True
        return {}

    def _resume(self, body: dict) -> dict:
        self.is_paused = False
        return {}

    def _init_weight_transfer_engine(self, body: dict) -> dict:
        self.met.append(body["init_info"])
        return {}

    def _start_weight_update(self, body: dict) -> dict:
        assert self.is_paused
        assert not self._is_open
        self._is_open, self._is_touched = True, False
        return {}

    def _update_weights(self, body: dict) -> dict:
        assert self.met
        self.weights = body["update_info"]["word"]
        self._is_touched = True
        return {}

    def _finish_weight_update(self, body: dict) -> dict:
        assert self._is_open
        self._is_open, self.version = False, body["weight_version"]
        return {}

    def _update_weight_version(self, body: dict) -> dict:
        self.version = body["new_version"]
        return {}

    def _gymrl_transfer_backend(self, body: dict) -> dict:
        return {"results": [self.backend] * self.num_workers}

    def _gymrl_abandon_transfer(self, body: dict) -> dict:
        self._is_open = False
        return {"results": [str(self._is_touched)]}

    def _gymrl_forget_cache(self, body: dict) -> dict:
        assert self.is_paused
        return {"results": [None]}

    def _gymrl_load_weights(self, body: dict) -> dict:
        self.weights = body["kwargs"]["directory"].rpartition("/")[2]
        return {"results": [None]}


def sent(word: str, num_engines: int = 2, port: int = 1, num_workers: int = 1) -> TransferWeights:
    """What a sender of gymrl describes; it is another one where the port is."""
    return TransferWeights(
        backend=GLOO_BACKEND,
        init_info={"port": port, "world_size": 1 + num_engines * num_workers},
        update_info={"word": word},
        engines=tuple({"first_rank": 1 + n * num_workers} for n in range(num_engines)),
    )
