"""Sequences decoded together: one left-padded key-value cache, one row of it per request.

Everything here runs in the generator's own thread and knows no event loop. Requests join between
steps (their prompts are prefilled, then their rows merged into the cache) and leave as soon as they
are finished or cancelled. Rows end at the same column, so that a step appends one column to all::

    . . . a b c d        a request that joined with a shorter prompt is padded on the left;
    p q r s t u v        when the longest row leaves, the columns nobody uses are cut off
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gymrl.errors import BadLogprobsError, GenerationError
from gymrl.extras import optional_imports
from gymrl.generation.decode_request import Request, settle
from gymrl.generation.image_tensors import TOKEN_TYPES
from gymrl.generation.sampling import choose, sampled_logprob

with optional_imports():
    import torch
    from transformers import DynamicCache

if TYPE_CHECKING:
    from gymrl.config import LogprobsMode
    from gymrl.generation.route_capture import RouteCapture
    from gymrl.types import RoutesArray

MAX_PREFILL_TOKENS = 4096
"""Padded prompt tokens that one forward pass may prefill; a single longer prompt goes alone."""


def cache_argument(model: Any) -> str:
    """What the model's forward pass calls its key-value cache: transformers renames it in 5.x."""
    # What wraps a model hands on what it is given, and tells no names.
    for module in model.modules():
        names = inspect.signature(type(module).forward).parameters
        if "cache" in names or "past_key_values" in names:
            return "cache" if "cache" in names else "past_key_values"
    return "past_key_values"


class DecodeBatch:
    """The running batch of one model.

    Args:
        model: A transformers causal language model with a key-value cache.
        mode: Which log-probabilities requests get.
        version: Of the model's weights.
        capture: Reads routes of the model; None: requests get none.
        image_token_id: The token of images, where the model wants their places marked.
    """

    def __init__(
        self,
        model: Any,
        mode: LogprobsMode,
        version: str,
        capture: RouteCapture | None = None,
        image_token_id: int | None = None,
    ) -> None:
        self.image_token_id = image_token_id
        self.version = version
        self._capture = capture
        self._model = model
        self._cache_argument = cache_argument(model)
        self._mode: LogprobsMode = mode
        self._device: torch.device = model.device
        self._cache: Any = None
        self._lengths: list[int] = []
        self.requests: list[Request] = []

    def clear(self) -> None:
        """Forget every request; their futures are the caller's business."""
        self.requests, self._lengths, self._cache = [], [], None

    def drop_cancelled(self) -> None:
        """Free the rows whose callers are gone."""
        self._keep([i for i, request in enumerate(self.requests) if not request.future.cancelled()])

    @torch.inference_mode()
    def join(self, joining: Sequence[Request]) -> None:
        """Prefill the prompts of `joining`, sample their first tokens, and merge what goes on."""
        for request in joining:
            request.sampled_from(self.version)
            if request.images is not None:
                self._join_with_images(request)
        of_text = [request for request in joining if request.images is None]
        prompts = list(dict.fromkeys(request.prompt_ids for request in of_text))
        for chunk in _prefill_chunks(prompts):
            cache, logits, routes = self._prefill(chunk)
            place = {prompt: row for row, prompt in enumerate(chunk)}
            requests = [request for request in of_text if request.prompt_ids in place]
            rows = [place[request.prompt_ids] for request in requests]
            if routes is not None:
                for request, row in zip(requests, rows, strict=True):
                    # A copy: the padded rows of the whole chunk would stay in memory with it.
                    request.computed_with(routes[row, -len(request.prompt_ids) :].copy())
            if rows != list(range(len(chunk))):
                index = torch.tensor(rows, device=self._device)
                logits = logits[index]
                cache.batch_select_indices(index)
            going_on = self._take_tokens(requests, logits)
            if not going_on:
                continue
            if len(going_on) < len(requests):
                cache.batch_select_indices(torch.tensor(going_on, device=self._device))
            lengths = [len(requests[i].prompt_ids) for i in going_on]
            self._merge([requests[i] for i in going_on], lengths, cache)

    def _join_with_images(self, request: Request) -> None:
        cache, logits, routes = self._prefill_with_images(request, request.prompt_ids)
        if routes is not None:
            request.computed_with(routes[0])
        if self._take_tokens([request], logits):
            self._merge([request], [len(request.prompt_ids)], cache)

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute every running request's cache again: the weights are those of `version` now."""
        running = self.requests
        self.clear()
        for request in running:
            if request.images is not None:
                self._recompute_with_images(request)
        requests = {id(request): request for request in running if request.images is None}
        # The newest token is not in the cache: it is what the next step begins with.
        seen = {key: (*r.prompt_ids, *r.token_ids[:-1]) for key, r in requests.items()}
        for chunk in _prefill_chunks(list(dict.fromkeys(seen.values()))):
            # What was sampled was sampled with the routes of before; these are not kept.
            cache, _, _ = self._prefill(chunk)
            place = {sequence: row for row, sequence in enumerate(chunk)}
            keys = [key for key, sequence in seen.items() if sequence in place]
            index = torch.tensor([place[seen[key]] for key in keys], device=self._device)
            cache.batch_select_indices(index)
            for key in keys:
                requests[key].sampled_from(self.version)
            self._merge([requests[key] for key in keys], [len(seen[key]) for key in keys], cache)

    def _recompute_with_images(self, request: Request) -> None:
        if self.image_token_id in request.token_ids[:-1]:
            error = GenerationError(
                "the model sampled an image token, and its weights changed before the call was "
                "done: what it saw can't be computed again"
            )
            settle(request.future, error)
            return
        seen = (*request.prompt_ids, *request.token_ids[:-1])
        cache, _, _ = self._prefill_with_images(request, seen)
        request.sampled_from(self.version)
        self._merge([request], [len(seen)], cache)

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one token for every running request; the finished ones leave."""
        width = max(self._lengths) + 1
        positions = [
            [length + request.position_offset]
            for length, request in zip(self._lengths, self.requests, strict=True)
        ]
        outputs, routes = self._forward(
            input_ids=torch.tensor(
                [[request.token_ids[-1]] for request in self.requests], device=self._device
            ),
            attention_mask=self._mask([length + 1 for length in self._lengths], width),
            position_ids=torch.tensor(positions, device=self._device),
            cache=self._cache,
        )
        if routes is not None:
            for request, row in zip(self.requests, routes, strict=True):
                request.computed_with(row)
        self._lengths = [length + 1 for length in self._lengths]
        self._keep(self._take_tokens(self.requests, outputs.logits[:, -1]))

    def _forward(self, *, cache: Any, **inputs: Any) -> tuple[Any, RoutesArray | None]:
        """The model's outputs, and ``[B, T, L, K]`` where routes are captured."""
        inputs[self._cache_argument] = cache
        if self._capture is None:
            return self._model(**inputs, use_cache=True, logits_to_keep=1), None
        with self._capture.forward() as found:
            outputs = self._model(**inputs, use_cache=True, logits_to_keep=1)
        return outputs, self._capture.routes(found, len(inputs["input_ids"]))

    def _prefill(
        self, prompts: Sequence[tuple[int, ...]]
    ) -> tuple[Any, torch.Tensor, RoutesArray | None]:
        lengths = [len(prompt) for prompt in prompts]
        width = max(lengths)
        mask = self._mask(lengths, width)
        input_ids = torch.tensor(
            [(0,) * (width - len(prompt)) + prompt for prompt in prompts], device=self._device
        )
        cache: Any = DynamicCache()
        outputs, routes = self._forward(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp_(min=0),
            cache=cache,
        )
        return cache, outputs.logits[:, -1], routes

    def _prefill_with_images(
        self, request: Request, ids: Sequence[int]
    ) -> tuple[Any, torch.Tensor, RoutesArray | None]:
        """The prompt alone: the model finds its positions from its images."""
        input_ids = torch.tensor([list(ids)], device=self._device)
        inputs = dict(request.images or {})
        if self.image_token_id is not None:
            inputs[TOKEN_TYPES] = (input_ids == self.image_token_id).int()
        cache: Any = DynamicCache()
        outputs, routes = self._forward(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            cache=cache,
            **inputs,
        )
        request.position_offset = _position_offset(self._model, outputs)
        return cache, outputs.logits[:, -1], routes

    def _mask(self, lengths: Sequence[int], width: int) -> torch.Tensor:
        columns = torch.arange(width, device=self._device).unsqueeze(0)
        starts = torch.tensor([[width - length] for length in lengths], device=self._device)
        return (columns >= starts).long()

    def _take_tokens(self, requests: Sequence[Request], logits: torch.Tensor) -> list[int]:
        """Sample for each request, settle those that end; the places of those that go on."""
        samplings = [request.sampling for request in requests]
        tokens, processed = choose(logits, samplings, [request.uniform() for request in requests])
        if self._mode == "raw":
            picked = sampled_logprob(logits, tokens, samplings, "raw")
        else:
            picked = processed.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        going_on = []
        for place, (request, token_id, logprob) in enumerate(
            zip(requests, tokens.tolist(), picked.tolist(), strict=True)
        ):
            try:
                result = request.append(token_id, logprob)
            except BadLogprobsError as error:
                settle(request.future, error)
                continue
            if result is None:
                going_on.append(place)
            else:
                settle(request.future, result)
        return going_on

    def _merge(self, requests: Sequence[Request], lengths: Sequence[int], cache: Any) -> None:
        if not self.requests:
            self._cache = cache
        else:
            width = max(*self._lengths, *lengths)
            for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
                mine.keys = torch.cat([_fit(mine.keys, width), _fit(theirs.keys, width)])
                mine.values = torch.cat([_fit(mine.values, width), _fit(theirs.values, width)])
        self.requests = [*self.requests, *requests]
        self._lengths = [*self._lengths, *lengths]
        self._trim()

    def _keep(self, places: Sequence[int]) -> None:
        if len(places) == len(self.requests):
            return
        if not places:
            self.clear()
            return
        self.requests = [self.requests[i] for i in places]
        self._lengths = [self._lengths[i] for i in places]
        self._cache.batch_select_indices(torch.tensor(places, device=self._device))
        self._trim()

    def _trim(self) -> None:
        width = max(self._lengths)
        for layer in self._cache.layers:
            layer.keys, layer.values = _fit(layer.keys, width), _fit(layer.values, width)


def _fit(states: torch.Tensor, width: int) -> torch.Tensor:
    """Pad or cut ``[B, heads, columns, size]`` on the left to `width` columns."""
    missing = width - states.shape[-2]
    if missing > 0:
        return torch.nn.functional.pad(states, (0, 0, missing, 0))
    return states[..., -missing:, :] if missing < 0 else states


def _prefill_chunks(prompts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Prompts in chunks of similar length, each within the prefill budget."""
    chunks: list[list[tuple[int, ...]]] = []
    for prompt in sorted(prompts, key=len):
        if chunks and (len(chunks[-1]) + 1) * len(prompt) <= MAX_PREFILL_TOKENS:
            chunks[-1].append(prompt)
        else:
            chunks.append([prompt])
    return chunks


def _position_offset(model: Any, outputs: Any) -> int:
    """How far the images of the prompt that was just prefilled move the positions of what follows.

    Models with positions in three dimensions say so: in their outputs, and since transformers 5.20
    in an attribute alone.
    """
    offsets = getattr(outputs, "rope_deltas", None)
    if offsets is None:
        offsets = getattr(getattr(model, "base_model", model), "rope_deltas", None)
    return 0 if offsets is None else int(offsets.reshape(-1)[0])
