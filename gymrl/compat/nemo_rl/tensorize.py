"""Token fields of plain results as tensors, in place, for results that came as JSON.

Results of :class:`~gymrl.compat.nemo_rl.NemoGym` have tensors from the start.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from gymrl.errors import RowTypeError

_TYPES = {"generation_logprobs": torch.float32}


def tensorize_by_key(message_logs: Sequence[MutableMapping[str, Any]], key: str) -> None:
    """Make tensors of one field of some messages, in place; messages without it stay as they are.

    Args:
        message_logs: Messages of one log.
        key: ``generation_logprobs`` becomes float32, any other field int64 or, where it holds
            fractions, float32. A tensor stays as it is.

    Raises:
        RowTypeError: A message's field is no list of numbers; names the message. Those before it
            are tensors.
    """
    for place, message in enumerate(message_logs):
        value = message.get(key)
        if value is None or isinstance(value, torch.Tensor):
            continue
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            array = np.asarray(None)
        if array.dtype.kind not in "iuf" and array.size:
            raise RowTypeError(f"message {place}: {key} is no list of numbers")
        is_fraction = array.dtype.kind == "f" and array.size > 0
        dtype = _TYPES.get(key, torch.float32 if is_fraction else torch.int64)
        message[key] = torch.tensor(array.tolist(), dtype=dtype)


def tensorize_nemo_gym_result(result: MutableMapping[str, Any]) -> None:
    """Make tensors of a result's ``token_ids`` and ``generation_logprobs``, in place.

    Args:
        result: With ``message_log``, and ``input_message_log`` where it has one.

    Raises:
        RowTypeError: See :func:`tensorize_by_key`.
    """
    for name in ("input_message_log", "message_log"):
        messages = result.get(name) or ()
        tensorize_by_key(messages, "token_ids")
        tensorize_by_key(messages, "generation_logprobs")
