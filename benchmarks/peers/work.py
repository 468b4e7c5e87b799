"""What peers compute, the same on both: rows of arrays, and rollouts through an agent.

Runs in ``.venv-bench``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def make_row(form: str) -> list[dict[str, Any]]:
    """Two messages of 2,048 token ids, log-probabilities and 6 kB of text."""
    text = "six kilobytes of text".ljust(6000, ".")
    if form == "lists":
        ids = list(range(100_000, 102_048))
        logprobs = [-0.001 * i for i in range(2048)]
        return [{"token_ids": ids, "logprobs": logprobs, "text": text} for _ in range(2)]
    id_array = np.arange(2048, dtype=np.int32)
    logprob_array = np.linspace(-5, 0, 2048, dtype=np.float32)
    return [{"token_ids": id_array, "logprobs": logprob_array, "text": text} for _ in range(2)]


class Roller:
    """Posts rows to an agent and makes arrays and texts of its answers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def roll_out(
        self, body: bytes, tokenizer: Tokenizer, by_msgspec: bool = False
    ) -> dict[str, Any]:
        """One row; its answer is read by aiohttp's ``json()``, or by msgspec."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            if by_msgspec:
                result = msgspec.json.decode(await response.read())
            else:
                result = await response.json()
        return trajectory(result, tokenizer)


def trajectory(result: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Turns of one answer: new prompt tokens and sampled tokens as arrays, and their texts."""
    turns: list[dict[str, Any]] = []
    seen: list[int] = []
    for item in result["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt, sampled = item.pop("prompt_token_ids"), item.pop("generation_token_ids")
        if prompt[: len(seen)] != seen:
            raise ValueError("the prompt does not begin with the tokens so far")
        added = prompt[len(seen) :]
        texts = tokenizer.decode_batch([added, sampled], skip_special_tokens=False)
        turns.append(
            {
                "prompt_ids": np.asarray(added, np.int32),
                "sampled_ids": np.asarray(sampled, np.int32),
                "logprobs": np.asarray(item.pop("generation_log_probs"), np.float32),
                "prompt_text": texts[0],
                "sampled_text": texts[1],
            }
        )
        seen = prompt + sampled
    return {"turns": turns, "reward": result["reward"], "result": result}
