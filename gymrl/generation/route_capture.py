"""Which experts a transformers model sent its tokens through, taken where they are used.

Every mixture-of-experts layer hands the chosen ids to a module of experts, as its second argument.
That is where they are read: whatever a router does with its scores (groups, biases, shared experts),
those ids are what the layer computes with.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gymrl.errors import ConfigError, GenerationError
from gymrl.extras import optional_imports
from gymrl.routed_experts import count_experts, routes_dtype

with optional_imports():
    import torch

if TYPE_CHECKING:
    from gymrl.types import RoutesArray

_IDS_PARAMETERS = frozenset({"top_k_index", "router_indices", "selected_experts"})


class RouteCapture:
    """Reads the routes of a model's forward passes; belongs to the thread that runs them.

    Args:
        model: A transformers model; hooks stay on its experts until :meth:`close`.

    Raises:
        ConfigError: It has no experts, or none of a kind that is told which ids it computes.
    """

    def __init__(self, model: Any) -> None:
        layers = [module for module in model.modules() if _ids_parameter(module) is not None]
        if not layers:
            raise ConfigError(
                f"return_routed_experts: {type(model).__name__} has no experts that routes could be "
                "read from; leave the setting out for a dense model, or serve the model with vLLM",
                setting="return_routed_experts",
            )
        self._dtype = getattr(torch, routes_dtype(count_experts(model.config)))
        self._num_layers = len(layers)
        self._found: list[torch.Tensor] | None = None
        self._hooks = [
            layer.register_forward_pre_hook(self._take, with_kwargs=True) for layer in layers
        ]

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _take(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._found is not None:
            ids = args[1] if len(args) > 1 else kwargs[str(_ids_parameter(module))]
            self._found.append(ids.to(self._dtype))

    @contextlib.contextmanager
    def forward(self) -> Iterator[list[torch.Tensor]]:
        """One forward pass; the list gets the ids of each layer in turn, ``[B * T, K]``."""
        found: list[torch.Tensor] = []
        self._found = found
        try:
            yield found
        finally:
            self._found = None

    def routes(self, found: list[torch.Tensor], num_rows: int) -> RoutesArray:
        """``[num_rows, T, L, K]``: what a forward pass over that many rows left.

        Raises:
            GenerationError: A layer was passed over, or called twice.
        """
        if len(found) != self._num_layers:
            raise GenerationError(
                f"{len(found)} of {self._num_layers} layers of experts were called in a forward "
                "pass; routes can't be told apart"
            )
        stacked = torch.stack([ids.reshape(-1, ids.shape[-1]) for ids in found], dim=1)
        whole = stacked.reshape(num_rows, -1, *stacked.shape[1:])
        array: RoutesArray = whole.cpu().numpy()
        return array


def _ids_parameter(module: Any) -> str | None:
    """The parameter by which a module of experts is told the ids it computes."""
    if "Experts" not in type(module).__name__:
        return None
    names = list(inspect.signature(type(module).forward).parameters)
    return names[2] if len(names) > 2 and names[2] in _IDS_PARAMETERS else None
