"""What a first writing of the same step looks like: ``json.loads``, lists, ``torch.tensor``.

Like the environment of NeMo RL it keeps, for every turn, the text of the whole prompt.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def group_tensors(bodies: list[bytes], tokenizer: Tokenizer) -> dict[str, Any]:
    """Message logs, padded tokens, masks and log-probabilities of a group."""
    logs = [_message_log(json.loads(body), tokenizer) for body in bodies]
    flat = [_flat(log) for log in logs]
    return {
        "message_log": logs,
        "token_ids": pad_sequence([ids for ids, _, _ in flat], batch_first=True),
        "token_mask": pad_sequence([mask for _, mask, _ in flat], batch_first=True),
        "generation_logprobs": pad_sequence([values for _, _, values in flat], batch_first=True),
    }


def _message_log(result: dict[str, Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    log: list[dict[str, Any]] = []
    seen: list[int] = []
    for item in result["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt = item.pop("prompt_token_ids")
        sampled = item.pop("generation_token_ids")
        logprobs = item.pop("generation_log_probs")
        if prompt[: len(seen)] != seen:
            raise ValueError("the prompt does not begin with the tokens so far")
        item["prompt_str"] = tokenizer.decode(prompt, skip_special_tokens=False)
        item["generation_str"] = tokenizer.decode(sampled, skip_special_tokens=False)
        log.append({"role": "user", "token_ids": torch.tensor(prompt[len(seen) :])})
        log.append(
            {
                "role": "assistant",
                "content": item["generation_str"],
                "token_ids": torch.tensor(sampled),
                "generation_logprobs": torch.tensor(logprobs),
            }
        )
        seen = prompt + sampled
    return log


def _flat(log: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.cat([message["token_ids"] for message in log])
    mask = torch.cat([torch.full((len(m["token_ids"]),), m["role"] == "assistant") for m in log])
    logprobs = torch.cat(
        [m.get("generation_logprobs", torch.zeros(len(m["token_ids"]))) for m in log]
    )
    return ids, mask, logprobs
