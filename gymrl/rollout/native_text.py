"""Text to tokens and back for native rollouts.

The model's own tokens are never encoded from text. Only what comes from outside is: the first
prompt, once, and each observation, which is appended to the tokens sampled so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gymrl.errors import PrefixError
from gymrl.generation.chat import ChatFormat

_PROBE = "\u00b6gymrl\u00b6"
_TEMPLATE_ROLES = frozenset({"system", "user", "assistant", "tool"})


class TextCodec(Protocol):
    """How conversations are written as tokens."""

    def encode_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a first prompt, up to where the model goes on."""
        ...

    def encode_observation(
        self, observation: dict[str, str], sampled_ids: Sequence[int]
    ) -> list[int]:
        """Ids that follow an answer of the model, up to where it goes on.

        Args:
            observation: The environment's message.
            sampled_ids: The answer as sampled; whether it ended its turn can be seen on it.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, as environments read it."""
        ...


class RawText:
    """Contents as they are, one after the other, without roles or a template.

    For base models, and for environments that write the model's format themselves.

    Args:
        tokenizer: Of transformers, or anything with ``encode(text, add_special_tokens=False)``
            and ``decode(ids, skip_special_tokens=True)``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """See :meth:`TextCodec.encode_prompt`."""
        return self._encode("".join(message["content"] for message in messages))

    def encode_observation(
        self, observation: dict[str, str], sampled_ids: Sequence[int]
    ) -> list[int]:
        """See :meth:`TextCodec.encode_observation`."""
        return self._encode(observation["content"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """See :meth:`TextCodec.decode`."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class ChatText:
    """Conversations in the tokenizer's chat template.

    An observation is rendered as the turn that follows an assistant's, by the template itself: the
    end of the assistant's turn where the model did not write it, the message, and the opening of
    the next assistant's turn. A role that templates do not know (``environment``) is a user's.

    Args:
        chat: The tokenizer's format; :meth:`from_tokenizer` makes it.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> ChatText:
        """With everything read off the tokenizer's template.

        Raises:
            GenerationRequestError: The tokenizer has no chat template.
        """
        return cls(ChatFormat(tokenizer))

    def encode_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """See :meth:`TextCodec.encode_prompt`."""
        return self._chat.render([_known(message) for message in messages])

    def encode_observation(
        self, observation: dict[str, str], sampled_ids: Sequence[int]
    ) -> list[int]:
        """See :meth:`TextCodec.encode_observation`.

        Raises:
            PrefixError: The template writes no end of turn after an assistant's message.
        """
        # What a template writes after a turn does not depend on what was said before, so a short
        # stand-in conversation gives it at a cost that does not grow with the episode.
        conversation = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _PROBE},
            _known(observation),
        ]
        rendered: str = self._chat.tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        _, found, tail = rendered.partition(_PROBE)
        ids = self._chat.encode(tail)
        ends = self._chat.end_ids
        if not found or not ids or ids[0] not in ends:
            raise PrefixError(
                f"the chat template writes none of the end-of-turn tokens {sorted(ends)} right "
                "after an assistant's text; use a template that closes assistant turns, or RawText",
                received=ids[:4],
            )
        is_closed = bool(sampled_ids) and sampled_ids[-1] in ends
        return ids[1:] if is_closed else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """See :meth:`TextCodec.decode`."""
        return self._chat.decode(token_ids)


def _known(message: dict[str, str]) -> dict[str, str]:
    if message["role"] in _TEMPLATE_ROLES:
        return message
    return {"role": "user", "content": message["content"]}
